"""The text that the web UI's "PNG Info" reads: by sd-parsers, and by a reading of the form of our own."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage
from sd_parsers import ParserManager

from batchgen import codec, job
from batchgen.errors import UsageError
from batchgen.infotext import infotext
from batchgen.metadata import parameters
from batchgen.models.pattern import paint
from batchgen.records import InitImage
from tests import runs
from tests.shards import AWKWARD_TEXTS, SEEDS, make_row

PIXELS = paint(make_row(width=96, height=64))
WITH = job.Output(png_info=True)
_PAIR = re.compile(r'(?P<name>\w[\w /-]+): (?P<value>"(?:[^"\\]|\\.)+"|[^,]*)(?:, |$)')


def png(output: job.Output = WITH, model: str = "a model", **changes: Any) -> bytes:
    return codec.encode(PIXELS, parameters(make_row(**changes), model), output)


def read(text: str) -> dict[str, str]:
    """The form as its author's reader takes it: the last line is pairs, lines before it the prompts."""
    *lines, last = text.strip().split("\n")
    pairs = {found["name"]: found["value"] for found in _PAIR.finditer(last)}
    assert len(pairs) >= 3
    assert "".join(found[0] for found in _PAIR.finditer(last)) == last
    starts = [n for n, line in enumerate(lines) if line.strip().startswith("Negative prompt:")]
    cut = starts[0] if starts else len(lines)
    negative = [line.strip().removeprefix("Negative prompt:").strip() for line in lines[cut:]]
    values = {name: json.loads(value) if value.startswith('"') else value for name, value in pairs.items()}
    return values | {"prompt": "\n".join(map(str.strip, lines[:cut])), "negative": "\n".join(negative)}


def chunk(data: bytes) -> str:
    with PILImage.open(io.BytesIO(data)) as image:
        return str(image.text["parameters"])  # type: ignore[attr-defined]


def test_the_form_is_as_the_web_ui_writes_it() -> None:
    row = make_row(
        0, "a fox, (snow:1.2)\nat dusk", negative_prompt="blurry, bad", width=96, height=64, steps=20,
        guidance_scale=7.0, sampler="dpmpp_2m_karras", seed=2**63 + 1,
    )  # fmt: skip
    assert infotext(parameters(row, "stable-diffusion-v1-5/stable-diffusion-v1-5")) == (
        "a fox, (snow:1.2)\nat dusk\nNegative prompt: blurry, bad\n"
        "Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7, Seed: 9223372036854775809, Size: 96x64, "
        "Model: stable-diffusion-v1-5/stable-diffusion-v1-5, RNG: CPU"
    )


def test_a_distilled_guidance_has_its_own_name() -> None:
    found = read(infotext(parameters(make_row(guidance_scale=3.5, true_cfg_scale=1.0), "flux")))
    assert (found["CFG scale"], found["Distilled CFG Scale"]) == ("1", "3.5")


def test_strength_has_the_web_uis_name() -> None:
    row = make_row(init=InitImage("0" * 64, "/pictures/a.png", "a.png"), strength=0.75)
    assert read(infotext(parameters(row, "sd")))["Denoising strength"] == "0.75"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_parser_of_other_people_recovers_it(seed: int) -> None:
    data = png(seed=seed, prompt="a red fox, (snow:1.2) 🐉", negative_prompt="blurry\nbad", steps=23,
               guidance_scale=7.5, sampler="euler_ancestral", width=96, height=64)  # fmt: skip
    with PILImage.open(io.BytesIO(data)) as image:
        found = ParserManager().parse(image)
    assert found is not None
    (sampler,) = found.samplers
    assert [one.value for one in sampler.prompts] == ["a red fox, (snow:1.2) 🐉"]
    assert [one.value for one in sampler.negative_prompts] == ["blurry\nbad"]
    assert sampler.name == "Euler a"
    assert sampler.parameters == {"steps": "23", "cfg_scale": "7.5", "seed": str(seed)}
    assert sampler.model is not None
    assert sampler.model.name == "a model"
    assert found.metadata["Size"] == "96x64"


LINE = st.text(st.characters(codec="utf-8", exclude_characters="\n\r")).map(str.strip)
WORDS = st.lists(LINE, max_size=3).map("\n".join).map(str.strip).filter(lambda text: "Negative prompt:" not in text)


@settings(max_examples=100, deadline=None)
@given(WORDS, WORDS, st.text(st.characters(codec="utf-8"), min_size=1), st.floats(0, 1e6))
def test_any_row_comes_back(prompt: str, negative: str, model: str, guidance: float) -> None:
    row = make_row(prompt=prompt, negative_prompt=negative, guidance_scale=guidance)
    found = read(infotext(parameters(row, model)))
    assert (found["prompt"], found["negative"]) == (prompt, negative)
    assert (found["Seed"], found["Size"], found["Steps"]) == (
        str(row.seed),
        f"{row.width}x{row.height}",
        str(row.steps),
    )
    assert float(found["CFG scale"]) == guidance
    assert found["Model"] == model


@pytest.mark.parametrize("text", AWKWARD_TEXTS)
def test_the_exact_parameters_lie_beside_it(text: str) -> None:
    data = png(prompt=text, negative_prompt=text)
    assert codec.read_parameters(data)["prompt"] == text
    assert text.strip().split("\n")[0].strip() in chunk(data)
    assert codec.decode(data).tobytes() == PIXELS.tobytes()


def test_each_of_the_two_is_switched_by_its_own_key() -> None:
    def texts(**output: bool) -> set[str]:
        with PILImage.open(io.BytesIO(png(job.Output.model_validate(output)))) as image:
            return set(image.text)  # type: ignore[attr-defined]

    assert texts() == {"batchgen"}
    assert texts(png_info=True) == {"batchgen", "parameters"}
    assert texts(embed=False, png_info=True) == {"parameters"}
    assert texts(embed=False) == set()


def test_it_is_of_png_alone() -> None:
    with pytest.raises(UsageError, match=r'output\.png_info = True is not usable: .* output\.image is "webp"'):
        job.load_job(None, ["output.image=webp", "output.png_info=true"])


def test_a_run_writes_it(tmp_path: Path) -> None:
    source = runs.prompts(tmp_path / "m.parquet", 3, seed=7, negative_prompt="blurry")
    assert runs.run(source, tmp_path / "out", "--set", "output.png_info=true").code == 0
    assert len(runs.check_images(tmp_path / "out")) == 3
    found = [read(chunk(path.read_bytes())) for path in sorted((tmp_path / "out").rglob("*.png"))]
    assert [one["prompt"] for one in found] == [f"prompt number {n}" for n in range(3)]
    assert {(one["negative"], one["Seed"], one["Model"]) for one in found} == {("blurry", "7", "pattern")}
