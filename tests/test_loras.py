"""LoRA sets at work: parity with diffusers' own pipeline, and swaps that leave nothing behind."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from peft.tuners.lora import Linear

from batchgen.engine.whole import open_model
from batchgen.errors import UsageError
from batchgen.models.folder import facts_of, identity, located
from batchgen.models.lora_files import LoraPart, lora_sets
from batchgen.records import Image, Row
from tests import families, loras, runs, tiny


def engine(kind: str, sets: dict[str, Any], *overrides: str) -> Any:
    told = ", ".join(f"{name} = [{', '.join(map(_file, files))}]" for name, files in sets.items())
    return open_model(tiny.job(families.folder(kind), f"model.loras={{{told}}}", *overrides), None)


def _file(file: tuple[Path, float]) -> str:
    return f"{{path = {json.dumps(str(file[0]))}, scale = {file[1]}}}"


def made(maker: Any, rows: list[Row], lora: str = "") -> list[np.ndarray]:
    """The rows' pixels, made with a set."""
    batch = tiny.batch([dataclasses.replace(row, lora=lora) for row in rows], maker.facts)
    batch = dataclasses.replace(batch, group=dataclasses.replace(batch.group, lora=lora))
    maker.prepare([batch], tiny.never)
    found = maker.submit(batch, tiny.never)()
    assert all(isinstance(one, Image) for one in found), found
    return [one.pixels for one in found]


def deviation(left: Any, right: Any) -> int:
    return int(np.abs(np.asarray(left, int) - np.asarray(right, int)).max())


KINDS = {"sd1": {}, "sdxl": {}, "sd3": {"sampler": "euler"}, "flux": {"sampler": "euler"}}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_diffusers_makes_with_the_set_and_no_set_leaves_anything_behind(kind: str) -> None:
    sets = {"one": [(loras.file(kind, 1), 1.0)], "net": [(loras.file(kind, 2, with_texts=False), 1.0)]}
    maker, plain = engine(kind, sets, "engine.mode=graph"), engine(kind, {}, "engine.mode=graph")
    rows = [tiny.row(i, steps=2 + i, guidance_scale=3.0, **KINDS[kind]) for i in range(2)]
    without = made(plain, rows)
    for lora, seed, with_texts in (("one", 1, True), ("net", 2, False)):
        found = made(maker, rows, lora)
        for row, pixels, bare in zip(rows, found, without, strict=True):
            wanted = reference(loras.pipeline(kind, seed, with_texts=with_texts), row, maker.facts)
            assert deviation(pixels, wanted) <= 1
            assert deviation(pixels, bare) > 8
        again = made(maker, rows)
        assert all(np.array_equal(one, other) for one, other in zip(again, without, strict=True))
    assert [one.mode for one in maker.steps.captures] == ["graph"]


def test_parts_of_a_set_add_up_by_their_scales_and_texts_alone_may_be_changed() -> None:
    """Twice a half is the whole; the same set by another name is encoded anew."""
    file = loras.file("sd1", 1)
    maker = engine("sd1", {"whole": [(file, 1.0)], "halves": [(file, 0.5), (file, 0.5)], "none": [(file, 0.0)]})
    rows = [tiny.row(steps=2)]
    (whole,), (halves,), (none,) = (made(maker, rows, name) for name in ("whole", "halves", "none"))
    assert deviation(whole, halves) <= 1 < 8 < deviation(whole, none)
    assert deviation(none, made(maker, rows)[0]) <= 1


def test_a_shard_of_several_sets_encodes_each_text_by_its_own() -> None:
    maker = engine("sd1", {"one": [(loras.file("sd1", 1), 1.0)]})
    row = tiny.row(steps=2)
    alone = [made(maker, [row], name)[0] for name in ("", "one")]
    batches = []
    for name in ("", "one"):
        batch = tiny.batch([dataclasses.replace(row, lora=name)], maker.facts)
        batches.append(dataclasses.replace(batch, group=dataclasses.replace(batch.group, lora=name)))
    maker.prepare(batches, tiny.never)
    pending = [maker.submit(batch, tiny.never) for batch in batches]
    assert [np.array_equal(one()[0].pixels, wanted) for one, wanted in zip(pending, alone, strict=True)] == [True] * 2


