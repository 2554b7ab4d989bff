"""Memory: the estimate beside what was measured, batches that are planned within a limit, and encoders elsewhere."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers

from batchgen import memory
from batchgen.bench.architectures import ARCHITECTURES
from batchgen.engine import devices, residence
from batchgen.engine.engine import Engine
from batchgen.errors import UsageError
from batchgen.job import Job
from batchgen.memory import CARDS, Demand, Room
from batchgen.models import footprint
from batchgen.models.folder import facts_of, find_model
from batchgen.models.footprint import demand_of
from batchgen.models.layouts import FAMILIES
from batchgen.records import Group, Image
from batchgen.wording import num_bytes
from tests import families, originals, runs, tiny

FIGURES = Path(__file__).parent / "figures"
T5_XXL = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24, "vocab_size": 32128,
          "feed_forward_proj": "gated-gelu"}  # fmt: skip


def hollow(arch: str, folder: Path) -> Path:
    """An architecture's folder of full size whose weights are holes: headers that tell of them, and no content."""
    wanted, layout = ARCHITECTURES[arch], FAMILIES[ARCHITECTURES[arch].pipeline]
    texts = [T5_XXL if config and "d_ff" in config else config for config in wanted.texts]
    names = [name for name in layout.components if name.startswith("text_encoder")]
    configs = dict(zip(names, texts, strict=True)) | {layout.network: wanted.network, "vae": wanted.vae}
    index: dict[str, Any] = {"_class_name": wanted.pipeline}
    for name, component in layout.components.items():
        place, cls = folder / name, component.classes[0]
        if name in configs and configs[name] is None:
            continue
        place.mkdir(parents=True)
        index[name] = [component.library, cls]
        if component.weights:
            with torch.device("meta"):
                network = made(cls, configs[name])
            network.save_config(place) if component.library == "diffusers" else network.config.save_pretrained(place)
            write_header(place / f"{component.weights}.safetensors", network)
        elif name == "scheduler":
            index[name] = ["diffusers", wanted.scheduler["_class_name"]]
            (place / component.config).write_text(json.dumps(dict(wanted.scheduler)))
        else:
            (place / component.config).write_text(json.dumps({"model_max_length": 77}))
            (place / "tokenizer.json").touch()
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def made(cls: str, config: Any) -> Any:
    if cls == "T5EncoderModel":
        return transformers.T5EncoderModel(transformers.T5Config(**config))
    if cls.startswith("CLIP"):
        return getattr(transformers, cls)(transformers.CLIPTextConfig(**config))
    return getattr(diffusers, cls)(**config)


