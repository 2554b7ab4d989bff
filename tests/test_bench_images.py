"""The bench of images: its arithmetic, its rows, and one run of every part on a tiny pipeline."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import diffusers
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from batchgen.bench import baselines, figures, images, modes, ours, traces
from batchgen.bench.architectures import ARCHITECTURES
from batchgen.bench.building import ensure_folder
from batchgen.bench.commands import bench
from batchgen.bench.evaluations import count_flops, total_flops
from batchgen.bench.traces import most
from batchgen.bench.workload import SIZES, Wanted, Workload, write_manifest
from batchgen.engine.engine import Engine
from batchgen.errors import UsageError
from tests import runs, tiny

CPU = torch.device("cpu")
SINGLE = Workload(6, "single", side=64, divisor=8, steps=2, guidance=7.5, sampler="euler")
MIXED = Workload(2_000, "mixed", side=512, divisor=2, steps=20, guidance=7.5, sampler="euler")


@pytest.mark.parametrize(
    ("intervals", "covered", "idle"),
    [
        ([], 0, None),
        ([(1, 3)], 2, 0),
        ([(0, 1), (3, 4)], 2, 0.5),
        ([(3, 4), (0, 1), (0.5, 2)], 3, 0.25),
        ([(0, 10), (2, 3), (4, 9)], 10, 0),
        ([(0, 4), (4, 5), (9, 10)], 6, 0.4),
    ],
)
def test_time_that_kernels_cover(intervals: list[figures.Interval], covered: float, idle: float | None) -> None:
    assert figures.union(intervals) == pytest.approx(covered)
    assert figures.idle_share(intervals) == (None if idle is None else pytest.approx(idle))


def test_the_longest_gaps_are_named() -> None:
    kernels = [traces.Kernel("c", 9000, 9500), traces.Kernel("a", 0, 4000), traces.Kernel("b", 1000, 2000)]
    kernels.append(traces.Kernel("d", 9600, 9700))
    assert traces.longest_gaps(kernels) == [traces.Gap(5.0, "a", "c"), traces.Gap(0.1, "c", "d")]
    assert traces.longest_gaps([]) == []


def test_rates_and_ratios() -> None:
    assert figures.rate(30, 12) == 2.5
    assert figures.rate(3, 0) == 0
    assert figures.ratio(3, 2) == 1.5
    assert figures.ratio(3, 0) is None
    assert (figures.share(1, 4), figures.share(0, 0)) == (0.25, 0)


def test_samples_lie_evenly() -> None:
    assert figures.spread(10, 2) == [2, 7]
    assert figures.spread(9, 3) == [1, 4, 7]
    assert figures.spread(3, 5) == figures.spread(3, 0) == [0, 1, 2]


def test_mixed_rows_are_drawn_evenly(tmp_path: Path) -> None:
    rows = MIXED.wanted()
    assert rows == MIXED.wanted()
    sizes = Counter(row.size for row in rows)
    assert set(sizes) == {(width // 2, height // 2) for width, height in SIZES}
    assert max(sizes.values()) < 3 * min(sizes.values())
    steps = Counter(row.steps for row in rows)
    assert set(steps) == set(range(20, 51))
    assert max(steps.values()) < 3 * min(steps.values())
    assert {row.guidance_scale for row in rows} == {tenths / 10 for tenths in range(40, 91)}
    assert len({row.prompt for row in rows}) == len({row.seed for row in rows}) == len(rows)
    assert max(len(row.prompt) for row in rows) <= 75
    write_manifest(tmp_path / "rows.parquet", rows)
    assert [Wanted(**row) for row in pq.read_table(tmp_path / "rows.parquet").to_pylist()] == rows


def test_single_rows_differ_in_prompt_and_seed_alone() -> None:
    assert {(row.width, row.height, row.steps, row.guidance_scale) for row in SINGLE.wanted()} == {(64, 64, 2, 7.5)}
    assert [row.seed for row in SINGLE.wanted()] == list(range(6))


def flat(calls: list[baselines.Call]) -> list[int]:
    return sorted(row.seed for call in calls for row in call)


def test_every_row_is_in_one_call() -> None:
    rows = MIXED.wanted()
    every = list(range(len(rows)))
    by_set = baselines.per_set(rows, 32)
    assert flat(by_set) == every
    for call in by_set:
        assert len({(row.size, row.steps, row.guidance_scale) for row in call}) == 1
    assert [call[0].work for call in by_set] == sorted(call[0].work for call in by_set)
    by_size = baselines.per_size(rows, 16)
    assert len(by_size) == len(SIZES)
    assert flat([call for calls in by_size for call in calls]) == every
    everything = [row for calls in by_size for call in calls for row in call]
    assert len({(row.steps, row.guidance_scale) for row in everything}) == 1
    assert everything[0].steps == round(sum(row.steps for row in rows) / len(rows))
    assert [len(call) for call in baselines.in_batches(rows[:10], 4)] == [4, 4, 2]


@pytest.mark.parametrize(("wanted", "sizes"), [(1, [4, 4]), (2, [4, 4]), (3, [4, 4, 2]), (0, [4, 4, 2])])
def test_a_sample_is_of_full_batches(wanted: int, sizes: list[int]) -> None:
    calls = baselines.in_batches(MIXED.wanted()[:10], 4)
    assert [len(call) for call in baselines.to_sample(calls, wanted)] == sizes


def test_kernels_are_summed_by_name() -> None:
    times = most([("gemm", 1, 2.0), ("copy", 3, 1.0), ("gemm", 1, 5.0)])
    assert [(one.name, one.calls, one.ms, one.share) for one in times] == [
        ("gemm", 2, 7.0, 0.875),
        ("copy", 3, 1.0, 0.125),
        ("everything", 5, 8.0, 1.0),
    ]


@pytest.mark.parametrize(("name", "parameters", "tflop"), [("sd15", 859_520_964, 34.6), ("sdxl", 2_567_463_684, 281)])
def test_architectures_have_the_known_size_and_work(name: str, parameters: int, tflop: float) -> None:
    """20 steps with guidance and a decode."""
    wanted = ARCHITECTURES[name]
    side = wanted.side // 8
    with torch.device("meta"), torch.no_grad():
        unet, vae = diffusers.UNet2DConditionModel(**wanted.network), diffusers.AutoencoderKL(**wanted.vae)
        text = torch.empty(2, 77, unet.config.cross_attention_dim)
        added = {"text_embeds": torch.empty(2, 1280), "time_ids": torch.empty(2, 6)} if name == "sdxl" else None
        with FlopCounterMode(display=False) as step:
            unet(torch.empty(2, 4, side, side), torch.empty(2), text, added_cond_kwargs=added)
        with FlopCounterMode(display=False) as decode:
            vae.decode(torch.empty(1, 4, side, side))
    assert sum(one.numel() for one in unet.parameters()) == parameters
    total = 20 * step.get_total_flops() + decode.get_total_flops()
    assert total / 1e12 == pytest.approx(tflop, rel=0.01)


@pytest.mark.parametrize(
    ("name", "parameters", "tflop"), [("sd3", 2_028_328_000, 17.81), ("flux", 11_901_408_320, 74.38)]
)
def test_transformers_have_the_known_size_and_work(name: str, parameters: int, tflop: float) -> None:
    """One evaluation of a row, with guidance where it doubles."""
    wanted, time = ARCHITECTURES[name], torch.empty(2 if name == "sd3" else 1, device="meta")
    text = {
        "encoder_hidden_states": torch.empty(len(time), 333 if name == "sd3" else 512, 4096, device="meta"),
        "pooled_projections": torch.empty(len(time), 2048 if name == "sd3" else 768, device="meta"),
        "timestep": time,
    }
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as step:
        if name == "sd3":
            network = diffusers.SD3Transformer2DModel(**wanted.network)
            network(torch.empty(2, 16, 128, 128), **text)
        else:
            network = diffusers.FluxTransformer2DModel(**wanted.network)
            places = {"img_ids": torch.empty(4096, 3), "txt_ids": torch.empty(512, 3)}
            network(torch.empty(1, 4096, 64), **text, **places, guidance=time)
    assert sum(one.numel() for one in network.parameters()) == parameters
    assert step.get_total_flops() / 1e12 == pytest.approx(tflop, rel=0.001)


@pytest.mark.parametrize("arch", ["tiny-sd3", "tiny-flux"])
def test_transformers_run_both_ways(tmp_path: Path, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "TRIED_BATCHES", (2,))
    command = f"bench images --arch {arch} --rows 3 --sample 1 --no-idle --baselines best --set engine.device=cpu"
    ended = runs.batchgen(*command.split(), "--folder", tmp_path, "--json", tmp_path / "figures.json")
    assert ended.code == 0, ended.err
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["batchgen"]["images"] == 3
    assert [one["name"] for one in written["baselines"]] == ["best"]
    assert written["workload"]["guidance"] == ARCHITECTURES[arch].guidance


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    ensure_folder("tiny", folder, CPU, False, lambda text: None)
    return folder


def test_the_folder_is_built_once(place: Path) -> None:
    said: list[str] = []
    before = (place / "tiny" / "model_index.json").stat().st_mtime_ns
    assert ensure_folder("tiny", place, CPU, False, said.append) == place / "tiny"
    assert said == []
    assert (place / "tiny" / "model_index.json").stat().st_mtime_ns == before
    upcast = ensure_folder("tiny", place, CPU, True, said.append)
    asks = [json.loads((path / "vae" / "config.json").read_text())["force_upcast"] for path in (place / "tiny", upcast)]
    assert asks == [False, True]


def test_work_is_counted_row_by_row(place: Path) -> None:
    engine = Engine(tiny.job(place / "tiny"))
    step, decode = count_flops(engine, 64, 64, 7.5, "euler")
    half, same = count_flops(engine, 64, 64, 1.0, "euler")
    assert (2 * half, decode) == (step, same)
    assert total_flops(engine, SINGLE.wanted()) == 6 * (2 * step + decode)
    heun = Workload(1, "single", side=64, divisor=8, steps=4, guidance=1.0, sampler="heun")
    assert total_flops(engine, heun.wanted()) == 7 * half + decode


@pytest.fixture(scope="module")
def measured(place: Path) -> tuple[images.Report, dict[str, Any], list[str]]:
    said: list[str] = []
    settings = images.Settings(
        arch="tiny",
        workload=SINGLE,
        overrides=("engine.device=cpu", "plan.max_batch=4"),
        baselines=("loop", "best"),
        sample=0,
        profiles=("eager",),
        folder=place,
        json_file=place / "figures.json",
    )
    report = images.bench_images(settings, said.append)
    return report, json.loads((place / "figures.json").read_text()), said


def test_both_sides_make_every_picture(measured: tuple[images.Report, dict[str, Any], list[str]], place: Path) -> None:
    report, _, _ = measured
    assert report.batchgen is not None
    assert report.batchgen.images == sum(report.batchgen.modes.values()) == SINGLE.rows
    assert report.batchgen.batches == {4: 1, 2: 1}
    assert [(one.name, one.images) for one in report.baselines] == [("loop", SINGLE.rows), ("best", SINGLE.rows)]
    loop, best = report.baselines
    assert (loop.batch_size, loop.calls) == (1, 6)
    assert (best.batch_size, best.calls) in ((2, 3), (4, 2))
    assert not list(place.glob("run-*"))


def test_the_file_has_every_figure(measured: tuple[images.Report, dict[str, Any], list[str]]) -> None:
    report, written, said = measured
    assert set(written) == {one.name for one in fields(images.Report)}
    found = written["batchgen"]
    assert set(found) == {one.name for one in fields(ours.Ours)}
    assert found["steady_images_per_s"] == pytest.approx(6 / found["steady_s"])
    assert found["cold_images_per_s"] == pytest.approx(6 / found["cold_s"])
    assert found["cold_s"] > found["load_s"] + found["warm_up_s"] + found["steady_s"]
    assert (found["failed"], found["padded_rows_share"], found["idle_row_steps_share"]) == (0, 0, 0)
    assert written["ratios"]["loop"] == pytest.approx(
        found["steady_images_per_s"] / written["baselines"][0]["images_per_s"]
    )
    assert set(written["kernels"]) == {"eager step", "eager decode"}
    assert all(times[-1]["name"] == "everything" for times in written["kernels"].values())
    compute = written["compute"]
    assert compute["tflop_per_s"] == pytest.approx(compute["tflop_per_image"] * found["steady_images_per_s"])
    assert compute["utilisation"] == pytest.approx(compute["tflop_per_s"] / compute["matmul_tflop_per_s"])
    assert {"torch", "diffusers", "batchgen"} <= set(written["versions"])
    assert found["peak_allocated_bytes"] is found["stage_s"] is written["idle"] is None
    assert any(f"steady {report.batchgen.steady_images_per_s:.3f} images/s" in one for one in said if report.batchgen)


def test_a_mixed_bench_by_the_command_line(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "TRIED_BATCHES", (2, 4))
    wanted = "--arch tiny --rows 3 --sizes mixed --sample 1 --set engine.device=cpu"
    command = f"bench images {wanted} --folder {place} --json {tmp_path / 'mixed.json'}"
    ended = runs.batchgen(*command.split())
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1] == str(tmp_path / "mixed.json")
    written = json.loads((tmp_path / "mixed.json").read_text())
    assert written["batchgen"]["images"] == 3
    assert [one["name"] for one in written["baselines"]] == ["exact", "sized"]
    assert set(written["ratios"]) == {"exact", "sized"}


def test_what_does_not_fit_is_refused(place: Path) -> None:
    with pytest.raises(UsageError, match="'exact' does not fit --sizes single; allowed: none, loop, best, compiled"):
        images.check(images.Settings("tiny", SINGLE, baselines=("exact",)))
    with pytest.raises(UsageError, match="'fast' is not known; allowed: none, eager, regional, compiled"):
        images.check(images.Settings("tiny", SINGLE, profiles=("fast",)))
    with pytest.raises(UsageError, match="leave out --no-batchgen"):
        images.check(images.Settings("tiny", SINGLE, profiles=("eager",), runs_batchgen=False))
    with pytest.raises(UsageError, match="'slow' is not known; allowed: eager, graph, regional"):
        modes.check_modes(("slow",))
    captured = modes.Settings("tiny", (), captured_batch=1, folder=place, overrides=("engine.device=cpu",))
    with pytest.raises(UsageError, match="looks at a GPU's memory"):
        modes.bench_modes(captured, lambda text: None)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["images", "--json", "no/such/x.json"], "there is no folder no/such; make it first"),
        (["images", "--profile-out", "no/such/x.json"], "there is no folder no/such; make it first"),
        (["modes", "--json", "no/such/x.json"], "there is no folder no/such; make it first"),
        (["workers", "--workers", "2", "--json", "no/such/x.json"], "there is no folder no/such; make it first"),
        (["soak", "--json", "no/such/x.json"], "there is no folder no/such; make it first"),
        (["long", "--json", "no/such/x.json"], "there is no folder no/such; make it first"),
        (["images", "--set", "model.path=other"], "model.path has no effect here"),
        (["modes", "--set", "model.path=other"], "model.path has no effect here"),
        (["workers", "--set", "model.path=other"], "model.path has no effect here"),
        (["images", "--set", "engine.device=cpu", "--profile-out", "x.json"], "--profile-out needs a GPU"),
        (["images", "--no-batchgen", "--profile-out", "x.json"], "leave out --no-batchgen"),
        (["workers", "--workers", "2", "--set", "output.format=webdataset"], "only files have them"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_at_the_beginning(command: list[str], message: str) -> None:
    """In this process: the command ends before it builds anything."""
    ended = CliRunner().invoke(bench, command)
    assert ended.exit_code
    assert message in " ".join((ended.output + str(ended.exception)).split())


def test_modes_stand_side_by_side(place: Path) -> None:
    said: list[str] = []
    settings = modes.Settings("tiny", (1, 2), ("eager", "graph"), None, ("engine.device=cpu",), place, place / "m.json")
    report = modes.bench_modes(settings, said.append)
    assert [(one.mode, one.is_identical, one.relative_error) for one in report.times] == 2 * [
        ("eager", True, 0.0),
        ("graph", True, 0.0),
    ]
    assert [one["bucket"].split(",")[1] for one in json.loads((place / "m.json").read_text())["times"]] == [
        " batch 1",
        " batch 1",
        " batch 2",
        " batch 2",
    ]
    assert "same bits" in "\n".join(said)


def test_deviation_is_relative_to_what_is_wanted() -> None:
    made, wanted = torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])
    assert modes.deviation(made, wanted) == (pytest.approx(0.125), pytest.approx(0.1))
    assert modes.largest_first([(1, 64, 64), (2, 64, 64), (1, 64, 128), (1, 128, 64)]) == [
        (1, 128, 64),
        (1, 64, 128),
        (2, 64, 64),
        (1, 64, 64),
    ]