def test_a_set_that_does_not_fit_into_memory_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it short before a layer is changed, or when half of one is."""
    maker, row = engine("sd1", {"one": [(loras.file("sd1", 1), 1.0)]}), tiny.row(steps=2)
    ((without,), (wanted,)), number = (made(maker, [row], name) for name in ("", "one")), 0
    maker._loras.use("")
    merge = Linear.merge

    def short(layer: Any, adapter_names: list[str]) -> None:
        nonlocal number
        number += 1
        if number % 5 == 3:
            raise torch.OutOfMemoryError("no room")
        merge(layer, adapter_names=adapter_names)
        if number % 5 == 0:
            raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(Linear, "merge", short)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                maker._loras.use("one")
    maker._prompts.prepare({}, tiny.never)
    assert np.array_equal(made(maker, [row])[0], without)
    assert np.array_equal(made(maker, [row], "one")[0], wanted)


def test_a_file_that_is_another_one_when_its_set_is_taken_again(tmp_path: Path) -> None:
    """A trainer that goes on writing, say: the rows that are left would be made by other weights."""
    file = Path(shutil.copy(loras.file("sd1", 1), tmp_path / "a.safetensors"))
    maker = engine("sd1", {"one": [(file, 1.0)]})
    rows = [tiny.row(steps=1)]
    before = made(maker, rows, "one")
    assert np.array_equal(before, made(maker, rows, "one"))
    made(maker, rows)
    shutil.copy(loras.file("sd1", 2, with_texts=False), file)
    with pytest.raises(UsageError, match=f"{file} was written anew or replaced while the run was at work"):
        made(maker, rows, "one")


@pytest.mark.parametrize(
    ("kind", "other", "why"),
    [("sd1", "sdxl", "does not fit model"), ("sd3", "sd1", "which this model does not have"), ("klein", "flux", "fit")],
)
def test_a_lora_of_another_model_is_refused(kind: str, other: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        engine(kind, {"wrong": [(loras.file(other, 1), 1.0)]})
    assert "model.loras: set 'wrong'" in str(refused.value)


def test_what_is_no_lora_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = families.folder("sd1")
    unet = folder / "unet" / "diffusion_pytorch_model.safetensors"
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "x.bin").write_bytes(b"x")
    (tmp_path / "x.safetensors").write_bytes(b"x")
    for path, why in [
        (unet, "holds no LoRA"),
        (empty, "should hold one"),
        (tmp_path / "x.bin", "can run code"),
        (tmp_path / "x.safetensors", "cannot be read"),
        (tmp_path / "gone", "neither a file or folder"),
    ]:
        job = tiny.job(folder, f"model.loras={{bad = [{_file((path, 1.0))}]}}")
        with pytest.raises(UsageError, match=why):
            facts_of(job.model)
    for told, why in [
        (f"path = '{unet}', weight_name = 'a'", "weight_name = 'a' has no effect, since .* is a file here"),
        (f"path = '{unet}', revision = 'a'", "revision = 'a' has no effect, since .* is a file here"),
        (f"path = '{unet.parent}', revision = 'a'", "is a folder here, which has no revisions; leave it out"),
    ]:
        with pytest.raises(UsageError, match=why):
            facts_of(tiny.job(folder, f"model.loras={{bad = [{{{told}}}]}}").model)
    with pytest.raises(UsageError, match="takes no LoRAs; leave it out"):
        facts_of(tiny.job(families.folder("pixart"), f"model.loras={{a = [{_file((unet, 1.0))}]}}").model)
    with pytest.raises(UsageError, match="has no weights; leave it out"):
        facts_of(tiny.job("pattern", f"model.loras={{a = [{_file((unet, 1.0))}]}}").model)


def test_a_file_of_the_hubs_cache_is_a_link_to_one_without_an_ending(tmp_path: Path) -> None:
    """Taken as it is named, from another folder too."""
    blob, link = tmp_path / "blobs" / "0123", tmp_path / "snapshots" / loras.FILE
    blob.parent.mkdir()
    link.parent.mkdir()
    shutil.copy(loras.file("sd1", 1), blob)
    link.symlink_to(blob)
    model = tiny.job(families.folder("sd1"), f"model.loras={{a = [{_file((link, 1.0))}]}}").model
    assert lora_sets(model)["a"] == lora_sets(located(model))["a"] == (LoraPart(link, 1.0),)


def test_identity_is_of_contents_and_scales(tmp_path: Path) -> None:
    file = loras.file("sd1", 1)
    copied = Path(shutil.copy(file, tmp_path / "other.safetensors"))

    def told(path: Path, scale: float) -> dict[str, str]:
        return identity(tiny.job(families.folder("sd1"), f"model.loras={{a = [{_file((path, scale))}]}}").model)

    assert told(file, 1.0) == told(copied, 1.0) != told(file, 0.5)
    assert told(file, 1.0) != told(loras.file("sd1", 2, with_texts=False), 1.0)


def test_another_vae_and_another_scheduler(tmp_path: Path) -> None:
    """As diffusers' pipeline that is given them; of the VAE, a whole model's folder will do."""
    other = tiny.save(tmp_path / "other", seed=9)
    own = families.folder("sd1")
    words = ("model.scheduler=EulerDiscreteScheduler", 'model.scheduler_options={timestep_spacing = "trailing"}')
    maker = open_model(tiny.job(own, f"model.vae={other}", *words), None)
    assert maker.facts.sampler == "EulerDiscreteScheduler"
    row = tiny.row(steps=4, sampler="EulerDiscreteScheduler")
    pipe = tiny.reference_pipeline(own, vae=diffusers.AutoencoderKL.from_pretrained(other / "vae"))
    before = reference(pipe, row, maker.facts)
    pipe.own_scheduler = diffusers.EulerDiscreteScheduler.from_config(
        pipe.own_scheduler.config, timestep_spacing="trailing"
    )
    wanted = reference(pipe, row, maker.facts)
    assert deviation(made(maker, [row])[0], wanted) <= 1
    assert deviation(before, wanted) > 1
    told = [
        identity(tiny.job(own, *some).model) for some in ((), (f"model.vae={other}",), (f"model.vae={own}",), words)
    ]
    assert told[0] == told[2] != told[1]
    assert told[0] != told[3]
    file = other / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(tiny.SD2_SCHEDULER))
    assert facts_of(tiny.job(own, f"model.scheduler={file}").model).sampler == "DDIMScheduler"


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("model.vae=no/where", "neither a folder here nor in the hub's cache"),
        ("model.vae=tests", "so it is no VAE's folder"),
        ("model.scheduler=nowhere.json", "neither a file or folder here nor the class"),
        ("model.scheduler=FlowMatchEulerDiscreteScheduler", "does not run in the pipeline of"),
    ],
)
def test_what_cannot_take_a_components_place_is_refused(override: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        open_model(tiny.job(families.folder("sd1"), override), None)


def test_a_run_with_a_set_per_row(tmp_path: Path) -> None:
    rows = [{"prompt": "a red apple", "lora": name, "seed": 1, "steps": 2} for name in ("", "a b", None)]
    source = runs.manifest(tmp_path / "m.parquet", rows)
    told = f"model.loras={{'a b' = [{_file((loras.file('demo', 1), 1.0))}]}}"
    words = ("--set", told, "--set", "sampling.width=64", "--set", "sampling.height=64")
    refused = runs.batchgen("plan", source, *words[2:])
    assert refused.code == 2
    assert "is no LoRA set of this job, which has none" in refused.err
    planned = runs.batchgen("plan", source, *words, "--set", "sampling.lora='a b'")
    assert "a b" in planned.out
    ended = runs.batchgen("run", source, "-o", tmp_path / "out", *words, "--set", "sampling.lora='a b'")
    assert ended.code == 0, ended.err
    table = pq.read_table(tmp_path / "out" / "metadata.parquet").to_pylist()
    assert [row["lora"] for row in table] == [None, "a b", "a b"]
    assert table[0]["pixel_sha256"] != table[1]["pixel_sha256"]
    more = told[:-1] + ", new = [" + _file((loras.file("demo", 1), 0.5)) + "]}"
    again = ("--set", more, *words[2:], "--set", "sampling.lora='a b'")
    assert runs.batchgen("run", source, "-o", tmp_path / "out", *again).code == 0
    changed = runs.batchgen("run", source, "-o", tmp_path / "out", *words[2:])
    assert changed.code == 2


def reference(pipe: Any, row: Row, facts: Any) -> Any:
    return tiny.reference(pipe, row, facts, "pil")[0]