def write_header(path: Path, network: Any) -> None:
    entries, end = {}, 0
    for name, one in network.named_parameters():
        start, end = end, end + 2 * one.numel()
        entries[name] = {"dtype": "F16", "shape": list(one.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def demand(folder: Path, *overrides: str) -> Demand:
    job = of(folder, *overrides)
    return demand_of(find_model(job.model), facts_of(job.model), job)


def of(folder: Path | str, *overrides: str) -> Job:
    return tiny.job(folder, "engine.device=cuda", *overrides)


def guided(side: int) -> Group:
    return Group(side, side, True, 77, "x,e")


@pytest.mark.parametrize(
    ("figures", "arch", "weights", "side", "decoded"),
    [("images-sd15", "sd15", 2.13e9, 512, 25), ("images-sd15-one", "sd15", 2.13e9, 512, 1),
     ("images-sdxl", "sdxl", 6.94e9, 1024, 8)],
)  # fmt: skip
def test_the_estimate_lies_above_what_was_measured_and_below_its_double(
    tmp_path: Path, figures: str, arch: str, weights: float, side: int, decoded: int
) -> None:
    """On an H200: what torch had allocated at the most, with what captured graphs held beside it."""
    measured = json.loads((FIGURES / f"{figures}.json").read_text())["batchgen"]
    (captured,) = measured["captures"]
    held = captured["after_bytes"] - captured["before_bytes"]
    taken = measured["peak_allocated_bytes"] + held
    needs = demand(hollow(arch, tmp_path), "model.vae_dtype=float16")
    assert needs.weights == pytest.approx(weights, rel=0.01)
    room = Room(needs, 150 * 10**9, decode_batch=decoded)
    assert taken <= room.needed(guided(side), captured["bucket"]["size"]) <= 2 * taken


def test_flux_on_common_cards(tmp_path: Path) -> None:
    """24 GB hold not even the network; 48 GB hold all of it, with T5-XXL. By the files' headers alone."""
    needs = demand(hollow("flux", tmp_path))
    assert needs.network == pytest.approx(23.8e9, rel=0.01)
    assert needs.encoders == pytest.approx(9.77e9, rel=0.01)
    small, middle, large = (Room(needs, card).most(Group(1024, 1024, False, 512, "x,e")) for card in CARDS)
    assert small == 0 < middle < large
    (_, line) = memory.lines(of(tmp_path, "engine.max_memory=24GB"), needs, [(Group(1024, 1024, False, 512, "x,e"), 1)])
    assert line.startswith(
        "  24 GB: not a single 1024×1024; the weights alone are 34 GB in bfloat16: take a larger GPU"
    )


TRANSFORMERS = (
    *("sd3", "flux", "klein", "qwen", "z-image", "chroma", "pixart", "pixart-alpha", "sana", "aura", "hunyuan"),
)


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_the_estimate_of_a_transformer_is_of_its_patches_and_its_weights_as_loaded(kind: str) -> None:
    """A part of some text encoders stays in float32. Files hold buffers too, such as the places of SD3."""
    folder = families.folder(kind)
    needs, known = demand(folder, "model.dtype=float16"), facts_of(of(folder).model)
    network = find_model(of(folder).model).config("transformer")
    width = network.get("dim") or network["num_attention_heads"] * network["attention_head_dim"]
    assert needs.row_pixel == 2 * footprint._SEQUENCE * width / known.size_multiple**2
    model = Engine(tiny.job(folder, "model.dtype=float16")).model
    for wanted, networks in ((needs.network, [model.network]), (needs.encoders, model.encoders)):
        loaded = sum(one.numel() * one.element_size() for part in networks for one in part.parameters())
        assert loaded <= wanted <= 1.2 * loaded


def needing(**values: Any) -> Demand:
    plain = {"network": 10e9, "vae": 1e9, "encoders": 6e9, "row_pixel": 500.0, "row": 0.0, "decoded_pixel": 2000.0,
             "encoding": 0.0, "tile": 512**2, "dtype": "float16"}  # fmt: skip
    return Demand(**{**plain, **values})


@pytest.mark.parametrize(
    ("needs", "side", "limit", "wanted"),
    [
        (needing(), 1024, "23GB", 'set engine.text_encoder = "offload"$'),
        (needing(network=4 * 10**9, encoders=10**9), 2048, "19GB", r"vae_tiling = true \(other pixels\)$"),
        (needing(), 1024, "12GB", "the weights alone are 17 GB in float16: take a larger GPU"),
        (needing(dtype="float32"), 1024, "12GB", "in float32: set model.dtype to a half precision"),
        (needing(has_choices=False), 1024, "23GB", "the weights alone are 17 GB in float16: take a larger GPU"),
    ],
)
def test_what_would_help(needs: Demand, side: int, limit: str, wanted: str) -> None:
    room = Room(needs, num_bytes(limit))
    assert room.most(guided(side)) == 0
    with pytest.raises(UsageError, match=rf"a single image of {side}x{side} does not fit into .*; .*{wanted}"):
        room.within(guided(side), [1, 2, 4])


def test_a_pipeline_of_its_own_takes_no_key_that_would_help() -> None:
    needs = demand(families.folder("pag"))
    assert [key for key, _ in Room(needs, 1).easier()] == []
    assert list(Room(demand(families.folder("sd3")), 1).easier())


def test_batches_within_a_limit() -> None:
    room = Room(needing(), 40 * 10**9)
    most = room.most(guided(1024))
    assert most > 1
    assert room.fits(guided(1024), most)
    assert not room.fits(guided(1024), most + 1)
    assert room.within(guided(1024), [1, 2, 4, 1000]) == tuple(size for size in (1, 2, 4) if size <= most)
    with pytest.raises(UsageError, match=f"a batch of 1000 of .*; {most} at once would fit: allow smaller ones"):
        room.within(guided(1024), [1000])
    away = Room(needing(), 40 * 10**9, is_away=True)
    assert away.most(guided(1024)) > most
    assert Room(needing(encoding=30e9), 40 * 10**9, is_away=True).most(guided(1024)) == 0


def test_a_plan_within_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` says what fits; a limit below need is a sentence, and nothing is written."""
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    source = runs.prompts(tmp_path / "m.parquet", 40)
    words = ("plan", source, "--model", tiny.folder("sd1"), "--json")
    told = json.loads(runs.batchgen(*words).out)
    assert [one["bytes"] for one in told["memory"]["limits"]] == list(CARDS)
    largest = max(int(size) for size in told["groups"][0]["batches"])
    limited = json.loads(runs.batchgen(*words, "--max-memory", "25MB").out)
    most = limited["memory"]["limits"][0]["largest_batch"]["64x64"]
    assert 1 <= max(int(size) for size in limited["groups"][0]["batches"]) <= most < largest
    refused = runs.batchgen("run", source, "-o", tmp_path / "out", "--model", tiny.folder("sd1"), "--max-memory", "2MB")
    assert refused.code == 2
    assert "a single image of 64x64 does not fit into 2 MB (engine.max_memory): it takes about" in refused.err
    assert not (tmp_path / "out").exists()
    plain = runs.batchgen("plan", source, "--model", tiny.folder("sd1"))
    assert "\nmemory: weights of " in plain.out
    assert "fits into 24 GB, 48 GB, 80 GB" in plain.out


@pytest.mark.parametrize("text", ["", "24", "GB", "0GB", "-1GB", "24 apples", "9" * 400 + "GB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="a size is a number and a unit" if text else "engine.max_memory"):
        of("demo", f"engine.max_memory={json.dumps(text)}")


def test_sizes() -> None:
    assert list(map(num_bytes, ["24GB", "24 gb", "1.5G", "2GiB", "300MB"])) == [
        24 * 10**9, 24 * 10**9, 15 * 10**8, 2 * 1024**3, 3 * 10**8
    ]  # fmt: skip


def test_torch_may_take_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; on a CPU nothing is limited."""
    limits: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *words: limits.append(words))
    said: list[str] = []
    devices.limit_memory(10**9, torch.device("cpu"), said.append)
    monkeypatch.setattr(devices, "device_bytes", lambda device: 80 * 10**9)
    gpu = torch.device("cuda:0")
    for limit in (None, 24 * 10**9, 96 * 10**9):
        devices.limit_memory(limit, gpu, said.append)
    assert limits == [(0.3, gpu), (1.0, gpu)]
    assert said == ["engine.max_memory is 96 GB, and this GPU has 80 GB: batches may not fit"]
    assert devices.usable_bytes(24 * 10**9, gpu) == 24 * 10**9


def pixels(made: Engine, rows: Sequence[Any]) -> list[Any]:
    batch = tiny.batch(rows, made.facts)
    made.prepare([batch], tiny.never)
    outcomes = made.submit(batch, tiny.never)()
    assert all(isinstance(one, Image) for one in outcomes)
    return [one.pixels for one in outcomes if isinstance(one, Image)]


@pytest.mark.parametrize("kind", ["offload", "load"])
@pytest.mark.parametrize("model", ["sdxl", "sd3"])
def test_where_encoders_lie_changes_no_pixel(model: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, since they come and go for each shard."""
    folder = tiny.folder(model) if model == "sdxl" else families.folder(model)
    read: list[int] = []
    fill = residence.fill
    monkeypatch.setattr(residence, "fill", lambda *words: (read.append(1), fill(*words)))
    sampler = facts_of(of(folder).model).sampler
    shards = [[tiny.row(n, steps=1, sampler=sampler, prompt=f"a {n}")] for n in range(2)]
    staying, other = Engine(tiny.job(folder)), Engine(tiny.job(folder, f"engine.text_encoder={kind}"))
    for rows in shards:
        for mine, theirs in zip(pixels(other, rows), pixels(staying, rows), strict=True):
            assert np.array_equal(mine, theirs)
        if kind == "load":
            assert sum(one.numel() for encoder in other.model.encoders for one in encoder.parameters()) == 0
    assert len(read) == (len(shards) if kind == "load" else 0)


def test_encoders_that_are_others_when_they_are_read_again(tmp_path: Path) -> None:
    """The rows that are left would be made by other weights than the run was planned with."""
    folder = tiny.save(tmp_path / "model")
    made = Engine(tiny.job(folder, "engine.text_encoder=load"))
    pixels(made, [tiny.row(steps=1)])
    weights = folder / "text_encoder" / "model.safetensors"
    shutil.copy(tiny.save(tmp_path / "other", seed=2) / "text_encoder" / "model.safetensors", weights)
    with pytest.raises(UsageError, match=f"{weights} was written anew or replaced while the run was at work"):
        pixels(made, [tiny.row(steps=1, prompt="another")])


def test_encoders_of_a_single_file_are_not_read_again(tmp_path: Path) -> None:
    file = originals.write(tiny.pipeline("sd1"), tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match='is a single file that holds them; take "offload"'):
        Engine(tiny.job(file, f"model.config={tiny.folder('sd1')}", "engine.text_encoder=load"))


def test_tiles_are_those_of_diffusers() -> None:
    """An image larger than the VAE was trained on, beside diffusers' own pipeline with tiling."""
    row, folder = tiny.row(width=128, height=96, steps=1, guidance_scale=1.0), tiny.folder("sd1")
    tiled, plain = Engine(tiny.job(folder, "engine.vae_tiling=true")), tiny.engine("sd1")
    pipe = tiny.reference_pipeline(folder)
    pipe.vae.enable_tiling()
    wanted = (tiny.reference(pipe, row, plain.facts, "np")[0] * 255).round().astype(int)
    (ours,), (whole,) = pixels(tiled, [row]), pixels(plain, [row])
    assert np.abs(ours.astype(int) - wanted).max() <= 1
    assert not np.array_equal(ours, whole)
