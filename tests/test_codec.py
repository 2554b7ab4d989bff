import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags
from PIL import Image as PILImage

from batchgen import codec, job
from batchgen.errors import BatchgenError, RowError
from batchgen.metadata import parameters
from batchgen.models.pattern import paint
from tests.shards import AWKWARD_TEXTS, SEEDS, make_row

FORMATS = ["png", "jpeg", "webp"]
ROOT = Path(__file__).parents[1]
PIXELS = paint(make_row(width=96, height=64))
OUTPUTS = {name: job.Output.model_validate({"image": name, "quality": 90}) for name in FORMATS}


def encoded(image: str, **changes: object) -> tuple[bytes, dict[str, Any]]:
    embedded = parameters(make_row(**changes), "a model")  # type: ignore[arg-type]
    return codec.encode(PIXELS, embedded, OUTPUTS[image]), embedded


@pytest.mark.parametrize("image", FORMATS)
@pytest.mark.parametrize("text", AWKWARD_TEXTS)
def test_parameters_come_back_exactly(image: str, text: str) -> None:
    data, embedded = encoded(image, prompt=text, id=text, negative_prompt=text)
    assert codec.read_parameters(data) == embedded


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FORMATS), st.text(), st.one_of(st.none(), st.text()))
def test_any_text_comes_back_exactly(image: str, prompt: str, negative: str | None) -> None:
    data, embedded = encoded(image, prompt=prompt, negative_prompt=negative)
    assert codec.read_parameters(data) == embedded


@pytest.mark.parametrize("image", FORMATS)
@pytest.mark.parametrize("seed", SEEDS)
def test_seeds_come_back_exactly(image: str, seed: int) -> None:
    data, _ = encoded(image, seed=seed)
    assert int(codec.read_parameters(data)["seed"]) == seed
    assert codec.read_parameters(data)["noise_seed"] == seed % 2**32


def test_other_tools_find_the_parameters() -> None:
    data, embedded = encoded("png", prompt="🐉")
    assert json.loads(PILImage.open(io.BytesIO(data)).text["batchgen"]) == embedded  # type: ignore[attr-defined]
    for image in ("jpeg", "webp"):
        data, embedded = encoded(image, prompt="🐉")
        exif = PILImage.open(io.BytesIO(data)).getexif().get_ifd(ExifTags.IFD.Exif)
        comment = exif[ExifTags.Base.UserComment]
        assert comment[:8] == b"ASCII\0\0\0"
        assert json.loads(comment[8:]) == embedded


@pytest.mark.parametrize("image", FORMATS)
def test_nothing_is_embedded_when_not_wanted(image: str) -> None:
    data = codec.encode(PIXELS, None, OUTPUTS[image])
    assert b"apple" not in data
    with pytest.raises(BatchgenError, match="no parameters are embedded"):
        codec.read_parameters(data)


def test_png_is_lossless_and_the_others_close() -> None:
    for image in FORMATS:
        pixels = codec.decode(encoded(image)[0])
        assert pixels.dtype == np.uint8
        difference = np.abs(pixels.astype(int) - PIXELS).mean()
        assert difference == 0 if image == "png" else difference < 12


@pytest.mark.parametrize("image", FORMATS)
def test_bytes_are_the_same_in_another_process(image: str) -> None:
    script = (
        f"import hashlib; from tests import test_codec as t; print(hashlib.sha256(t.encoded({image!r})[0]).hexdigest())"
    )
    hashes = {
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout
        for _ in range(2)
    }
    assert len(hashes) == 1
    assert encoded(image) == encoded(image)


@pytest.mark.parametrize("image", FORMATS)
def test_every_truncation_is_an_error(image: str) -> None:
    data, _ = encoded(image)
    for length in [*range(0, len(data), 37), len(data) - 1]:
        with pytest.raises(BatchgenError, match="damaged"):
            codec.decode(data[:length])
    with pytest.raises(BatchgenError, match="damaged"):
        codec.decode(data + b"\0")


def test_every_flipped_byte_of_a_png_is_an_error() -> None:
    data, _ = encoded("png")
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 0x10
        with pytest.raises(BatchgenError, match="damaged"):
            codec.decode(bytes(flipped))


def test_a_prompt_too_long_for_exif_fails_its_row_with_the_way_out() -> None:
    with pytest.raises(RowError, match=r"parameters take 80,\d+ bytes as EXIF and JPEG holds 65,533.*png"):
        encoded("jpeg", prompt="x" * 80_000)
    for image in ("png", "webp"):
        data, embedded = encoded(image, prompt="x" * 80_000)
        assert codec.read_parameters(data) == embedded


def test_a_picture_too_large_for_its_format_fails_its_row() -> None:
    with pytest.raises(RowError, match="17000x8 cannot be written as webp"):
        codec.encode(np.zeros((8, 17000, 3), np.uint8), None, OUTPUTS["webp"])


def test_quality_is_obeyed() -> None:
    low = job.Output.model_validate({"image": "jpeg", "quality": 30})
    assert len(codec.encode(PIXELS, None, low)) < len(codec.encode(PIXELS, None, OUTPUTS["jpeg"]))
