"""Programs of Slurm that only note how they were called, and answer as they are told."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest


class Fakes:
    """`sbatch`, `scontrol` and `squeue` on the PATH of this process and its children, and no others."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        monkeypatch.setenv("PATH", f"{folder}:/usr/local/bin:/usr/bin:/bin")
        monkeypatch.setenv("FAKES", str(folder))
        for name in list(os.environ):
            if name.startswith("SLURM"):
                monkeypatch.delenv(name)
        self.answer("sbatch", 'echo "$(( $(wc -l < "$FAKES/sbatch.calls") + 100 ));cluster"')
        self.answer("scontrol", 'echo "MaxArraySize            = 1001"')
        self.answer("squeue", 'case "$*" in *%i*) ;; *) echo 1:00:00 ;; esac')

    def answer(self, name: str, shell: str) -> None:
        """From now on `name` does this."""
        path = self.folder / name
        path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> "$FAKES/{name}.calls"\n{shell}\n')
        path.chmod(0o755)

    def refuse(self, name: str, message: str) -> None:
        self.answer(name, f"echo {shlex.quote(message)} >&2; exit 1")

    def lack(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """There is no such program."""
        (self.folder / name).unlink()
        monkeypatch.setenv("PATH", str(self.folder))

    def calls(self, name: str) -> list[str]:
        """The words of each call."""
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []
