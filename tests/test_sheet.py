"""`batchgen sheet`: which pictures it shows, in which order, from which containers."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from batchgen import codec
from batchgen.sheet import contact_sheet
from tests import runs

COLOURS = [(200, 30, 30), (30, 200, 30), (30, 30, 200), (200, 200, 30), (30, 200, 200), (120, 60, 200)]


def plain(number: int, width: int = 64, height: int = 64) -> np.ndarray:
    return np.full((height, width, 3), COLOURS[number], np.uint8)


def has_colour(sheet: Image.Image, number: int) -> bool:
    return bool((np.asarray(sheet) == COLOURS[number]).all(-1).any())


def first_places(sheet: Image.Image, count: int) -> list[tuple[int, int]]:
    """Where each colour begins: row, then column."""
    pixels = np.asarray(sheet)
    found = [np.argwhere((pixels == COLOURS[number]).all(-1)).min(0) for number in range(count)]
    return [(int(y) // 100, int(x)) for y, x in found]


def test_pictures_stand_in_order_row_by_row() -> None:
    sheet = contact_sheet([(plain(number), f"prompt {number}") for number in range(6)])
    places = first_places(sheet, 6)
    assert places == sorted(places)
    assert len({row for row, _ in places}) == 2


def test_a_picture_keeps_its_proportions_and_is_made_to_fit() -> None:
    for width, height in ((32, 16), (64, 64), (4000, 2000)):
        sheet = contact_sheet([(plain(0, width, height), "a prompt")])
        ys, xs = np.nonzero((np.asarray(sheet) == COLOURS[0]).all(-1))
        assert (np.ptp(xs) + 1, np.ptp(ys) + 1) == (160, 160 * height // width)


def test_prompts_are_written_and_long_ones_cut() -> None:
    def ink(prompt: str) -> int:
        return int((np.asarray(contact_sheet([(plain(0), prompt)]))[170:] < 128).all(-1).sum())

    assert ink("") == 0
    assert ink("a fox") > 0
    assert ink("word " * 1000) == ink("word " * 500) > ink("a fox")
    assert contact_sheet([(plain(0), "word " * 1000)]).size == contact_sheet([(plain(0), "")]).size
    assert ink("🦊 狐 \u202e \x00") >= 0


def test_letters_of_other_scripts_are_drawn_and_those_that_no_font_has_are_named(tmp_path: Path) -> None:
    """Not as boxes, which would be the same for all. Noncharacters of Unicode are in no font."""

    def ink(prompt: str) -> bytes:
        missing: set[str] = set()
        sheet = contact_sheet([(plain(0), prompt)], missing=missing)
        assert not missing
        return sheet.tobytes()

    assert len({ink(prompt) for prompt in ("лес", "дом", "σας", "ñü", "n\u0303ü")}) == 4
    source = runs.manifest(tmp_path / "m.parquet", [{"prompt": "a \U0010fffe and a \U0010fffd\u200d"}])
    assert runs.run(source, tmp_path / "out").code == 0
    ended = runs.batchgen("sheet", tmp_path / "out")
    assert (ended.code, ended.out) == (0, f"1 picture in {tmp_path / 'out' / 'sheet.png'}\n")
    assert ended.err.startswith("no font here has \U0010fffd\U0010fffe: boxes stand for them")


@pytest.mark.parametrize("prompt", ["M" * 28, "WHAT A LARGE OLD LIGHTHOUSE IN THE RAIN", "龍" * 28])
def test_a_caption_stays_under_its_picture(prompt: str) -> None:
    """Whatever its letters are wide: the space to the next picture's is white."""
    sheet = np.asarray(contact_sheet([(plain(0), prompt), *[(plain(0), "")] * 11]))
    assert (sheet[172:210, 8:168] < 128).any()
    assert (sheet[172:210, 168:176] == 255).all()


