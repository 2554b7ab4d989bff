"""Every family against diffusers' own pipeline: one table, a row a family."""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from batchgen.engine.engine import Engine
from batchgen.errors import UsageError
from batchgen.models import hub
from batchgen.models.family import Conditioning
from batchgen.models.folder import facts_of, find_model
from batchgen.models.footprint import demand_of
from batchgen.records import Batch, Image, Row
from batchgen.weights import Model
from tests import families, tiny

PROMPTS = ("A red CUBE ", tiny.LONG, "", "🐉 龍 é")
"""The first and the last are of one length to a tokenizer of bytes."""
NEGATIVES = (None, "a word", "blurry, ugly", "")
SEEDS = (0, 2**32 + 7, 2**64 - 1, 12)
STEPS = (2, 4, 3, 4)
GUIDED = (1.5, 7.3, 4.0, 3.0)
PLAIN = (1.0, 0.0, 1.0, 0.5)
WIDE: Mapping[str, int] = {"width": 96, "height": 64}

TABLE: Mapping[str, Mapping[str, Any]] = {
    "sd1": {"sampler": "PNDMScheduler"},
    "sdxl": {"sampler": "EulerDiscreteScheduler"},
    "sd3": {"sampler": "euler"},
    "sd3.5": {"sampler": "euler", **WIDE},
    "flux": {"sampler": "euler", **WIDE},
    "schnell": {"sampler": "euler", "guidance_scale": 0.0},
    "klein": {"sampler": "euler", "guidance_scale": 0.0},
    "klein-base": {"sampler": "euler", **WIDE},
    "pag": {"sampler": "DPMSolverMultistepScheduler", **WIDE},
    "pixart": {"sampler": "DPMSolverMultistepScheduler", **WIDE},
    "qwen": {"sampler": "euler", "guidance_scale": 0.0, **WIDE},
    "z-image": {"sampler": "euler", **WIDE},
    "cogview": {"sampler": "euler", **WIDE},
    "chroma": {"sampler": "euler", **WIDE},
    "bria": {"sampler": "FlowMatchEulerDiscreteScheduler", **WIDE},
    "pixart-alpha": {"sampler": "DPMSolverMultistepScheduler"},
    "sana": {"sampler": "dpmpp_2m", **WIDE},
    "sana-euler": {"sampler": "euler"},
    "lumina": {"sampler": "euler", **WIDE},
    "aura": {"sampler": "euler", **WIDE},
    "hunyuan": {"sampler": "DDPMScheduler", **WIDE},
    "kolors": {"sampler": "EulerDiscreteScheduler", **WIDE},
}
"""What the rows of a family's batch have in common."""
CAPTURED = (
    *("sd3", "sd3.5", "flux", "klein-base", "qwen", "z-image", "cogview", "chroma"),
    *("pixart", "pixart-alpha", "sana", "lumina", "aura", "hunyuan", "kolors"),
)
AT_FIRST_ON_THE_HOST = ("qwen", "z-image")
"""They make their rotary table there in the first call, before any capture."""
ON_THE_HOST = "chroma"
"""It makes a tensor there of which only the shape is read."""


def mixed(kind: str, *, is_guided: bool = True) -> list[Row]:
    """Four rows that differ in everything that a batch may mix."""
    known = families.engine(kind).facts
    scales = GUIDED if is_guided else PLAIN
    negatives = ("", *NEGATIVES[1:]) if known.needs_negative else NEGATIVES
    return [
        tiny.row(
            i,
            prompt=PROMPTS[i],
            negative_prompt=negatives[i] if is_guided and known.takes_negative else None,
            seed=SEEDS[i],
            steps=STEPS[i],
            **{"guidance_scale": 3.0 + i, known.guiding: scales[i], **TABLE[kind]},
        )
        for i in range(4)
    ]


def deviation(
    kind: str, rows: list[Row], mode: str = "eager", batched: Callable[..., list[Batch]] = families.batches
) -> list[int]:
    """The largest deviation of each row's pixels from diffusers', of 255."""
    engine = families.engine(kind, mode)
    outcomes = [one for batch in batched(kind, rows) for one in engine.submit(batch, tiny.never)()]
    assert sorted(outcome.row.index for outcome in outcomes) == [row.index for row in rows]
    found = []
    for outcome in outcomes:
        assert isinstance(outcome, Image), outcome
        row = outcome.row
        wanted = np.asarray(families.reference(kind, row))
        found.append(int(np.abs(outcome.pixels.astype(int) - wanted.astype(int)).max()))
    return found


@pytest.mark.parametrize("is_guided", [True, False], ids=["guided", "unguided"])
@pytest.mark.parametrize("kind", TABLE)
def test_every_row_is_what_diffusers_makes_of_it_alone(kind: str, is_guided: bool) -> None:
    rows, known = mixed(kind, is_guided=is_guided), families.engine(kind).facts
    assert max(deviation(kind, rows)) <= 1
    changes = {
        "prompt": {"prompt": "another"},
        "seed": {"seed": 5},
        "steps": {"steps": 5},
        "guidance": {known.guiding: 2.5} if is_guided and known.guided_above is not None else {},
        "distilled": {"guidance_scale": 9.0} if known.has_true_cfg and known.takes_guidance_scale else {},
        "negative": {"negative_prompt": "another"} if is_guided and "negative_prompt" in known.columns else {},
    }
    first = np.asarray(families.reference(kind, rows[0]), int)
    for name, change in changes.items():
        other = np.asarray(families.reference(kind, dataclasses.replace(rows[0], **change)), int)
        assert not change or np.abs(first - other).max() > 3, f"{name} hardly changes the picture"


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("is_guided", [True, False], ids=["guided", "unguided"])
def test_rows_whose_texts_are_padded_to_one_length(is_guided: bool, mode: str) -> None:
    """From none at all to one that is cut, beside each other."""
    rows = mixed("qwen", is_guided=is_guided)
    group = families.padded("qwen", rows).group
    assert (group.text_length, group.negative_length, group.is_padded) == (512, 256 if is_guided else 0, True)
    assert max(deviation("qwen", rows, mode, lambda kind, some: [families.padded(kind, some)])) <= 1


def test_padding_is_looked_past_in_half_precision_too() -> None:
    engine = Engine(tiny.job(families.folder("qwen"), "model.dtype=bfloat16"))
    rows = mixed("qwen")
    apart = [one for batch in families.batches("qwen", rows) for one in engine.submit(batch, tiny.never)()]
    alone = {one.row.index: one.pixels for one in apart}
    for one in engine.submit(families.padded("qwen", rows), tiny.never)():
        assert tiny.psnr(one.pixels, alone[one.row.index]) >= 40


STRENGTHS = (0.6, 1.0, 0.35, None)
"""Of 2, 4, 3 and 4 steps they leave 1, 4, 1 and, without an init image, 4; of families that make a cut step, one more
of 2 and of 3."""


def begun(rows: list[Row]) -> list[Row]:
    """The rows with init images of several sizes and formats, but for those without a strength."""
    sizes = ((80, 56, ".png"), (64, 64, ".jpg"), (33, 190, ".webp"), ())
    return [
        row if strength is None else dataclasses.replace(row, init=tiny.init_image(i, *size), strength=strength)
        for i, (row, strength, size) in enumerate(zip(rows, STRENGTHS, sizes, strict=True))
    ]


@pytest.mark.parametrize("kind", ["sd1", "sdxl", "sd3", "sd3.5", "flux", "schnell"])
def test_rows_from_an_image_beside_rows_from_text(kind: str) -> None:
    rows = begun(mixed(kind))
    assert max(deviation(kind, rows)) <= 1
    first, other = rows[2], {"init": tiny.init_image(1), "strength": 1.0, "seed": 7}
    made = np.asarray(families.reference(kind, first), int)
    for name, value in other.items():
        changed = dataclasses.replace(first, **{name: value})
        assert np.abs(made - np.asarray(families.reference(kind, changed), int)).max() > 3, name


@pytest.mark.parametrize("kind", CAPTURED)
def test_captured_steps(kind: str) -> None:
    assert max(deviation(kind, mixed(kind), "graph")) <= 1
    captures = families.engine(kind, "graph").steps.captures
    assert {(capture.mode, capture.deviation) for capture in captures} == {("graph", 0.0)}
    own = [capture.bucket for capture in captures if not capture.bucket.group.is_padded]
    assert len(set(map(str, own))) == len(families.batches(kind, mixed(kind)))


class Host(TorchDispatchMode):
    """Notes the operations that read or write tensors of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_flatten((args, kwargs, made))[0] if isinstance(one, torch.Tensor)]
        self.operations += [str(func) for one in tensors if one.device.type == "cpu"]
        return made


PADDED = "qwen, padded"


@pytest.mark.parametrize("kind", [*sorted({*CAPTURED} - {ON_THE_HOST}), PADDED])
def test_a_step_touches_the_device_alone(kind: str) -> None:
    """A capture can take nothing from the host. The device is torch's "meta", which has shapes and no values."""
    is_padded, kind = kind == PADDED, "qwen" if kind == PADDED else kind
    engine, rows = families.engine(kind), mixed(kind)
    asked = families.padded(kind, rows) if is_padded else families.batches(kind, rows)[0]
    model, told = engine.model, engine.conditioning(asked)
    weights = {name: one.to("meta") for name, one in model.network.state_dict(keep_vars=True).items()}
    weights |= {name: one.to("meta") for name, one in model.network.named_buffers()}
    conditioning = Conditioning(
        told.guidance.to("meta"), told.is_guided, {name: one.to("meta") for name, one in told.inputs.items()}
    )
    latents = torch.cat([model.noise(row, torch.Generator()) for row in asked.rows]).to("meta")

    def network(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(model.network, weights, args, kwargs)

    if kind in AT_FIRST_ON_THE_HOST:
        model.predict(network, latents, latents.new_zeros(len(asked.rows)), conditioning)
    with Host() as host:
        made = model.predict(network, latents, latents.new_zeros(len(asked.rows)), conditioning)
    assert made.shape == latents.shape
    assert host.operations == []


@pytest.mark.parametrize("mode", [pytest.param("compiled", marks=pytest.mark.slow), "regional+graph"])
def test_compiled_steps(mode: str) -> None:
    engine, rows = families.engine("sd3", mode), mixed("sd3")
    latents = tiny.denoise(engine, rows)
    assert [capture.mode for capture in engine.steps.captures] == [mode]
    for row, made in zip(rows, latents, strict=True):
        assert tiny.difference(made, families.latents("sd3", row)) < 1e-4


def test_sizes_shift_the_schedule_of_a_folder_that_says_so() -> None:
    engine = families.engine("sd3.5")
    small, large = (engine.tables([tiny.row(width=side, height=64, sampler="euler")])[0] for side in (64, 128))
    assert not torch.equal(small.timesteps, large.timesteps)
    fixed = families.engine("sd3")
    small, large = (fixed.tables([tiny.row(width=side, height=64, sampler="euler")])[0] for side in (64, 128))
    assert small is large


@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize(
    "kind",
    [
        *("sd3", "sd3.5", "flux", "klein", "qwen", "z-image", "cogview", "chroma"),
        *("pixart", "sana", "lumina", "aura", "hunyuan", "kolors"),
    ],
)
def test_what_is_fetched_from_the_hub_is_what_is_read(tmp_path: Path, kind: str, variant: str | None) -> None:
    families.pipeline(kind).save_pretrained(tmp_path, variant=variant, max_shard_size="20KB")
    patterns = list(hub.file_patterns(variant))
    files = find_model(Model(path=str(tmp_path), variant=variant)).files
    for file in files:
        assert any(fnmatch.fnmatch(file, pattern) for pattern in patterns), file
    assert any("-of-" in file for file in files)
    assert kind not in ("klein", "z-image") or "tokenizer/chat_template.jinja" in files


@pytest.mark.parametrize(
    "kind",
    [
        *("sd3", "sd3.5", "flux", "schnell", "klein", "klein-base", "qwen", "z-image", "cogview", "chroma"),
        *("pixart", "pixart-alpha", "sana", "lumina", "aura", "hunyuan", "kolors"),
    ],
)
def test_defaults_are_the_pipelines_own(kind: str) -> None:
    known, pipe = families.engine(kind).facts, families.pipeline(kind)
    defaults = {name: one.default for name, one in inspect.signature(type(pipe).__call__).parameters.items()}
    assert known.steps == defaults["num_inference_steps"]
    assert known.guidance_scale == (defaults["guidance_scale"] if known.takes_guidance_scale else 0.0)
    side = (
        getattr(pipe, "default_sample_size", None) or getattr(families.network(pipe).config, "sample_size", None) or 128
    )
    assert known.width == known.height == side * pipe.vae_scale_factor
    assert known.sampler == type(pipe.own_scheduler).__name__
    row = tiny.row(prompt=tiny.LONG, negative_prompt=None, sampler=known.sampler, width=64, height=64)
    engine = families.engine(kind)
    (asked,) = families.batches(kind, [row])
    lengths = [one.shape[1] for one in engine.conditioning(asked).inputs.values() if one.ndim == 3]
    if known.lengths is None:
        assert known.text_length == asked.group.text_length == sum(lengths)
    else:
        (*negative, text) = sorted(set(lengths))
        assert known.text_length == asked.group.text_length == text
        assert negative == ([asked.group.negative_length] if asked.group.negative_length else [])
    (count,) = engine._count(asked)
    added = engine.model.tokenizer.tokenize(known.reads("")) if known.is_added_within else []
    assert count.read == known.prompt_tokens - len(added)
    assert count.dropped > 0
    if kind == "qwen":
        lengths = known.lengths
        assert lengths is not None
        template = (pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx)
        assert (lengths.template, lengths.skipped) == template


@pytest.mark.parametrize("kind", ["sd1", "sdxl", "sd3", "flux", "pixart", "aura", "hunyuan", "kolors"])
def test_a_vae_is_planned_in_the_dtype_that_it_is_loaded_in(kind: str) -> None:
    job = tiny.job(families.folder(kind), "model.dtype=float16")
    engine = Engine(job)
    planned = demand_of(find_model(job.model), engine.facts, job).vae
    assert planned == sum(one.numel() * one.element_size() for one in engine.model.vae.parameters())


@pytest.mark.parametrize("kind", ["klein", "z-image"])
def test_text_encoders_make_no_words(kind: str) -> None:
    """As the folder's own class does: logits of 32 texts of 512 tokens and a real vocabulary are 5 GB in bfloat16."""
    (encoder,) = families.engine(kind).model.encoders
    assert type(families.pipeline("klein").text_encoder).__name__ == "Qwen3ForCausalLM"
    assert type(encoder).__name__ == "Qwen3Model"


def test_tokens_behind_sanas_instructions_are_counted_as_they_are_read() -> None:
    """The instructions' last token and the first of these prompts are one."""
    engine, told = families.engine("sana"), list[torch.Tensor]()
    for length, dropped in ((298, 0), (299, 0), (300, 1)):
        asked = tiny.batch([tiny.row(prompt="A" * length, sampler="dpmpp_2m", guidance_scale=1.0)], engine.facts)
        assert engine._count(asked)[0].dropped == dropped
        told.append(engine.conditioning(asked).inputs["encoder_hidden_states"])
    assert torch.equal(told[1], told[2])
    assert not torch.equal(told[0], told[1])


def test_luminas_system_prompt_takes_its_part_of_a_prompts_tokens_and_of_no_negative_ones() -> None:
    engine = families.engine("lumina")
    known, tokenizer = engine.facts, engine.model.tokenizer
    added = len(tokenizer.tokenize(known.reads("")))
    for column, room in (("prompt", known.prompt_tokens - added), ("negative_prompt", known.prompt_tokens)):
        told = list[torch.Tensor]()
        for length, dropped in ((room - 1, 0), (room, 0), (room + 1, 1)):
            row = tiny.row(sampler="euler", **{"prompt": "a", column: "A" * length})
            asked = tiny.batch([row], known)
            assert engine._count(asked)[0].dropped == dropped
            told.append(engine.conditioning(asked).inputs["encoder_hidden_states"])
        assert torch.equal(told[1], told[2])
        assert not torch.equal(told[0], told[1])


def test_pixart_alpha_makes_one_step_where_diffusers_does() -> None:
    known = families.engine("pixart-alpha").facts
    assert [known.sampler_facts(name).makes(1) for name in (known.sampler, "LCMScheduler")] == [False, True]
    with pytest.raises(IndexError):
        families.reference("pixart-alpha", tiny.row(steps=1))


@pytest.mark.parametrize(
    ("kind", "key", "why"),
    [
        ("flux", "stochastic_sampling", "whose noise no seed decides"),
        ("sana-euler", "use_dynamic_shifting", "tells it no size"),
    ],
)
def test_schedulers_that_a_pipeline_cannot_run_are_refused(tmp_path: Path, kind: str, key: str, why: str) -> None:
    folder = Path(shutil.copytree(families.folder(kind), tmp_path / "model"))
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: True}))
    with pytest.raises(UsageError, match=f"{key}.* {why}"):
        facts_of(Model(path=str(folder)))
