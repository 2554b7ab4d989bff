"""Tables read off diffusers' schedulers, and the update that they drive."""

from __future__ import annotations

import copy
import dataclasses

import diffusers
import pytest
import torch

from batchgen.engine.samplers import NotAffineError, Samplers, probe, update
from batchgen.errors import UsageError
from batchgen.models import unet_facts
from tests import tiny


@pytest.fixture(scope="module")
def samplers() -> Samplers:
    found = unet_facts.stable_diffusion(tiny.demo.UNET, tiny.demo.VAE, tiny.SD1_SCHEDULER, 77)
    return Samplers(diffusers.PNDMScheduler.from_config(tiny.SD1_SCHEDULER), found)


def test_update_is_the_sum_of_its_terms_per_row() -> None:
    x, e = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    coefficients = torch.tensor([[2.0, -1.0], [0.5, 3.0]])
    made = update(coefficients, [x, e])
    assert torch.allclose(made[0], 2 * x[0] - e[0])
    assert torch.allclose(made[1], 0.5 * x[1] + 3 * e[1])
    assert update(coefficients, [x.half(), e.half()]).dtype == torch.float32


def test_ddim_coefficients_are_the_papers(samplers: Samplers) -> None:
    """Song et al. 2021, equation 12 with sigma 0."""
    table = samplers.table("ddim", 10)
    alphas = samplers.scheduler("ddim", 10).alphas_cumprod
    now, then = alphas[int(table.timesteps[3])], alphas[int(table.timesteps[4])]
    over_x = (then / now).sqrt()
    over_e = (1 - then).sqrt() - over_x * (1 - now).sqrt()
    assert torch.allclose(table.coefficients[3], torch.stack([over_x, over_e]), rtol=1e-5)


def test_ancestral_noise_has_the_schedulers_own_deviation(samplers: Samplers) -> None:
    """Karras et al. 2022 / k-diffusion: sigma_up^2 = s_t^2 (s^2 - s_t^2) / s^2; none at the last step."""
    table = samplers.table("euler_ancestral", 6)
    sigmas = samplers.scheduler("euler_ancestral", 6).sigmas
    up = (sigmas[1:] ** 2 * (sigmas[:-1] ** 2 - sigmas[1:] ** 2) / sigmas[:-1] ** 2).sqrt()
    assert torch.allclose(table.coefficients[:, 2], up, rtol=1e-4)
    assert table.draws.all()
    assert table.coefficients[-1, 2] == 0


def test_pndm_remembers_what_the_scheduler_remembers(samplers: Samplers) -> None:
    """The second evaluation repeats the first step and its prediction is not kept (Liu et al. 2022, PLMS)."""
    table = samplers.table("pndm", 8)
    assert table.keeps.tolist() == [True, False, True, True, True, True, True, True, False]


def test_tables_are_kept_and_schedulers_are_fresh(samplers: Samplers) -> None:
    assert samplers.table("heun", 5) is samplers.table("heun", 5)
    first, second = samplers.scheduler("heun", 5), samplers.scheduler("heun", 5)
    assert first is not second
    assert first.timesteps is not second.timesteps


@pytest.mark.parametrize("form", [("x", "e"), ("x", "x1", "e")])
def test_a_form_that_is_too_small_is_refused(samplers: Samplers, form: tuple[str, ...]) -> None:
    with pytest.raises(NotAffineError, match="lacks"):
        probe(lambda: samplers.scheduler("dpmpp_2m", 5), form)


def test_a_clipping_scheduler_is_refused() -> None:
    """Clipping maps unit vectors as no clipping would; random inputs tell."""

    def clipping() -> diffusers.DDIMScheduler:
        made = diffusers.DDIMScheduler.from_config(tiny.SD1_SCHEDULER, clip_sample=True)
        made.set_timesteps(5)
        return made

    with pytest.raises(NotAffineError):
        probe(clipping, ("x", "e"))


def test_a_scheduler_that_bends_late_is_refused(samplers: Samplers) -> None:
    class Bent(diffusers.DDIMScheduler):
        def step(self, model_output, timestep, sample, **rest):
            made = super().step(model_output, timestep, sample, **rest)
            return (made[0] + 0.01 * (sample * model_output if int(timestep) < 300 else 0),)

    def bent() -> Bent:
        made = Bent.from_config(tiny.SD1_SCHEDULER)
        made.set_timesteps(5)
        return made

    with pytest.raises(NotAffineError, match="update of evaluation 3"):
        probe(bent, ("x", "e"))


def test_noise_in_a_dtype_of_its_own_is_refused() -> None:
    """The SDE solvers draw float32 whatever the network's dtype is."""

    def sde() -> diffusers.DPMSolverMultistepScheduler:
        options = {"algorithm_type": "sde-dpmsolver++"}
        made = diffusers.DPMSolverMultistepScheduler.from_config(tiny.SD1_SCHEDULER, **options)
        made.set_timesteps(5)
        return made

    with pytest.raises(NotAffineError, match="dtype"):
        probe(sde, ("x", "x1", "e", "e1", "z"))


def test_a_scheduler_that_diffusers_cannot_make_is_a_usage_error() -> None:
    scheduler = {"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver++"}
    found = unet_facts.stable_diffusion(tiny.demo.UNET, tiny.demo.VAE, scheduler, 77)
    samplers = Samplers(diffusers.DPMSolverMultistepScheduler.from_config(scheduler), found)
    with pytest.raises(UsageError, match="'DEISMultistepScheduler' cannot be made"):
        samplers.scheduler("DEISMultistepScheduler", 5)
    assert samplers.table("deis", 5).num_evaluations == 5


def test_seeds_above_32_bits_share_the_noise_of_their_low_bits() -> None:
    def noise(seed: int) -> torch.Tensor:
        return torch.randn(1, 4, 8, 8, generator=torch.Generator("cpu").manual_seed(seed))

    for seed in (2**32, 2**32 + 5, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 9, 2**64 - 1):
        row = tiny.row(seed=seed)
        assert torch.equal(noise(seed), noise(row.noise_seed))
        assert row.noise_seed < 2**32
    assert not torch.equal(noise(1), noise(2))


class TestFinishedRows:
    """Case 36: rows of 5, 10 and 20 steps in one batch."""

    @pytest.mark.parametrize("sampler", ["ddim", "euler_ancestral", "heun", "pndm"])
    def test_each_equals_its_run_alone(self, sampler: str) -> None:
        engine = tiny.engine("sd1")
        rows = [tiny.row(i, sampler=sampler, steps=steps) for i, steps in enumerate((5, 10, 20))]
        together = tiny.denoise(engine, rows)
        for i, row in enumerate(rows):
            assert tiny.difference(together[i], tiny.denoise(engine, [row])[0]) < 1e-4

    def test_a_finished_row_stands_still(self) -> None:
        """Its bits are those of a batch of the same size that ends with it."""
        engine = tiny.engine("sd1")
        rows = [tiny.row(i, sampler="pndm", steps=4) for i in range(3)]
        longer = [rows[0], *(dataclasses.replace(row, steps=9) for row in rows[1:])]
        short, long = tiny.denoise(engine, rows), tiny.denoise(engine, longer)
        assert torch.equal(short[0], long[0])
        assert not torch.equal(short[1], long[1])


def test_own_scheduler_is_not_stepped(samplers: Samplers) -> None:
    before = copy.deepcopy(samplers._own.__dict__)
    samplers.table("PNDMScheduler", 7)
    assert samplers._own.counter == before["counter"]
    assert samplers._own.ets == before["ets"]
