"""Model folders: what is taken, what is refused and in which words, and what identifies one."""

from __future__ import annotations

import fnmatch
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batchgen.engine.engine import Engine
from batchgen.errors import UsageError
from batchgen.models import facts, hashes, hub, layouts
from batchgen.models.fetching import fetch_model
from batchgen.models.folder import facts_of, find_model, identity
from batchgen.models.loaders import LOADERS
from batchgen.weights import Model
from tests import tiny


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.folder("sd1"), tmp_path / "model"))


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


UNET = "unet/diffusion_pytorch_model.safetensors"

WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda f: (f / "model_index.json").unlink(), "no model_index.json"),
    "index no JSON": (lambda f: (f / "model_index.json").write_text("{"), "cannot be read"),
    "another family": (
        lambda f: edit(f / "model_index.json", _class_name="AudioPipeline"),
        "'AudioPipeline', which is no pipeline of the installed diffusers; known families: StableDiffusionPipeline",
    ),
    "custom code": (
        lambda f: edit(f / "model_index.json", unet=["my_unet", "MyUNet"]),
        "never run",
    ),
    "foreign scheduler": (
        lambda f: edit(f / "model_index.json", scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"]),
        "scheduler as",
    ),
    "no unet config": (lambda f: (f / "unet/config.json").unlink(), "lacks unet/config.json"),
    "no scheduler": (lambda f: shutil.rmtree(f / "scheduler"), "lacks scheduler/scheduler_config.json"),
    "no vocabulary": (lambda f: (f / "tokenizer/tokenizer.json").unlink(), "lacks tokenizer/vocab.json"),
    "no weights": (lambda f: (f / UNET).unlink(), "lacks diffusion_pytorch_model.safetensors"),
    "pickles only": (
        lambda f: (f / UNET).rename(f / "unet/diffusion_pytorch_model.bin"),
        "pickles, which can run code; convert it once",
    ),
    "another variant": (
        lambda f: (f / UNET).rename(f / "unet/diffusion_pytorch_model.fp16.safetensors"),
        'set model.variant = "fp16"',
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_folders_that_are_refused(folder: Path, wrong: str) -> None:
    damage, message = WRONG[wrong]
    damage(folder)
    with pytest.raises(UsageError, match=message) as error:
        find_model(Model(path=str(folder)))
    assert "\n" not in str(error.value)


WRONG_XL: dict[str, tuple[Callable[[Path], object], str]] = {
    "no second encoder": (
        lambda f: (f / "text_encoder_2/model.safetensors").unlink(),
        "text_encoder_2 lacks model.safetensors",
    ),
    "no second encoder's config": (
        lambda f: (f / "text_encoder_2/config.json").unlink(),
        "lacks text_encoder_2/config.json",
    ),
    "no second vocabulary": (
        lambda f: (f / "tokenizer_2/tokenizer.json").unlink(),
        "lacks tokenizer_2/vocab.json or tokenizer_2/tokenizer.json",
    ),
    "one encoder only": (
        lambda f: edit(f / "model_index.json", text_encoder=[None, None]),
        r"gives text_encoder as \[None, None\]; allowed is transformers's CLIPTextModel;",
    ),
    "the refiner": (
        lambda f: edit(f / "model_index.json", _class_name="StableDiffusionXLImg2ImgPipeline"),
        "known families: StableDiffusionPipeline, StableDiffusionXLPipeline",
    ),
    "two lengths": (
        lambda f: edit(f / "tokenizer_2/tokenizer_config.json", model_max_length=64),
        "77 in tokenizer/tokenizer_config.json and 64 in tokenizer_2/tokenizer_config.json",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_XL)
def test_sdxl_folders_that_are_refused(tmp_path: Path, wrong: str) -> None:
    damage, message = WRONG_XL[wrong]
    folder = Path(shutil.copytree(tiny.folder("sdxl"), tmp_path / "model"))
    damage(folder)
    with pytest.raises(UsageError, match=message) as error:
        facts_of(Model(path=str(folder)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "values",
    [{"addition_embed_type": None, "projection_class_embeddings_input_dim": None}, {"addition_time_embed_dim": 16}],
)
def test_sdxl_with_another_network_is_refused(tmp_path: Path, values: dict[str, object]) -> None:
    folder = Path(shutil.copytree(tiny.folder("sdxl"), tmp_path / "model"))
    edit(folder / "unet/config.json", **values)
    with pytest.raises(UsageError, match=r"unet/config.json has addition_embed_type .* SDXL's is 'text_time'"):
        Engine(tiny.job(folder))


def test_every_layout_has_its_loader() -> None:
    assert LOADERS.keys() == layouts.FAMILIES.keys()


@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_what_is_fetched_from_the_hub_is_what_is_read(tmp_path: Path, kind: str, variant: str | None) -> None:
    tiny.pipeline(kind).save_pretrained(tmp_path, variant=variant, max_shard_size="100KB")
    patterns = list(hub.file_patterns(variant))
    for file in find_model(Model(path=str(tmp_path), variant=variant)).files:
        assert any(fnmatch.fnmatch(file, pattern) for pattern in patterns), file


def test_identity_of_sdxl_has_both_encoders(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny.folder("sdxl"), tmp_path / "model"))
    before = identity(Model(path=str(folder)))
    assert {"text_encoder_2/model.safetensors", "text_encoder_2/config.json", "tokenizer_2/tokenizer.json"} <= set(
        before
    )
    edit(folder / "model_index.json", force_zeros_for_empty_prompt=False)
    edit(folder / "vae/config.json", force_upcast=False)
    after = identity(Model(path=str(folder)))
    assert {name for name in after if after[name] != before[name]} == {"model_index.json", "vae/config.json"}


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / UNET).unlink()
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (folder / (UNET + ".index.json")).write_text(json.dumps(index))
    (folder / "unet/part-1.safetensors").touch()
    with pytest.raises(UsageError, match=r"lacks part-2.safetensors, of the 2 files that .*index.json names"):
        find_model(Model(path=str(folder)))


def test_shards_and_variants_load(tmp_path: Path) -> None:
    pipe = tiny.demo.build(scheduler=tiny.SD1_SCHEDULER, seed=1)
    pipe.save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
    pipe.save_pretrained(tmp_path / "variant", variant="fp16")
    rows = [tiny.row(steps=1)]
    wanted = tiny.denoise(tiny.engine("sd1"), rows)
    sharded = Engine(tiny.job(tmp_path / "sharded"))
    assert torch.equal(wanted, tiny.denoise(sharded, rows))
    variant = Engine(tiny.job(tmp_path / "variant", "model.variant=fp16"))
    assert torch.equal(wanted, tiny.denoise(variant, rows))
    names = find_model(Model(path=str(tmp_path / "sharded"))).files
    assert sum(name.startswith("unet/") and name.endswith(".safetensors") for name in names) > 1


@pytest.mark.parametrize("path", ["demmo", "./nowhere", "/nowhere/at/all", "~/nowhere-here", "a/b/c"])
def test_what_is_nowhere(path: str) -> None:
    with pytest.raises(UsageError, match="there is no model folder"):
        find_model(Model(path=path))


def test_a_slip_in_a_built_in_name_is_told() -> None:
    with pytest.raises(UsageError, match="did you mean 'demo'"):
        find_model(Model(path="demmo"))


def test_a_single_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(UsageError, match=r"single file.*from_single_file"):
        find_model(Model(path=str(file)))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_mute", [False, True], ids=["refusing", "mute"])
def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_mute: bool) -> None:
    """A port that refuses connections, and one that takes them and never says a word."""
    from huggingface_hub import constants

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(hub, "_HUB_TIMEOUT_S", 1.0)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if is_mute:
            listener.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(UsageError, match=r"cannot be fetched, the hub gave: .*; check the name, the network"):
            fetch_model(Model(path="someone/some-model"))
        listener.setblocking(False)
        if is_mute:
            listener.accept()[0].close()


def test_a_hub_id_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> None:
    """The hub's cache as it lies on disk: blobs named by hash, snapshots of links, a ref to the commit."""
    from huggingface_hub import constants

    commit = "a" * 40
    repo = tmp_path / "hub" / "models--someone--tiny"
    (repo / "blobs").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    for file in (file for file in folder.rglob("*") if file.is_file()):
        blob = repo / "blobs" / hashes.sha256(file)
        shutil.copy(file, blob)
        link = repo / "snapshots" / commit / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    found = find_model(Model(path="someone/tiny"))
    assert found.commit == commit
    told = identity(Model(path="someone/tiny"))
    assert told.pop("commit") == commit
    assert told == identity(Model(path=str(folder)))
    assert facts_of(Model(path="someone/tiny")).sampler == "PNDMScheduler"


def test_weights_that_do_not_fill_the_network(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / UNET)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, folder / UNET, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=f"unet lack 1 of the network's tensors.*{lost}"):
        Engine(tiny.job(folder))


