"""What is long is cut, and what is cut is said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchgen.wording import first_line, listed, shorten, with_more


@given(st.text(max_size=200), st.integers(1, 100))
def test_a_text_keeps_its_beginning_and_says_that_it_was_cut(text: str, most: int) -> None:
    short = shorten(text, most)
    assert len(short) <= most
    assert short == text or (len(text) > most and short == text[: most - 1] + "…")


def test_lists_say_how_many_they_leave_out() -> None:
    assert [listed(["a", "b"], count) for count in (2, 5)] == ["a, b", "a, b and 3 more"]
    assert [with_more(["a", "b"], count) for count in (2, 5)] == [["a", "b"], ["a", "b", "  … and 3 more"]]


def test_an_error_is_told_by_its_first_line_or_its_name() -> None:
    errors = [ValueError("\n  one\ntwo"), RuntimeError(), RuntimeError(" \n")]
    assert [first_line(error) for error in errors] == ["one", "RuntimeError", "RuntimeError"]
    assert (
        first_line(RuntimeError("\nError(s) in X:\n\tsize mismatch for y.\n\tand z"))
        == "Error(s) in X: size mismatch for y"
    )
