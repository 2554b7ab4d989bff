"""Rows that begin from a picture: how one is given, what may be wrong with one, and what a run makes of it."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from diffusers.image_processor import VaeImageProcessor
from PIL import ExifTags
from PIL import Image as Picture
from PIL.PngImagePlugin import PngInfo

from batchgen import init_images, pictures
from batchgen.checks import Rules
from batchgen.errors import Interrupted, UsageError
from batchgen.expansion import Expansion
from batchgen.importer import import_rows
from batchgen.models.facts import PATTERN
from batchgen.records import Failure, Image, InitImage
from tests import families, runs, tiny
from tests.damage import flipped
from tests.plans import frozen, pattern_job
from tests.test_families import begun, mixed


def encoded(width: int, height: int, number: int = 0, kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    """An image file of noise."""
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Picture.fromarray(pixels).convert(mode).save(file, kind, **options)
    return file.getvalue()


def turned() -> Picture.Exif:
    """Says that the picture lies on its side."""
    exif = Picture.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return exif


TURNED = '<rdf:Description tiff:Orientation="6"/>'
"""The same as XMP."""


def told(text: str = TURNED) -> PngInfo:
    info = PngInfo()
    info.add_itxt("XML:com.adobe.xmp", text)
    return info


def behind(content: bytes, kind: bytes) -> bytes:
    """A PNG whose chunk of a kind is the last but one, behind the pixels, where some programs write it."""
    signature, at, chunks = content[:8], 8, list[bytes]()
    while at < len(content):
        end = at + 12 + int.from_bytes(content[at : at + 4])
        chunks.append(content[at:end])
        at = end
    chunks.sort(key=lambda one: (one[4:8] == b"IEND", one[4:8] == kind))
    return signature + b"".join(chunks)


def deep(values: np.ndarray) -> bytes:
    """A PNG of 16 bits a channel, which Pillow does not write."""
    height, width, channels = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


PATHS = ("pictures/a.png", "pictures/b.jpg", "pictures/c.webp", None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where `PATHS` begin: pictures of 80x96, 131x77 and, as it is to be seen, 64x104."""
    place = tmp_path / "pictures"
    place.mkdir()
    (place / "a.png").write_bytes(encoded(80, 96))
    (place / "b.jpg").write_bytes(encoded(131, 77, 1, "JPEG"))
    (place / "c.webp").write_bytes(encoded(104, 64, 2, "WEBP", exif=turned()))
    return tmp_path


def given(kind: str, folder: Path) -> pa.Array:
    """The column `image` of four rows, of which the last begins from noise."""
    content = [path and (folder / path).read_bytes() for path in PATHS]
    cells: dict[str, Any] = {
        "paths": pa.array(PATHS),
        "whole paths": pa.array([path and str(folder / path) for path in PATHS]).dictionary_encode(),
        "bytes": pa.array(content),
        "structs": pa.array([one and {"bytes": one, "path": "of-a-data-set.png"} for one in content]),
        "structs of paths": pa.array([path and {"bytes": None, "path": path} for path in PATHS]),
    }
    return cells[kind]


def rows_of(image: pa.Array) -> dict[str, Any]:
    return {"prompt": [f"prompt {number}" for number in range(4)], "image": image, "strength": [0.5, None, 1.0, None]}


@pytest.mark.parametrize("kind", ["paths", "whole paths", "bytes", "structs", "structs of paths"])
def test_a_run(tmp_path: Path, folder: Path, kind: str) -> None:
    """However a picture is given, the row is the same one; the metadata have its hash, the plan has no bytes of it."""
    source = runs.manifest(folder / "m.parquet", rows_of(given(kind, folder)))
    ended = runs.run(source, tmp_path / "out", "--set", "output.format=webdataset")
    assert (ended.code, ended.closing_line) == (0, "4 rows = 4 done + 0 failed + 0 rejected + 0 outstanding")
    lines = sorted(runs.check_images(tmp_path / "out"), key=lambda line: line["prompt"])
    hashes = [path and hashlib.sha256((folder / path).read_bytes()).hexdigest() for path in PATHS]
    assert [line["init_sha256"] for line in lines] == hashes
    assert [line["strength"] for line in lines] == [0.5, 0.8, 1.0, None]
    assert [(line["width"], line["height"]) for line in lines] == [(80, 96), (128, 72), (64, 104), (64, 64)]
    assert [(line["asked_width"], line["asked_height"]) for line in lines][1] == (131, 77)
    cells = [one["path"] if isinstance(one, dict) else one for one in given(kind, folder).to_pylist()]
    assert [line["init_image"] for line in lines] == ([None] * 4 if kind == "bytes" else cells)
    (tmp_path / "again").mkdir()
    others = frozen(tmp_path / "again", rows_of(given("whole paths", folder))).by_position
    assert [(line["id"], line["seed"]) for line in lines] == [(row["id"], row["seed"]) for row in others]
    packs = list((tmp_path / "out/.run/plan").rglob(init_images.PACK))
    num_bytes = sum((folder / path).stat().st_size for path in PATHS if path)
    assert [one.stat().st_size for one in packs] == ([num_bytes] if kind in ("bytes", "structs") else [])
    assert "4 rows = 4 done" in runs.run(source, tmp_path / "out", "--set", "output.format=webdataset").closing_line