@pytest.mark.parametrize("kind", runs.FORMATS)
def test_the_first_rows_of_a_run_in_manifest_order(tmp_path: Path, kind: str) -> None:
    sizes = [(64, 64), (96, 64), (64, 96), (64, 64), (128, 64), (64, 64)]
    rows = [{"id": f"r{n}", "prompt": f"prompt {n}", "width": w, "height": h} for n, (w, h) in enumerate(sizes)]
    source, out = runs.manifest(tmp_path / "m.parquet", rows), tmp_path / "out"
    assert runs.run(source, out, "--format", kind).code == 0
    ended = runs.batchgen("sheet", out, "--rows", 4, "-o", tmp_path / "four.png")
    assert (ended.code, ended.out) == (0, f"4 pictures in {tmp_path / 'four.png'}\n")
    files = runs.images(out)
    wanted = [(codec.decode(files[line["file_name"]]), line["prompt"]) for line in runs.metadata(out)[:4]]
    assert [prompt for _, prompt in wanted] == [f"prompt {n}" for n in range(4)]
    with Image.open(tmp_path / "four.png") as made:
        assert np.array_equal(np.asarray(made), np.asarray(contact_sheet(wanted)))
    assert runs.batchgen("sheet", out).out == f"6 pictures in {out / 'sheet.png'}\n"
    assert runs.batchgen("verify", out).code == 0


def test_memory_is_for_pictures_as_small_as_the_sheets(tmp_path: Path) -> None:
    """Whatever those of the run are: 16 of 1024x1024 would take 50 MB."""
    source, out = runs.prompts(tmp_path / "m.parquet", 16), tmp_path / "out"
    sizes = ("--set", "sampling.width=1024", "--set", "sampling.height=1024", "--format", "webdataset")
    assert runs.run(source, out, *sizes).code == 0
    tracemalloc.start()
    try:
        assert runs.batchgen("sheet", out).code == 0
        assert tracemalloc.get_traced_memory()[1] < 25_000_000
    finally:
        tracemalloc.stop()


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 2), tmp_path / "out"
    ended = runs.batchgen("sheet", out)
    assert ended.code == 2
    assert "is no run directory" in ended.err
    assert runs.run(source, out).code == 0
    (out / "metadata.parquet").rename(out / "metadata.partial.parquet")
    assert runs.batchgen("sheet", out).code == 0
    (out / "metadata.partial.parquet").unlink()
    ended = runs.batchgen("sheet", out)
    assert ended.code == 2
    assert f"batchgen finalize {out} --partial" in ended.err


def test_a_lost_picture_is_named(tmp_path: Path) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 2), tmp_path / "out"
    assert runs.run(source, out).code == 0
    lost = runs.metadata(out)[1]["file_name"]
    (out / lost).unlink()
    ended = runs.batchgen("sheet", out)
    assert ended.code == 1
    assert Path(lost).name in ended.err
    assert "verify" in ended.err
    assert not (out / "sheet.png").exists()


def test_a_damaged_picture_is_named(tmp_path: Path) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 2), tmp_path / "out"
    assert runs.run(source, out).code == 0
    damaged = out / runs.metadata(out)[1]["file_name"]
    damaged.write_bytes(damaged.read_bytes()[:100])
    ended = runs.batchgen("sheet", out)
    assert ended.code == 1
    assert f"{damaged}: the image file is damaged" in ended.err
    assert f"`batchgen verify {out} --repair` makes it again" in ended.err


@pytest.mark.parametrize("command", ["sheet", "report"])
def test_places_that_cannot_be_written_and_names_of_other_kinds(tmp_path: Path, command: str) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 1), tmp_path / "out"
    assert runs.run(source, out).code == 0
    ending = {"sheet": ".png", "report": ".html"}[command]
    ended = runs.batchgen(command, out, "-o", tmp_path / "none" / f"x{ending}")
    assert (ended.code, f"x{ending} cannot be written: No such file or directory" in ended.err) == (2, True)
    ended = runs.batchgen(command, out, "-o", tmp_path / "x.jpg")
    assert (ended.code, f"what is written is a {ending} file; name it NAME{ending}" in ended.err) == (2, True)
    assert runs.batchgen(command, out, "-o", tmp_path / f"x{ending.upper()}").code == 0


def test_a_run_without_a_picture(tmp_path: Path) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 1), tmp_path / "out"
    assert runs.run(source, out).code == 0
    table = pq.read_table(out / "metadata.parquet")
    pq.write_table(pa.table(table).slice(0, 0), out / "metadata.parquet")
    ended = runs.batchgen("sheet", out)
    assert ended.code == 2
    assert "has no picture to show" in ended.err


