"""Model folders as the hub has them: variants of some components, shards, no safety checker; and single files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from batchgen.engine.engine import Engine
from batchgen.errors import UsageError
from batchgen.models import hub
from batchgen.models.fetching import fetch_model
from batchgen.models.folder import find_model, identity, located
from batchgen.models.loading import load_components
from batchgen.records import Image
from batchgen.weights import Model
from tests import families, originals, runs, tiny
from tests.hub import serving

UNET = "unet/diffusion_pytorch_model"
FP16 = {"variant": "fp16"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sets of weights, fp16 and whole, and no entry for a safety checker."""
    tiny.pipeline("sd1").save_pretrained(tmp_path / "model", variant="fp16", max_shard_size="700KB")
    shutil.copytree(tiny.folder("sd1"), tmp_path / "model", dirs_exist_ok=True)
    index = tmp_path / "model" / "model_index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({name: one for name, one in content.items() if name != "safety_checker"}))
    return tmp_path / "model"


def lose(folder: Path, pattern: str) -> None:
    lost = list(folder.glob(pattern))
    assert lost
    for file in lost:
        file.unlink()


def weights(folder: Path, **keys: Any) -> list[str]:
    found = find_model(Model(path=str(folder), **keys)).files
    return [name for name in found if name.endswith(".safetensors")]


def test_both_sets_are_there(folder: Path) -> None:
    plain, half = weights(folder), weights(folder, **FP16)
    assert len(plain) == 3
    assert not any("fp16" in name for name in plain)
    assert len(half) > 6
    assert all(".fp16" in name for name in half)
    wanted = tiny.denoise(tiny.engine("sd1"), [tiny.row(steps=1)])
    assert torch.equal(wanted, tiny.denoise(Engine(tiny.job(folder, "model.variant=fp16")), [tiny.row(steps=1)]))