def test_weights_that_are_cut_short(folder: Path) -> None:
    file = folder / UNET
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UsageError, match="cannot be loaded"):
        Engine(tiny.job(folder))


def test_identity_is_of_every_file_that_decides_pixels(folder: Path) -> None:
    model = Model(path=str(folder))
    before = identity(model)
    assert {
        UNET,
        "vae/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer.json",
    } <= before.keys()
    assert all(len(digest) == 64 for digest in before.values())
    (folder / "README.md").write_text("words")
    assert identity(model) == before
    edit(folder / "scheduler/scheduler_config.json", beta_end=0.013)
    after = identity(model)
    assert {name for name in after if after[name] != before[name]} == {"scheduler/scheduler_config.json"}
    assert identity(Model(path="demo")) != identity(Model(path="pattern"))


def test_hashes_are_remembered_until_the_file_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(path=str(folder))
    before = identity(model)
    read = []
    monkeypatch.setattr(hashes.hashlib, "file_digest", lambda *_: read.append(1))
    assert identity(model) == before
    assert not read
    monkeypatch.undo()
    monkeypatch.setenv("BATCHGEN_CACHE", str(folder.parent / "cache"))
    data = bytearray((folder / UNET).read_bytes())
    data[-1] ^= 1
    (folder / UNET).write_bytes(data)
    assert identity(model)[UNET] != before[UNET]


def test_a_broken_hash_cache_is_only_slow(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = identity(Model(path=str(folder)))
    (hashes.cache_dir() / "sha256.json").write_text("{torn")
    assert identity(Model(path=str(folder))) == before
    assert "made anew" in caplog.text


def test_facts_of_a_folder() -> None:
    found = facts_of(Model(path=str(tiny.folder("sd2"))))
    assert (found.family, found.sampler, found.text_length) == ("stable-diffusion", "DDIMScheduler", 77)
    assert (found.width, found.height, found.size_multiple) == (64, 64, 8)
    assert facts_of(Model(path=str(tiny.folder("lcm")))).guided_above is None
    assert facts_of(Model(path="pattern")) is facts.PATTERN
