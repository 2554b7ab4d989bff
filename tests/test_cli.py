"""Every command says in one sentence what it does and shows an example; the README knows each command and option."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest

from batchgen.cli import cli
from tests import runs


def commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{prefix}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")


COMMANDS = dict(commands(cli))


@pytest.mark.parametrize("name", COMMANDS)
def test_has_a_sentence_and_an_example(name: str) -> None:
    """The example is one that the command line takes."""
    sentence, _, rest = (COMMANDS[name].help or "").partition("\n\n")
    assert sentence.endswith(".")
    assert ". " not in sentence
    if isinstance(COMMANDS[name], click.Group):
        return
    (example,) = [line.strip() for line in rest.splitlines() if line.strip().startswith("Example: ")]
    words = shlex.split(example.removeprefix(f"Example: batchgen {name} "))
    with COMMANDS[name].make_context(name, words):
        pass


def test_the_readmes_commands_are_taken() -> None:
    """Every command line in its text and in its blocks."""
    readme = (runs.ROOT / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"(?m)(?:`|^|&& )batchgen ([a-z][^`\n]*)(?:`|$)", readme)
    examples = [one for one in examples if one.split()[0] in cli.commands]
    assert len(examples) >= len(cli.commands)
    for example in examples:
        name, *words = shlex.split(example)
        if name in ("bench", "job"):
            name, *words = f"{name} {words[0]}", *words[1:]
        with COMMANDS[name].make_context(name, words):
            pass


@pytest.mark.parametrize("name", COMMANDS)
def test_is_documented(name: str) -> None:
    readme = (runs.ROOT / "README.md").read_text(encoding="utf-8")
    assert f"`{name}`" in readme or f"batchgen {name}" in readme
    for parameter in COMMANDS[name].params:
        for option in parameter.opts:
            if option.startswith("--") and option != "--help":
                assert option in readme, f"README.md does not name {option} of {name}"


def test_help_lists_every_command_whole() -> None:
    listed = runs.batchgen("--help").out
    assert "..." not in listed.split("Commands:")[1]
    assert all(f"  {name} " in listed for name in cli.commands)