def test_a_variant_that_some_components_lack(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hub's SD3 has it. What is fetched is what is read."""
    lose(folder, f"{UNET}*fp16*")
    half = weights(folder, **FP16)
    assert [name for name in half if name.startswith("unet/")] == [f"{UNET}.safetensors"]
    assert sum("fp16" in name for name in half) == len(half) - 1
    wanted = tiny.denoise(tiny.engine("sd1"), [tiny.row(steps=1)])
    assert torch.equal(wanted, tiny.denoise(Engine(tiny.job(folder, "model.variant=fp16")), [tiny.row(steps=1)]))
    with serving(folder) as served:
        name = own_hub(served, tmp_path, monkeypatch)
        assert fetch_model(Model(path=name, **FP16)).num_files == len(find_model(Model(path=name, **FP16)).files)
        assert {one for one in served.fetched if one.endswith(".safetensors")} == set(half)


def own_hub(served: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """This process asks that hub and no other; its one repository's name."""
    from huggingface_hub import constants

    for key, value in served.environment(home).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    address = f"http://127.0.0.1:{served.port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub._found.cache_clear()
    return str(served.name)


WRONG: dict[str, tuple[Callable[[Path], object], dict[str, str], str]] = {
    "fp16 alone": (lambda f: lose(f, f"{UNET}.safetensors"), {}, r'lacks .* but has .*; set model.variant = "fp16"$'),
    "no such variant": (lambda f: None, {"variant": "bf16"}, "has no weights of model.variant = 'bf16'"),
    "shards": (
        lambda f: lose(f, f"{UNET}.fp16-0000[23]-of*"),
        FP16,
        r"lacks .*fp16-00002-of-\d+.safetensors, .*fp16-00003-of-\d+.safetensors, of the \d+ files that .*index.fp16",
    ),
    "pickles": (
        lambda f: (lose(f, "vae/*fp16*"), (f / "vae/diffusion_pytorch_model.safetensors").rename(f / "vae/model.bin")),
        {},
        r"has only model.bin, pickles, which can run code; convert it once",
    ),
    "no index": (lambda f: index(f, []), {}, r"index.json holds no JSON object"),
    "an empty index": (lambda f: index(f, {}), {}, r"index.json has no weight_map that names files, so it is no index"),
    "an index of numbers": (lambda f: index(f, {"weight_map": {"a": 1}}), {}, "no weight_map that names files"),
    "an index of nothing": (lambda f: index(f, {"weight_map": None}), {}, "no weight_map that names files"),
}


def index(folder: Path, content: object) -> None:
    (folder / f"{UNET}.safetensors.index.json").write_text(json.dumps(content))


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_missing_is_said(folder: Path, wrong: str) -> None:
    damage, keys, message = WRONG[wrong]
    damage(folder)
    with pytest.raises(UsageError, match=message):
        find_model(Model(path=str(folder), **keys))


@pytest.mark.parametrize("has_entry", [False, True])
def test_a_safety_checker_that_is_not_there(folder: Path, has_entry: bool) -> None:
    """Its folder is missing from many copies; model_index.json may name it all the same."""
    if has_entry:
        index = json.loads((folder / "model_index.json").read_text())
        entry = {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]}
        (folder / "model_index.json").write_text(json.dumps(index | entry))
    assert len(weights(folder)) == 3
    with pytest.raises(UsageError, match="safety_checker"):
        find_model(Model(path=str(folder)), has_checker=True)


def bare(kind: str, tmp_path: Path) -> Path:
    """A tiny pipeline's folder without weights."""
    made = Path(shutil.copytree(tiny.folder(kind), tmp_path / f"bare-{kind}"))
    lose(made, "*/*.safetensors")
    return made


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_a_single_file_is_its_folder(tmp_path: Path, kind: str) -> None:
    """In the layout of its authors, with nothing but the configuration beside it; a link, as in the hub's cache."""
    file = tmp_path / "model.safetensors"
    file.symlink_to(originals.write(tiny.pipeline(kind), tmp_path / "blob.safetensors").rename(tmp_path / "blob"))
    made = Engine(tiny.job(file, f"model.config={bare(kind, tmp_path)}"))
    batch = tiny.batch([tiny.row(steps=1)], made.facts)
    (ours,), (theirs,) = (one.submit(batch, tiny.never)() for one in (made, tiny.engine(kind)))
    assert isinstance(ours, Image)
    assert isinstance(theirs, Image)
    assert (ours.pixels == theirs.pixels).all()


def test_a_single_file_that_lacks_a_component(tmp_path: Path) -> None:
    """As those without VAE: it comes from the configuration's folder, if that has it."""
    file = originals.write(tiny.pipeline("sd1"), tmp_path / "model.safetensors", leave_out="first_stage_model.")
    whole, without = tiny.folder("sd1"), bare("sd1", tmp_path)
    found = find_model(Model(path=str(file), config=str(whole)))
    assert [path.name for path in found.weights] == ["diffusion_pytorch_model.safetensors", "model.safetensors"]
    assert found.in_checkpoint == {"unet", "text_encoder"}
    assert torch.equal(Engine(tiny.job(file, f"model.config={whole}")).model.vae.encoder.conv_in.weight,
                       tiny.pipeline("sd1").vae.encoder.conv_in.weight)  # fmt: skip
    with pytest.raises(UsageError, match=r"model.safetensors holds no weights of vae, and .*vae lacks .*set model.con"):
        find_model(Model(path=str(file), config=str(without)))


def test_a_single_file_of_flux_is_a_transformer(tmp_path: Path) -> None:
    """All else comes from the configuration's folder."""
    file, config = tmp_path / "dev.safetensors", families.folder("flux")
    save_file({"double_blocks.0.img_attn.norm.key_norm.scale": torch.ones(4)}, file)
    found = find_model(Model(path=str(file), config=str(config)))
    assert found.in_checkpoint == {"transformer"}
    assert {path.parent.name for path in found.weights if path != file} == {"vae", "text_encoder", "text_encoder_2"}


WRONG_FILES: dict[str, tuple[str, str | None, str]] = {
    "no configuration": ("model.safetensors", None, "has neither its configuration nor its tokenizers; set model.conf"),
    "a pickle": ("model.ckpt", "sd1", "no .safetensors file: others are pickles, which can run code"),
    "another family": ("lora.safetensors", "sd1", r"holds no tensor model.diffusion_model.…, so it is no single file"),
    "cut short": ("short.safetensors", "sd1", r"short.safetensors has [\d,]+ bytes, where its header tells of"),
    "half a network": (
        "half.safetensors",
        "sd1",
        r"half.safetensors lacks tensors that .*sd1 describes; set model.config to",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_FILES)
def test_single_files_that_are_refused(tmp_path: Path, wrong: str) -> None:
    name, config, message = WRONG_FILES[wrong]
    file, leave_out = tmp_path / name, "model.diffusion_model.input" if name.startswith("half") else "-"
    originals.write(tiny.pipeline("sd1"), file, "model.diffusion" if name.startswith("lora") else leave_out)
    if name.startswith("short"):
        file.write_bytes(file.read_bytes()[:-1000])
    own = [] if config is None else [f"model.config={tiny.folder(config)}"]
    with pytest.raises(UsageError, match=message):
        Engine(tiny.job(file, *own))


def test_a_configuration_that_has_no_effect(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"model.config = 'x' has no effect on model .*: only a single"):
        find_model(Model(path=str(folder), config="x"))


def test_a_variant_that_has_no_effect_on_a_single_file(tmp_path: Path) -> None:
    file = originals.write(tiny.pipeline("sd1"), tmp_path / "a.safetensors")
    model = Model(path=str(file), config=str(tiny.folder("sd1")), variant="fp16")
    with pytest.raises(UsageError, match=f"no weights of model.variant = 'fp16': all are in {file}; leave it out"):
        find_model(model)


def test_the_identity_of_a_single_file(tmp_path: Path) -> None:
    """Its content counts and not its name; so do the files of the configuration, and no weights that lie there."""
    config = bare("sd1", tmp_path)
    first = originals.write(tiny.pipeline("sd1"), tmp_path / "a.safetensors")
    second = Path(shutil.copy(first, tmp_path / "b.safetensors"))
    whole = tiny.folder("sd1")
    told = [identity(Model(path=str(file), config=str(config))) for file in (first, second)]
    assert told[0] == told[1] == identity(Model(path=str(first), config=str(whole)))
    assert {"checkpoint", "unet/config.json", "tokenizer/tokenizer.json"} <= told[0].keys()


def test_a_single_file_is_the_same_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts are the files, not how file and configuration were named when the run began."""
    file, config = originals.write(tiny.pipeline("sd1"), tmp_path / "m.safetensors"), bare("sd1", tmp_path)
    source, out = runs.manifest(tmp_path / "m.parquet", {"prompt": ["a fox"], "steps": [1]}), tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    assert runs.run(source, out, "--set", f"model.config={config.name}", model=file.name).code == 0
    monkeypatch.chdir("/")
    assert runs.run(source, out, "--set", f"model.config={config}", model=file).code == 0
    retried = runs.batchgen("retry", out)
    assert (retried.code, "there is nothing to try again" in retried.err) == (0, True), retried.err


def test_a_single_file_by_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration of a hub id: no weights are fetched for it. Planned and made from another folder, by name."""
    config, file = tiny.folder("sd1"), originals.write(tiny.pipeline("sd1"), tmp_path / "own.safetensors")
    with serving(config) as served:
        name = own_hub(served, tmp_path, monkeypatch)
        words = ("--set", f"model.config={name}")
        assert fetch_model(Model(path=str(file), config=name)).folder.checkpoint == file
        assert not any(one.endswith(".safetensors") for one in served.fetched)
    monkeypatch.chdir(tmp_path)
    moved = located(Model(path="own.safetensors", config=name))
    assert (moved.path, moved.config) == (str(file), name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = runs.batchgen("doctor", file, *words)
    assert "whole: " in " ".join(ended.out.split()), ended


def test_shards_go_before_one_file_where_the_library_reads_them_first(tmp_path: Path) -> None:
    """What is identified is what is read: of a network the shards, of a text encoder the one file."""
    folder, shards = tiny.save(tmp_path / "model", seed=2), tiny.pipeline("sd1")
    single = tiny.reference_pipeline(folder)
    shards.unet.save_pretrained(tmp_path / "unet", max_shard_size="700KB")
    shards.text_encoder.save_pretrained(tmp_path / "text_encoder", max_shard_size="20KB")
    for name in ("unet", "text_encoder"):
        for file in (tmp_path / name).glob("*-of-*"):
            shutil.copy(file, folder / name)
        (index,) = (tmp_path / name).glob("*.index.json")
        shutil.copy(index, folder / name)
    model = find_model(Model(path=str(folder)))
    read = [Path(name).name for name in model.files if name.endswith("safetensors")]
    assert sum("-of-" in name for name in read) > 1
    assert sorted(name for name in read if "-of-" not in name) == [
        "diffusion_pytorch_model.safetensors",  # The VAE's.
        "model.safetensors",
    ]
    loaded = load_components(model, torch.float32, torch.float32)
    for name, wanted in (("unet", shards.unet), ("text_encoder", single.text_encoder)):
        for mine, theirs in zip(loaded[name].parameters(), wanted.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("unet/config.json", {"sample_size": "x"}),
        ("vae/config.json", {"block_out_channels": 5}),
        ("vae/config.json", {"block_out_channels": "x"}),
        ("scheduler/scheduler_config.json", {"_class_name": ["a"]}),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": "x"}),
        ("text_encoder/config.json", {"hidden_size": 17}),
    ],
)
def test_configurations_of_nonsense_are_no_crash(tmp_path: Path, file: str, values: dict[str, object]) -> None:
    """They are found while planning, or at the latest when the model is loaded."""
    folder = tiny.save(tmp_path / "model")
    content = json.loads((folder / file).read_text()) | values
    (folder / file).write_text(json.dumps(content))
    source = runs.prompts(tmp_path / "m.parquet", 1, width=64, height=64)
    ended = runs.run(source, tmp_path / "out", "--set", "engine.device=cpu", "--max-memory", "1GB", model=folder)
    assert ended.code == 2, ended
    assert str(folder) in ended.err
    assert "Traceback" not in ended.err
