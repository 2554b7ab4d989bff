"""Every command says in one sentence what it does and shows an example; the pages know each command and option."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from batchgen.cli import cli
from tests import documents, runs


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
    """Every command line in the text and in the blocks of all pages."""
    examples = re.findall(r"(?m)(?:`|^|&& )batchgen ([a-z][^`\n]*)(?:`|$)", documents.ALL)
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
    assert f"`{name}`" in documents.README or f"batchgen {name}" in documents.ALL
    for parameter in COMMANDS[name].params:
        for option in parameter.opts:
            if option.startswith("--") and option != "--help":
                assert option in documents.ALL, f"no page names {option} of {name}"


def test_help_lists_every_command_whole() -> None:
    listed = runs.batchgen("--help").out
    assert "..." not in listed.split("Commands:")[1]
    assert all(f"  {name} " in listed for name in cli.commands)


def test_a_plan_fits_a_terminal(tmp_path: Path) -> None:
    """Batches of many sizes, of which a line holds a few."""
    source = runs.prompts(tmp_path / "m.parquet", 1023, width=1024, height=1024)
    sizes = [2**power for power in range(9)]
    ended = runs.batchgen("plan", source, "--model", "pattern", "--set", f"plan.batch_sizes={sizes}")
    shown = ended.out.split("\n\n")[0]
    assert max(map(len, shown.splitlines())) <= 80
    counted = re.findall(r"\b(\d+)×(\d+)\b", shown.split("number")[1].replace("1024×1024", ""))
    assert sum(int(size) * int(number) for size, number in counted) == 1023
    assert len(counted) >= 4


def completed(**environment: str) -> str:
    """What the program says to a shell, in a process of its own: it writes bytes."""
    command = [sys.executable, "-c", "from batchgen.__main__ import main; main()"]
    own = os.environ | {"PYTHONPATH": str(runs.ROOT)} | environment
    return subprocess.run(command, env=own, capture_output=True, text=True, check=True).stdout


def test_shells_complete_commands_and_options() -> None:
    """By the words that the README puts into a shell's own file."""
    shells = set(re.findall(r"_BATCHGEN_COMPLETE=(\w+)_source batchgen", documents.README))
    assert shells == {"bash", "zsh", "fish"}
    for shell in shells - {"bash"}:  # For which click looks at the version of the bash that is there.
        assert "_BATCHGEN_COMPLETE" in completed(_BATCHGEN_COMPLETE=f"{shell}_source")
    words = {"batchgen stat": ["status"], "batchgen job init sd": ["sd15", "sd3", "sdxl"]}
    for typed, wanted in words.items():
        place = str(len(typed.split()) - 1)
        told = completed(_BATCHGEN_COMPLETE="bash_complete", COMP_WORDS=typed, COMP_CWORD=place)
        assert told.split() == [f"plain,{one}" for one in wanted]
