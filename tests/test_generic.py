"""Pipelines of no family of their own: what is known of them without torch, what is refused, and whole runs."""

from __future__ import annotations

import fnmatch
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image as PillowImage
from safetensors.torch import load_file, save_file

from batchgen.engine.whole import WholePipeline
from batchgen.errors import UsageError
from batchgen.generator import Dropped
from batchgen.models import generic, signatures
from batchgen.models.folder import facts_of, find_model, identity
from batchgen.records import Failure
from batchgen.weights import Model
from tests import families, runs, tiny


def test_planning_needs_no_torch() -> None:
    program = (
        "import sys; from batchgen.job import Model; from batchgen.models.folder import facts_of;"
        f"found = facts_of(Model(path={str(families.folder('pag'))!r}));"
        "assert not found.is_captured and 'negative_prompt' in found.columns;"
        "sys.exit(bool({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_facts_come_from_signature_and_configuration() -> None:
    pag, bria = (facts_of(Model(path=str(families.folder(kind)))) for kind in ("pag", "bria"))
    assert (pag.family, pag.steps, pag.guidance_scale, pag.width) == ("generic", 20, 4.5, 64)
    assert pag.sampler == "DPMSolverMultistepScheduler"
    assert (bria.steps, bria.guidance_scale, bria.width, bria.size_multiple) == (30, 5.0, 1024, 8)
    assert pag.columns == (
        *("prompt", "negative_prompt", "width", "height", "steps", "guidance_scale", "sampler", "seed"),
    )
    qwen = generic.facts("QwenImagePipeline", {}, "transformer")
    assert (qwen.guiding, qwen.needs_negative, qwen.takes_guidance_scale) == ("true_cfg_scale", True, False)
    families_own = facts_of(Model(path=str(families.folder("flux"))))
    assert families_own.is_captured
    assert "true_cfg_scale" in families_own.columns


@pytest.mark.parametrize(
    ("pipeline", "why"),
    [
        ("WanPipeline", "takes num_frames"),
        ("FluxImg2ImgPipeline", "strength, image: it makes no images of text alone"),
        ("StableDiffusion3ControlNetPipeline", "control_image"),
        ("AudioLDM2Pipeline", "takes no width"),
        ("MyPipeline", "no pipeline of the installed diffusers"),
    ],
)
def test_pipelines_that_make_something_else_are_refused(tmp_path: Path, pipeline: str, why: str) -> None:
    folder = Path(shutil.copytree(families.folder("pag"), tmp_path / "model"))
    edit(folder, _class_name=pipeline)
    with pytest.raises(UsageError, match=why):
        find_model(Model(path=str(folder)))


def edit(folder: Path, **values: object) -> None:
    file = folder / "model_index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    "name", ["QwenImagePipeline", "ZImagePipeline", "Flux2KleinPipeline", "SanaPipeline", "Flux2Pipeline"]
)
def test_pipelines_that_make_images_of_text_are_taken(name: str) -> None:
    assert signatures.refusal(name) == ""


def test_code_of_the_folder_is_never_run(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(families.folder("pag"), tmp_path / "model"))
    edit(folder, transformer=["my_network", "MyNetwork"])
    with pytest.raises(UsageError, match="never run"):
        find_model(Model(path=str(folder)))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(families.folder("pag"), tmp_path / "model"))
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    kept = weights.rename(folder / "kept")
    with pytest.raises(UsageError, match=r"transformer lacks diffusion_pytorch_model\.safetensors"):
        find_model(Model(path=str(folder)))
    kept.rename(weights)
    shutil.rmtree(folder / "vae")
    with pytest.raises(UsageError, match="lacks vae/"):
        find_model(Model(path=str(folder)))


