"""How often a run was started for nothing: one that is requeued again and again and never comes to a commit says so,
instead of spending its nights on loading a model.

Each start with rows to make leaves a file in `.run/starts/`, which says how many rows were settled by then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from batchgen.balance import Balance
from batchgen.errors import BatchgenError, Interrupted
from batchgen.ledger import ABANDONED, Ledger, unstem
from batchgen.owners import Owner, gone_because, this_process
from batchgen.rundir import RunDirectory
from batchgen.slots import NO_SLOT

MOST = 5
"""Starts for nothing; the next one ends before it loads a model."""
LOOKS = 64
"""At starts of others, the ended ones first: where a thousand begin at once, none reads a thousand files."""
_ENDED = ".ended"
_Process = tuple[str, int, str]
"""Boot, pid and start time."""


@dataclass(frozen=True, slots=True)
class Start:
    """A process that set out to make rows."""

    path: Path
    owner: Owner
    settled: int
    """Rows done and failed when it did."""
    is_ended: bool
    """Whether it has said that it ended early."""


@dataclass(slots=True)
class Starts:
    """The starts of a run, as this process sees them and adds its own."""

    run: RunDirectory
    _mine: Path | None = None

    def begin(self, balance: Balance) -> None:
        """Note that this process sets out to make rows.

        Raises BatchgenError where the last ones to do so have ended, nobody is at work, and no row was settled since;
        the count begins anew then. Deaths over a shard do not count: `run.max_deaths` is about what kills its makers.
        """
        self.end(is_early=False)  # Of a plan that was appended meanwhile there may be another beginning.
        me, settled = this_process(), balance.done + balance.failed
        self.run.files.make_folder(self._folder)
        others = list(self._others())
        for one in others:
            if one.settled != settled:
                self._forget(one.path)
        idle = [one for one in others if one.settled == settled and self._has_ended(one, me)]
        if len(idle) >= MOST and not balance.held:
            self._refuse(idle)
        self._mine = self._folder / me.token
        content = {"owner": asdict(me), "settled": settled}
        self.run.files.write(self._mine, json.dumps(content).encode())

    def end(self, *, is_early: bool) -> None:
        """Note that this process has ended before all was done, for other hosts to know, or forget that it began.
        What the disk does not take is not counted."""
        mine, self._mine = self._mine, None
        with suppress(BatchgenError, OSError):
            if mine is not None and is_early:
                if self.run.files.stat(mine) is not None:  # Else others have forgotten it.
                    self.run.files.write(_ended(mine), b"")
            elif mine is not None:
                self._forget(mine)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Whatever is raised within the block ends this process early. A disk that refuses has said what is wrong."""
        try:
            yield
        except Interrupted:
            self.end(is_early=False)
            raise
        except BaseException:
            self.end(is_early=True)
            raise

    @property
    def _folder(self) -> Path:
        return self.run.root / "starts"

    def _others(self) -> Iterator[Start]:
        names = self.run.files.names(self._folder)
        begun = {name for name in names if not name.endswith(_ENDED)}
        ended = {name.removesuffix(_ENDED) for name in names if name.endswith(_ENDED)}
        for name in ended - begun:
            self.run.files.remove(_ended(self._folder / name))  # Of a start that another has forgotten meanwhile.
        for name in sorted(begun, key=lambda name: (name not in ended, name))[:LOOKS]:
            path = self._folder / name
            try:
                fields = json.loads(self.run.files.read(path) or b"")
                one = Start(path, Owner(**fields["owner"]), int(fields["settled"]), name in ended)
            except NO_SLOT:
                self._forget(path)  # Torn, or another's: it counts for nothing.
            else:
                yield one

    def _has_ended(self, one: Start, me: Owner) -> bool:
        """As far as can be told from here."""
        return one.is_ended or gone_because(one.owner, me) is not None

    def _refuse(self, idle: list[Start]) -> None:
        killed = set(self._died_over_a_shard())
        guiltless = [one for one in idle if _process(one.owner) not in killed]
        if len(guiltless) < MOST:
            return
        for one in idle:
            self._forget(one.path)
        raise BatchgenError(
            f"{self.run.path}: the last {len(guiltless)} starts of this run ended before a row was settled. See what "
            "they said: a time limit shorter than loading the model and making one batch, too little memory, a device "
            "that fails. Nothing is lost. The same command tries again; whatever starts it by itself should not"
        )

    def _died_over_a_shard(self) -> Iterator[_Process]:
        ledger = Ledger(self.run.root, self.run.files)
        for place in filter(None, map(unstem, self.run.files.names(self.run.root / "claims"))):
            receipt = ledger.receipt(*place)
            claim = ledger.claimed(*place) if receipt is None or receipt.kind == ABANDONED else None
            if claim is not None:
                yield _process(claim.owner)
                yield claim.owner.boot_id, claim.owner.launcher_pid, claim.owner.launcher_start_time

    def _forget(self, path: Path) -> None:
        self.run.files.remove(path)
        self.run.files.remove(_ended(path))


def _ended(path: Path) -> Path:
    return path.with_name(path.name + _ENDED)


def _process(owner: Owner) -> _Process:
    return owner.boot_id, owner.pid, owner.start_time