def selected(out: Path, *args: object) -> list[str]:
    """The prompts of the pictures on a sheet, in order."""
    target = out / "some.png"
    ended = runs.batchgen("sheet", out, "-o", target, *args)
    assert ended.code == 0, ended.err
    chosen = [line for line in runs.metadata(out) if holds(target, codec.decode(runs.images(out)[line["file_name"]]))]
    assert ended.out == f"{len(chosen)} picture{'' if len(chosen) == 1 else 's'} in {target}\n"
    return [line["id"] for line in chosen]


def holds(sheet: Path, picture: np.ndarray) -> bool:
    """Whether a picture of 64x64, enlarged as on a sheet, is somewhere on it."""
    with Image.open(sheet) as image:
        pixels = np.asarray(image)
    large = ImageOps.contain(Image.fromarray(picture), (160, 160), Image.Resampling.BICUBIC)
    cell = np.asarray(large)
    tops = np.argwhere((pixels[:, 8::168] == cell[0, 0]).all(-1))
    return any(np.array_equal(pixels[y : y + 160, 8 + 168 * x :][:, :160], cell) for y, x in tops)


def test_a_selection(tmp_path: Path) -> None:
    rows = [
        {
            "id": f"r{n}",
            "prompt": f"a {'red Fox' if n % 3 == 0 else 'boat = <'} {n}",
            "steps": 5 + n,
            "seed": 2**64 - 1 - n,
        }
        for n in range(12)
    ]
    schema = pa.schema([("id", pa.string()), ("prompt", pa.string()), ("steps", pa.int64()), ("seed", pa.uint64())])
    out = tmp_path / "out"
    assert runs.run(runs.manifest(tmp_path / "m.parquet", rows, schema), out).code == 0
    assert selected(out, "--where", "prompt~FOX") == ["r0", "r3", "r6", "r9"]
    assert selected(out, "--where", "prompt~fox", "--where", "steps > 10") == ["r6", "r9"]
    assert selected(out, "--where", "steps<=6") == ["r0", "r1"]
    assert selected(out, "--where", "steps != 5", "--rows", 2) == ["r1", "r2"]
    assert selected(out, "--where", "prompt=a boat = < 4") == ["r4"]
    assert selected(out, "--where", f"seed={2**64 - 3}") == ["r2"]
    assert selected(out, "--where", "guidance_scale>=7.5", "--where", "is_flat=false", "--rows", 3) == [
        "r0",
        "r1",
        "r2",
    ]
    assert selected(out, "--id", "r7", "--id", "r2") == ["r2", "r7"]
    assert selected(out, "--id", "r7", "--id", "r2", "--where", "steps=12") == ["r7"]


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("step>=30", "there is no column 'step'; did you mean 'steps'?"),
        ("zzzz=1", "there is no column 'zzzz'; there are id, image_number"),
        ("steps", "is no condition: it takes a column, one of = != < <= > >= ~, and a value"),
        ("steps>=many", "'many' is no value of the column 'steps', whose type is int32"),
        ("steps>1000", "no picture to show: none of its images is selected"),
        ("list=1", "'1' is no value of the column 'list'"),
    ],
)
def test_what_selects_nothing_is_said(tmp_path: Path, condition: str, said: str) -> None:
    source = runs.manifest(tmp_path / "m.parquet", [{"prompt": "a fox", "list": [1, 2]}])
    assert runs.run(source, tmp_path / "out").code == 0
    ended = runs.batchgen("sheet", tmp_path / "out", "--where", condition)
    assert ended.code == 2
    assert said in ended.err


def test_a_title_stands_above_the_pictures() -> None:
    plain_sheet, titled = (contact_sheet([(plain(0), "a prompt")], title) for title in ("", "Foxes\nof a <b>night</b>"))
    assert titled.width == plain_sheet.width
    added = titled.height - plain_sheet.height
    assert added > 20
    assert np.array_equal(np.asarray(titled)[added + 8 :], np.asarray(plain_sheet)[8:])
    assert (np.asarray(titled)[: added + 8] < 128).any()
    long = contact_sheet([(plain(0), "a prompt")], "title " * 2000)
    assert (np.asarray(long)[: added + 8, -8:] == 255).all()
