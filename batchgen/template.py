"""Prompt templates: `"a {color} {animal}"`, a prompt for every row from the row's own columns.

The grammar is `str.format`'s, names alone: `{name}` is a column's text, `{{` and `}}` are literal braces. It is read by
the standard library's `string.Formatter` and filled in by Arrow, column by column: a template holds no code, what is
filled in is never read as a template, and a million prompts take a fraction of a second.

Weighed and left: jinja2's sandbox is a programming language, where a prompt wants names alone (and 18 µs a prompt
on one core). dynamicprompts (90 µs a prompt, last released in 2024) enumerates texts, but not which value stands where,
so that columns and ids could not name them, and gives a meaning to `__`, `$$`, `|` and `#` in prompts.
`string.Template`'s `$name` is eaten by a shell's double quotes.
"""

from __future__ import annotations

import difflib
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.errors import UsageError
from batchgen.wording import listed, shorten

_FORMATTER = string.Formatter()


@dataclass(frozen=True, slots=True)
class Template:
    """A template that was read: texts as they are, each followed by a placeholder's name (None after the last one)."""

    text: str
    pieces: tuple[tuple[str, str | None], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Its placeholders, each once, in their order."""
        return tuple(dict.fromkeys(name for _, name in self.pieces if name is not None))

    def filled(self, column: Callable[[str], pa.Array], num_rows: int) -> pa.Array:
        """A prompt for each of `num_rows` rows: string, with what `column` gives (text without nulls) for a name."""
        parts: list[object] = [pa.repeat(pa.scalar("", pa.string()), num_rows)]
        for literal, name in self.pieces:
            parts += [literal] if name is None else [literal, column(name)]
        return pc.binary_join_element_wise(*parts, "")


def read_template(text: str) -> Template:
    """The template that a text spells. Raises UsageError that says what is not understood and how to write it."""
    try:
        parsed = list(_FORMATTER.parse(text))
    except ValueError as error:
        raise UsageError(
            f"{_where(text)} cannot be read: {error}; a placeholder is {{name}}, a literal brace is written twice, "
            "{{ or }}"
        ) from None
    for _, name, spec, conversion in parsed:
        _check(text, name, spec, conversion)
    return Template(text, tuple((literal, name) for literal, name, _, _ in parsed))


def check_names(template: Template, known: Iterable[str]) -> None:
    """Raises UsageError for a placeholder that is none of the `known` names."""
    known = list(known)
    for name in template.names:
        if name not in known:
            raise UsageError(f"{_where(template.text)}: there is no {name!r} for {{{name}}}; {_hint(name, known)}")


def _check(text: str, name: str | None, spec: str | None, conversion: str | None) -> None:
    if name is None:
        return
    if not name:
        raise UsageError(f"{_where(text)}: {{}} names nothing; write {{name}}, or {{{{}}}} for two literal braces")
    if spec or conversion:
        raise UsageError(
            f"{_where(text)}: {{{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}}} asks for "
            f"a format, and values stand in a prompt as they are; write {{{name}}}, or double the braces to have them "
            "in the prompt"
        )


def _hint(name: str, known: list[str]) -> str:
    if "|" in name:
        values = ",".join(name.split("|"))
        return f"for one of several words write {{word}} and --grid word={values}"
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {{{near[0]}}}?"
    there = f"there are {listed(list(map(repr, known)))}" if known else "there are no columns"
    return f"{there}. Add --grid {name}=VALUE,VALUE or --grid {name}=@FILE, or double the braces to have them as text"


def _where(text: str) -> str:
    return f"--template {shorten(text)!r}"