@pytest.mark.parametrize("component", ["transformer", "text_encoder", "vae"])
def test_weights_that_do_not_fill_a_network_are_refused(tmp_path: Path, component: str) -> None:
    """diffusers' own loader would draw what is missing, and other pictures every time."""
    folder = Path(shutil.copytree(families.folder("pag"), tmp_path / "model"))
    (file,) = (folder / component).glob("*.safetensors")
    tensors = load_file(file)
    name = sorted(tensors)[len(tensors) // 2]
    save_file({key: one for key, one in tensors.items() if key != name}, file, {"format": "pt"})
    with pytest.raises(UsageError, match=f"the weights of {component} lack 1 of the network's .* {name!r}"):
        WholePipeline(tiny.job(folder))


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_what_is_fetched_is_what_is_read(tmp_path: Path, variant: str | None) -> None:
    families.pipeline("pag").save_pretrained(tmp_path, variant=variant, max_shard_size="20KB")
    found = find_model(Model(path=str(tmp_path), variant=variant))
    wanted = [*generic.patterns(found.index, variant, ()), "model_index.json"]
    for file in found.files:
        assert any(fnmatch.fnmatch(file, pattern) for pattern in wanted), file
    assert {"scheduler/scheduler_config.json", "tokenizer/tokenizer.json"} <= identity(
        Model(path=str(tmp_path), variant=variant)
    ).keys()


@pytest.mark.parametrize("override", ["engine.mode=graph", "engine.decode_batch=2", "model.vae_dtype=float32"])
def test_keys_without_effect_are_refused(override: str) -> None:
    with pytest.raises(UsageError, match=rf"{override.split('=')[0]} = .* has no effect on model"):
        WholePipeline(tiny.job(families.folder("pag"), override))


def test_prompts_are_never_cleaned_whatever_is_installed() -> None:
    made = families.engine("pag")
    told = made._arguments(tiny.row(sampler=made.facts.sampler), tiny.never)
    assert (told["clean_caption"], told["use_resolution_binning"]) == (False, False)


def test_loading_says_nothing_to_people_who_write_pipelines() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        WholePipeline(tiny.job(families.folder("pag")))


def test_a_row_is_dropped_between_two_steps() -> None:
    made, asked = families.engine("bria"), list[bool]()
    row = tiny.row(sampler=made.facts.sampler, steps=4)

    def should_drop() -> bool:
        asked.append(True)
        return len(asked) == 2

    with pytest.raises(Dropped):
        made.submit(tiny.batch([row], made.facts), should_drop)
    assert len(asked) == 2


def test_a_size_that_the_pipeline_rounds_fails_the_row() -> None:
    made = families.engine("bria")
    (failed,) = made.submit(tiny.batch([tiny.row(sampler=made.facts.sampler, width=72)], made.facts), tiny.never)()
    assert isinstance(failed, Failure)
    assert (failed.error, failed.message.split(":")[0]) == (
        "WrongSize",
        "72x64 was asked for and the pipeline made 64x64",
    )


@pytest.mark.parametrize("kind", ["pag", "flux", "z-image"])
def test_a_run_from_manifest_to_files(tmp_path: Path, kind: str) -> None:
    known = facts_of(Model(path=str(families.folder(kind))))
    columns: dict[str, list[object]] = {
        "id": ["a", "b", "c"],
        "prompt": ["a fox", tiny.LONG, ""],
        "negative_prompt": ["blurry", None, None],
        "guidance_scale": [3.5, 3.0, 2.0],
        "seed": [1, 2, 3],
        "steps": [2, 3, 2],
        "width": [64, 64, 96],
        "height": [64] * 3,
    }
    if known.has_true_cfg:
        columns["true_cfg_scale"] = [3.0, None, 1.0]
    source = runs.manifest(tmp_path / "m.parquet", columns)
    ended = runs.run(source, tmp_path / "out", model=families.folder(kind))
    assert ended.code == 0, ended.err
    for made in pq.read_table(tmp_path / "out" / "metadata.parquet").to_pylist():
        row = tiny.row(**{name: made[name] for name in {*columns, "sampler", "true_cfg_scale"}})
        wanted = np.asarray(families.reference(kind, row), int)
        pixels = np.asarray(PillowImage.open(tmp_path / "out" / made["file_name"]), int)
        assert np.abs(wanted - pixels).max() <= 1
        assert known.is_captured or (made["batch_size"], made["mode"], made["tokens"]) == (1, "eager", None)