def test_sizes_that_are_asked_for_go_before_the_pictures_own(tmp_path: Path, folder: Path) -> None:
    columns = rows_of(given("whole paths", folder)) | {"width": [None, 96, None, None]}
    for overrides, sizes in (
        ([], [(80, 96), (96, 72), (64, 104), (64, 64)]),
        (["sampling.width=72"], [(72, 96), (96, 72), (72, 104), (72, 64)]),
    ):
        (tmp_path / str(len(overrides))).mkdir()
        rows = frozen(tmp_path / str(len(overrides)), columns, overrides=overrides).by_position
        assert [(row["width"], row["height"]) for row in rows] == sizes


def check(column: pa.Array, folder: Path, **others: Any) -> list[tuple[int, str, str]]:
    """Row, column and rule of each fault."""
    rules = Rules(pattern_job(), PATTERN, init_images.InitImages(lambda row: folder))
    columns = {"prompt": pa.array(["a"] * len(column)), "image": column}
    columns |= {name: pa.array(values) for name, values in others.items()}
    checked = rules.check(pa.RecordBatch.from_pydict(columns), 0)
    again = rules.check(pa.RecordBatch.from_pydict(columns), 0)
    good = np.flatnonzero(checked.is_good)
    assert (again.width[good] == checked.width[good]).all(), "a second look finds what the first one did"
    return [(one.row, one.column, one.rule) for one in checked.bad]


@pytest.mark.parametrize(
    ("cell", "rule"),
    [
        ("none.png", "is not there"),
        ("pictures", "is no file"),
        ("pipe", "is no file"),
        ("", "must be a path, as UTF-8 text"),
        ("a\0b", "is no path"),
        ("https://example.com/a.png", "is a URL, and no run makes a network call; fetch it and give its path"),
        ("text.png", "is no picture; PNG, JPEG, WEBP, BMP, GIF and TIFF are read"),
        ("empty.png", "is empty"),
        ("large.png", "at most"),
        ("wide.png", "is 10000x8000; at most 67,108,864 pixels are read: make it smaller"),
        ("bomb.png", "has more than 67,108,864 pixels; make it smaller"),
        ("deep.png", "has more than 8 bits a channel (Pillow's mode I;16); write it with 8"),
        ("small.png", "is that of the init image, which is below 64 or above 32768: give the row a size"),
    ],
)
def test_bad_pictures_are_bad_rows(folder: Path, monkeypatch: pytest.MonkeyPatch, cell: str, rule: str) -> None:
    if cell in ("wide.png", "bomb.png"):
        Picture.new("1", (10_000, 8_000) if cell == "wide.png" else (20_000, 20_000)).save(folder / cell)
    os.mkfifo(folder / "pipe")
    (folder / "text.png").write_text("no picture")
    (folder / "empty.png").touch()
    (folder / "small.png").write_bytes(encoded(40, 300))
    Picture.new("I;16", (64, 64)).save(folder / "deep.png")
    if cell == "large.png":
        (folder / cell).write_bytes(encoded(64, 64))
        monkeypatch.setattr(pictures, "MAX_BYTES", 1000)
        ((row, column, found),) = check(pa.array([cell]), folder)
    else:
        ((row, column, found),) = check(pa.array([PATHS[0], cell, None]), folder)
        assert row == 1
    assert column == ("width" if cell == "small.png" else "image")
    assert rule in found


def test_a_disk_that_is_lost_is_no_pictures_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    row = tiny.row(init=InitImage("0" * 64, str(folder / PATHS[0])))
    for name in ("file_digest", "sha256"):
        monkeypatch.setattr(pictures.hashlib, name, lost)
    for call in (lambda: check(pa.array([PATHS[0]]), folder), lambda: pictures.look(folder / PATHS[0])):
        with pytest.raises(Interrupted, match="stale"):
            call()
    monkeypatch.setattr(Path, "open", lost)
    with pytest.raises(Interrupted, match="stale"):
        pictures.read_all([row])


