"""Every command says in one sentence what it does and shows an example; the README knows each command and option."""

from __future__ import annotations

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
    help_text = COMMANDS[name].help or ""
    sentence = help_text.split("\n\n")[0]
    assert sentence.endswith(".")
    assert f"Example: batchgen {name}" in help_text


@pytest.mark.parametrize("name", COMMANDS)
def test_is_documented(name: str) -> None:
    readme = (runs.ROOT / "README.md").read_text()
    assert f"`{name}`" in readme or f"batchgen {name}" in readme
    for parameter in COMMANDS[name].params:
        for option in parameter.opts:
            if option.startswith("--") and option != "--help":
                assert option in readme, f"README.md does not name {option} of {name}"


def test_help_lists_every_command_whole() -> None:
    listed = runs.batchgen("--help").out
    assert "..." not in listed.split("Commands:")[1]
    assert all(f"  {name} " in listed for name in cli.commands)
