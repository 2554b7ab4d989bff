import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchgen.names import file_stem

WINDOWS_DEVICES = {"con", "prn", "aux", "nul"} | {f"{port}{n}" for port in ("com", "lpt") for n in range(10)}

AWKWARD_IDS = [
    "x" * 300,
    "a/b",
    "../../x",
    "..",
    ".",
    "",
    " ",
    "CON",
    "con",
    "com1",
    "🐉龍é",
    "🐉龍e\u0301",
    "a\nb",
    "a\x00b",
    "<script>alert(1)</script>",
    "--ar 4:5",
    "A",
    "a",
    "a ",
    "v1.0",
    "v1.5",
    "v1",
    "a--1",
    "a-1",
    "a_1",
    "ß",
    "ss",
    "SS",
    "ſ",
    "İ",
    "i̇",
    "K",
    "k",
    "-a",
    "a-",
    "__x",
]

lookalikes = st.text("aAáÁ.-_/ \u0301ſsSß1", max_size=6)
ids = st.one_of(st.text(max_size=150), lookalikes, st.sampled_from(AWKWARD_IDS))
rows = st.tuples(ids, st.one_of(st.integers(0, 3), st.integers(0, 2**31 - 1)))


def folded(name: str) -> str:
    """As the least discerning file system compares names."""
    return unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", name).casefold())


@given(rows)
def test_a_name_is_safe_everywhere(row: tuple[str, int]) -> None:
    stem = file_stem(*row)
    assert re.fullmatch(r"[a-z0-9][a-z0-9_-]*", stem)
    assert len(stem) <= 112
    assert stem not in WINDOWS_DEVICES


@given(rows, rows)
@example(("a", 1), ("a--1", 0))
@example(("é", 0), ("e\u0301", 0))
def test_no_two_rows_meet(one: tuple[str, int], other: tuple[str, int]) -> None:
    assert (folded(file_stem(*one)) == folded(file_stem(*other))) == (one == other)


@given(rows, st.integers(0, 3))
def test_an_id_that_spells_the_name_of_another_row_gets_its_own(row: tuple[str, int], number: int) -> None:
    forged = (file_stem(*row), number)
    assert (file_stem(*forged) == file_stem(*row)) == (forged == row)


def test_awkward_ids_all_differ() -> None:
    stems = {folded(file_stem(row_id, number)) for row_id in AWKWARD_IDS for number in range(3)}
    assert len(stems) == 3 * len(AWKWARD_IDS)


@given(st.text(min_size=200, max_size=200), st.text(max_size=20), st.text(max_size=20))
def test_ids_that_share_their_first_200_characters_differ(start: str, one: str, other: str) -> None:
    assert (file_stem(start + one, 0) == file_stem(start + other, 0)) == (one == other)


@pytest.mark.parametrize("row_id", ["red-apple", "0", "a_b-c", "00017", "x" * 100])
def test_a_safe_id_is_its_own_name(row_id: str) -> None:
    assert file_stem(row_id, 0) == row_id
    assert file_stem(row_id, 2) == f"{row_id}--2"


def test_another_id_stays_readable() -> None:
    assert re.fullmatch(r"cafe-au-lait--[0-9a-f]{32}", file_stem("Café au lait!", 0))
    assert re.fullmatch(r"v1-0--[0-9a-f]{32}--3", file_stem("v1.0", 3))