def test_bytes_and_types_that_are_no_pictures(folder: Path) -> None:
    whole = (folder / "pictures/a.png").read_bytes()
    assert check(pa.array([whole, b"", b"no"]), folder) == [
        (1, "image", "is empty"),
        (2, "image", "is no picture; PNG, JPEG, WEBP, BMP, GIF and TIFF are read"),
    ]
    for column in (pa.array([1, None]), pa.array([{"bytes": whole}]), pa.array([["a.png"]])):
        ((row, name, rule),) = check(column, folder)
        assert (row, name) == (0, "image")
        assert rule.startswith(f"must be {init_images.KINDS}; the column's type is")
    columns = {"prompt": ["a", "b"], "image": [1, None]}
    (row,) = frozen(folder, columns, overrides=["plan.on_bad_row=skip"]).rows
    assert (row["prompt"], row["init_sha256"]) == ("b", None)


@pytest.mark.parametrize(
    ("image", "strength", "rule"),
    [
        (PATHS[0], 0.0, "must be a number above 0 and at most 1"),
        (PATHS[0], 1.5, "must be a number above 0 and at most 1"),
        (PATHS[0], float("nan"), "must be a number above 0 and at most 1"),
        (PATHS[0], 0.04, "leaves none of the row's steps to make: give it more steps, or a greater strength"),
        (None, 0.5, "has no effect without an image"),
        (None, float("nan"), "has no effect without an image"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_strengths(folder: Path, image: str | None, strength: float, rule: str) -> None:
    """20 steps leave one at 0.05."""
    column = pa.array([image, PATHS[0]])
    assert check(column, folder, strength=[strength, 0.05]) == [(0, "strength", rule)]


def test_models_that_take_no_picture_say_so(folder: Path) -> None:
    known = dataclasses.replace(PATTERN, strength=None)
    columns = {"prompt": ["a", "b"], "image": [PATHS[0], None], "strength": [None, 0.5]}
    rules = Rules(pattern_job(), known)
    bad = rules.check(pa.RecordBatch.from_pydict(columns), 0).bad
    assert [(one.row, one.column, one.rule) for one in bad] == [
        (0, "image", "has no effect: this model takes no init image"),
        (1, "strength", "has no effect: this model takes no init image"),
    ]
    with pytest.raises(UsageError, match=r"sampling\.strength has no effect: this model takes no init image"):
        Rules(pattern_job("sampling.strength=0.5"), known)


def test_what_goes_wrong_when_a_row_is_made_fails_that_row_alone(tmp_path: Path, folder: Path) -> None:
    """One picture is cut short, one is changed and one removed between plan and run; retry makes what is mended."""
    contents = {"good": encoded(80, 96), "cut": encoded(80, 96, 1)[:-2000], "changed": encoded(80, 96, 2)}
    contents["gone"] = encoded(80, 96, 3)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    image = [str(folder / name) for name in contents]
    frozen(tmp_path, {"id": list(contents), "prompt": ["a"] * 4, "image": image})
    (folder / "changed").write_bytes(encoded(80, 96, 4))
    (folder / "gone").unlink()
    out = tmp_path / "run"
    assert runs.run(tmp_path / "manifest", out).code == 3
    assert [line["id"] for line in runs.check_images(out)] == ["good"]
    failed = {
        line["id"]: (line["error"], line["message"]) for line in pq.read_table(out / "failures.parquet").to_pylist()
    }
    begins = {name: ("BadInitImage", f"init image {folder / name} ") for name in ("cut", "changed", "gone")}
    assert {name: (error, message[: len(begins[name][1])]) for name, (error, message) in failed.items()} == begins
    assert "is damaged: image file is truncated" in failed["cut"][1]
    digest = hashlib.sha256(contents["changed"]).hexdigest()
    assert f"is another picture than was planned, whose sha256 began with {digest[:12]}" in failed["changed"][1]
    assert failed["gone"][1].endswith("is not there")
    for name in ("changed", "gone"):
        (folder / name).write_bytes(contents[name])
    assert runs.batchgen("retry", out).code == 3
    assert sorted(line["id"] for line in runs.check_images(out)) == ["changed", "gone", "good"]


def test_a_picture_that_was_changed_is_another_row(tmp_path: Path, folder: Path) -> None:
    ids, image = set[str](), [str(folder / PATHS[0]), str(folder / PATHS[1])]
    for name, own in (("ids", {"id": ["x", "y"]}), ("none", {})):
        columns = {**own, "prompt": ["a", "b"], "image": image}
        (folder / PATHS[0]).write_bytes(encoded(80, 96, 1))
        source = runs.manifest(folder / f"{name}.parquet", columns)
        assert runs.run(source, tmp_path / name).code == 0
        (folder / PATHS[0]).write_bytes(encoded(80, 96, 2))
        ended = runs.run(source, tmp_path / name, "--extend")
        assert ended.code == 2
        now = hashlib.sha256(encoded(80, 96, 2)).hexdigest()[:20]
        assert ("row 'x': init_sha256 '" if own else "rows removed: 1") in ended.err
        assert not own or now in ended.err
    moved = folder / "moved.jpg"
    moved.write_bytes((folder / PATHS[1]).read_bytes())
    for name, image in (("here", [str(folder / PATHS[1])]), ("there", [str(moved)])):
        (tmp_path / name).mkdir()
        ids.add(frozen(tmp_path / name, {"prompt": ["b"], "image": image}).rows[0]["id"])
    assert len(ids) == 1, "one that was moved is the same"


def test_an_image_that_is_damaged_is_made_again_from_its_picture(tmp_path: Path, folder: Path) -> None:
    """From bytes that lie in the first plan's folder; the second plan has none of its own."""
    source = runs.manifest(folder / "m.parquet", rows_of(given("bytes", folder)))
    out = tmp_path / "out"
    assert runs.run(source, out).code == 0
    before = runs.pixels(out)
    source.unlink()
    damaged = out / runs.metadata(out)[0]["file_name"]
    damaged.write_bytes(flipped(damaged.read_bytes()))
    ended = runs.batchgen("verify", out, "--repair")
    assert ended.code == 0, ended
    assert runs.pixels(out) == before
    runs.check_images(out)


def test_pictures_that_rows_share_are_packed_once(tmp_path: Path, folder: Path) -> None:
    image = [(folder / PATHS[0]).read_bytes()] * 6 + [(folder / PATHS[1]).read_bytes()]
    columns = {"prompt": [f"p{n}" for n in range(7)], "image": image, "num_images": [2] * 7}
    rows = frozen(tmp_path, columns).rows
    assert len({(row["init_offset"], row["init_bytes"]) for row in rows}) == 2
    (pack,) = (tmp_path / "run/.run/plan").rglob(init_images.PACK)
    assert pack.stat().st_size == len(image[0]) + len(image[-1])


@pytest.mark.parametrize(
    "content",
    [
        encoded(80, 56),
        encoded(33, 190, 1, "JPEG", exif=turned()),
        encoded(80, 56, 2, "PNG", "RGBA"),
        encoded(80, 56, 3, "PNG", "P"),
        encoded(80, 56, 4, "TIFF", "L"),
        encoded(80, 56, 5, "BMP", "1"),
        encoded(80, 56, 6, "JPEG", "CMYK"),
        encoded(80, 56, 7, "GIF"),
        encoded(64, 64, 8, "WEBP", exif=turned()),
        encoded(80, 56, 9, "PNG", "LA", exif=turned()),
        encoded(80, 56, 10, "TIFF", exif=turned()),
        encoded(80, 56, 10, "TIFF", tiffinfo={ExifTags.Base.Orientation: 6}),
        behind(encoded(80, 56, 11, exif=turned()), b"eXIf"),
        encoded(80, 56, 12, pnginfo=told()),
        behind(encoded(80, 56, 13, pnginfo=told()), b"iTXt"),
        behind(encoded(80, 56, 14, pnginfo=told("a title")), b"iTXt"),
        encoded(80, 56, 15, "JPEG", xmp=TURNED.encode()),
    ],
)
def test_pixels_are_those_of_diffusers(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(content)
    seen = pictures.look(path)
    picture = diffusers.utils.load_image(str(path))
    assert (seen.width, seen.height) == picture.size
    assert seen == pictures.look_at_bytes(content)
    wanted = VaeImageProcessor().resize(picture, height=64, width=72)
    row = tiny.row(width=72, height=64, init=InitImage(seen.sha256.hex(), str(path)))
    assert (pictures.read(row) == np.asarray(wanted)).all()


@pytest.mark.parametrize("channels", [3, 4])
def test_of_colours_of_16_bits_the_upper_8_are_taken(tmp_path: Path, channels: int) -> None:
    values = np.random.default_rng(0).integers(0, 2**16, (56, 80, channels))
    path = tmp_path / "deep.png"
    path.write_bytes(deep(values))
    row = tiny.row(width=80, height=56, init=InitImage(pictures.look(path).sha256.hex(), str(path)))
    assert (pictures.read(row) == values[..., :3] // 256).all()
    assert (pictures.read(row) == np.asarray(diffusers.utils.load_image(str(path)))).all()


@pytest.mark.parametrize(("kind", "mode"), [("sd1", "eager"), ("flux", "graph")])
def test_a_bad_picture_in_a_batch_whose_rows_take_turns(kind: str, mode: str) -> None:
    """Two lanes for four rows: the bad one fails in its place, and the others are what diffusers makes of them."""
    rows = begun(mixed(kind))
    bad = dataclasses.replace(rows[1], index=4, id="bad", init=InitImage("0" * 64, "/no/such/file.png"))
    engine = families.engine(kind, mode)
    asked = [rows[0], bad, *rows[1:]]
    outcomes = engine.submit(tiny.batch(asked, engine.facts, 2), tiny.never)()
    assert [one.row for one in outcomes] == asked
    for row, outcome in zip(asked, outcomes, strict=True):
        if row is bad:
            assert isinstance(outcome, Failure)
            assert (outcome.error, outcome.message) == ("BadInitImage", "init image /no/such/file.png is not there")
            continue
        assert isinstance(outcome, Image)
        wanted = np.asarray(families.reference(kind, row), int)
        assert np.abs(outcome.pixels.astype(int) - wanted).max() <= 1
    alone = engine.submit(tiny.batch([bad], engine.facts), tiny.never)()
    assert [type(one) for one in alone] == [Failure]


def test_paths_of_a_table_are_whole_where_its_manifest_lies_elsewhere(tmp_path: Path, folder: Path) -> None:
    csv = folder / "rows.csv"
    csv.write_text(f"prompt,image,strength\na,{PATHS[0]},0.5\nb,,\nc,{folder / 'pictures/b.jpg'},1\n")
    import_rows(str(csv), folder / "beside.parquet")
    assert pq.read_table(folder / "beside.parquet")["image"].to_pylist()[:2] == [PATHS[0], None]
    (tmp_path / "other").mkdir()
    done = import_rows(str(csv), tmp_path / "other/m.parquet")
    assert done.notes == (f"paths in column image are whole now, and begin in {folder}: 1",)
    whole = pq.read_table(tmp_path / "other/m.parquet").to_pylist()
    assert [row["image"] for row in whole] == [str(folder / PATHS[0]), None, str(folder / "pictures/b.jpg")]
    assert [row["strength"] for row in whole] == [0.5, None, 1.0]
    for place in (folder / "beside.parquet", tmp_path / "other/m.parquet"):
        assert runs.run(place, tmp_path / place.stem).code == 0
    assert runs.pixels(tmp_path / "beside") == runs.pixels(tmp_path / "m")


@pytest.mark.parametrize("listed", [False, True])
def test_paths_of_a_grid_are_whole_where_its_manifest_lies_elsewhere(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    """They begin in the folder of their list, or in the one where the command is given."""
    (folder / "list.txt").write_text(f"{PATHS[0]}\n{folder / 'pictures/b.jpg'}\n")
    monkeypatch.chdir(tmp_path if listed else folder)
    grid = f"image=@{folder / 'list.txt'}" if listed else f"image={PATHS[0]},{folder / 'pictures/b.jpg'}"
    (tmp_path / "other").mkdir()
    done = import_rows(None, tmp_path / "other/m.parquet", expansion=Expansion(grid=(grid,), templates=("a fox",)))
    assert [one.partition(",")[0] for one in done.notes] == ["paths in column image are whole now"]
    found = pq.read_table(tmp_path / "other/m.parquet")["image"].to_pylist()
    assert found == [str(folder / PATHS[0]), str(folder / "pictures/b.jpg")]


def test_a_path_leads_where_the_disk_says(tmp_path: Path, folder: Path) -> None:
    """`..` behind a link is the folder above its target, not the one that holds the link."""
    (folder / "elsewhere" / "deep").mkdir(parents=True)
    (folder / "elsewhere" / "a.png").write_bytes(encoded(72, 64))
    (folder / "a.png").write_bytes(encoded(64, 64))
    (folder / "link").symlink_to("elsewhere/deep")
    source = runs.manifest(folder / "m.parquet", {"prompt": ["a"], "image": ["link/../a.png"]})
    assert runs.run(source, tmp_path / "out").code == 0
    (line,) = runs.check_images(tmp_path / "out")
    assert (line["width"], line["height"]) == (72, 64)
