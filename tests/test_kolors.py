"""What Kolors has beyond SDXL: texts of ChatGLM, and a tokenizer that needs a package. test_families has its parity."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from batchgen.engine.engine import Engine
from batchgen.errors import UsageError
from batchgen.models import loading
from batchgen.models.folder import facts_of, find_model
from batchgen.models.packages import check_packages
from batchgen.weights import Model
from tests import families, loras, runs, test_loras, tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(families.folder("kolors"), tmp_path / "model"))


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_text_is_encoded_the_same_whatever_shares_its_chunk() -> None:
    """Where no text of a chunk is padded, ChatGLM would choose other kernels."""
    model = families.engine("kolors").model
    (alone, *_), (among, *_) = (model.encode([tiny.LONG, *others]) for others in ([tiny.LONG] * 3, ["", "a", "b c"]))
    assert [torch.equal(one, other) for one, other in zip(alone, among, strict=True)] == [True, True]
    assert [tuple(one.shape) for one in alone] == [(256, 32), (32,)]
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in alone), "no view of all the chunk"


def test_samplers_follow_its_training_schedule() -> None:
    """Of 1,100 timesteps."""
    engine, pipe = families.engine("kolors"), families.pipeline("kolors")
    assert engine.facts.max_steps == 1100
    for sampler in ("dpmpp_2m", "euler_ancestral"):
        rows = [tiny.row(i, sampler=sampler, steps=2 + i, negative_prompt=(None, "x")[i]) for i in range(2)]
        for row, made in zip(rows, tiny.denoise(engine, rows), strict=True):
            assert tiny.difference(made, tiny.reference(pipe, row, engine.facts)[0]) < 1e-4


def test_a_lora_of_the_network() -> None:
    """As diffusers' pipeline with its layers."""
    maker = test_loras.engine("kolors", {"net": [(loras.file("kolors", 2, with_texts=False), 1.0)]})
    row = tiny.row(sampler="euler")
    wanted = test_loras.reference(loras.pipeline("kolors", 2, with_texts=False), row, maker.facts)
    assert test_loras.deviation(test_loras.made(maker, [row], "net")[0], wanted) <= 1
    assert test_loras.deviation(test_loras.made(maker, [row])[0], wanted) > 8


def test_text_encoders_read_from_disk_make_the_same() -> None:
    rows = [tiny.row(i, sampler="euler", prompt=("a fox", tiny.LONG)[i]) for i in range(2)]
    engine = Engine(tiny.job(families.folder("kolors"), "engine.text_encoder=load"))
    assert torch.equal(tiny.denoise(engine, rows), tiny.denoise(families.engine("kolors"), rows))


@pytest.mark.parametrize("wrong", ["zeros", "vocabulary", "conditions", "image"])
def test_what_cannot_be_made_is_refused(folder: Path, wrong: str, tmp_path: Path) -> None:
    if wrong == "zeros":
        edit(folder / "model_index.json", force_zeros_for_empty_prompt=True)
        with pytest.raises(UsageError, match=r"force_zeros_for_empty_prompt.* set it to false there"):
            facts_of(Model(path=str(folder)))
    if wrong == "vocabulary":
        (folder / "tokenizer" / "tokenizer.model").rename(folder / "tokenizer" / "vocab.txt")
        with pytest.raises(UsageError, match=r"lacks tokenizer/tokenizer\.model$"):
            find_model(Model(path=str(folder)))
    if wrong == "conditions":
        edit(folder / "unet" / "config.json", projection_class_embeddings_input_dim=99)
        with pytest.raises(UsageError, match="with 99 inputs; Kolors's is 'text_time' with 80"):
            Engine(tiny.job(folder))
    if wrong == "image":
        picture = tiny.init_image(0)
        rows = runs.manifest(tmp_path / "m.parquet", [{"prompt": "a", "image": picture.file}])
        ended = runs.batchgen("plan", rows, "--model", folder)
        assert (ended.code, "image" in ended.err) == (2, True)


def test_diffusers_cannot_make_what_is_refused(folder: Path) -> None:
    edit(folder / "model_index.json", force_zeros_for_empty_prompt=True)
    pipe = tiny.reference_pipeline(folder)
    with pytest.raises(AttributeError, match="NoneType"):
        pipe("a", width=64, height=64, num_inference_steps=1)
    assert pipe("a", negative_prompt="", width=64, height=64, num_inference_steps=1).images


def test_a_run_counts_tokens_and_can_refuse_long_prompts(tmp_path: Path) -> None:
    """The tiny tokenizer makes one token of a letter, and one of the blank before a word."""
    rows = [
        {"id": "fox", "prompt": "a fox", "negative_prompt": "b" * 300},
        {"id": "long", "prompt": "a" * 253, "guidance_scale": 1.0},
        {"id": "longer", "prompt": "a" * 254},
    ]
    source, words = runs.manifest(tmp_path / "m.parquet", rows), ("--model", families.folder("kolors"))
    own = ("--set", "sampling.width=64", "--set", "sampling.height=64", "--set", "sampling.steps=1")
    ended = runs.run(source, tmp_path / "out", *own, model=families.folder("kolors"))
    assert (ended.code, "Traceback" in ended.err) == (0, False), ended.err
    made = {row["id"]: row for row in pq.read_table(tmp_path / "out" / "metadata.parquet").to_pylist()}
    counts = {name: (row["tokens"], row["tokens_dropped"]) for name, row in made.items()}
    assert counts == {"fox": (6, 47), "long": (254, 0), "longer": (254, 1)}
    refused = runs.batchgen("plan", source, *words, *own, "--on-truncate", "error")
    assert refused.code == 2
    assert "row 2: prompt has 255 tokens, of which the last 1 would be dropped" in refused.err
    assert "row 1" not in refused.err


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)


def test_without_sentencepiece_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, source = families.folder("kolors"), runs.prompts(tmp_path / "m.parquet", 2)
    families.pipeline("kolors")
    without(monkeypatch, "sentencepiece")
    monkeypatch.setattr(loading, "_load", lambda *told: pytest.fail("something was loaded"))
    said = "which needs sentencepiece, not installed here; install batchgen[sentencepiece]"
    for words in (["run", source, "-o", tmp_path / "out"], ["plan", source, "--on-truncate", "error"]):
        ended = runs.batchgen(*words, "--model", place)
        assert (ended.code, ended.err.count(said), "Traceback" in ended.err) == (2, 1, False), ended.err
    ended = runs.batchgen("doctor", place)
    assert (ended.code, "install batchgen[sentencepiece]" in " ".join(ended.out.split())) == (3, True), ended.out
    assert runs.batchgen("plan", source, "--model", place).code == 0


@pytest.mark.parametrize("kind", ["pixart", "aura", "bria"])
@pytest.mark.parametrize("package", ["sentencepiece", "google", "google.protobuf"])
def test_tokenizers_that_are_converted_need_both_packages(
    tmp_path: Path, kind: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they lie on the hub: a .model file, and no tokenizer.json."""
    path = Path(shutil.copytree(families.folder(kind), tmp_path / "model"))
    without(monkeypatch, package)
    check_packages(find_model(Model(path=str(path))))
    (path / "tokenizer" / "tokenizer.json").unlink()
    shutil.copy(families.folder("kolors") / "tokenizer" / "tokenizer.model", path / "tokenizer")
    with pytest.raises(UsageError, match=r"install batchgen\[sentencepiece\]"):
        check_packages(find_model(Model(path=str(path))))
    with pytest.raises(UsageError, match=r"install batchgen\[sentencepiece\]"):
        families.open_model(tiny.job(path), None)
