"""What whoever finalizes a run takes away: what no slot will ever name, and what dead processes left.

Whatever a slot may still come to name is left alone.
"""

from __future__ import annotations

from pathlib import Path

from batchgen.ledger import COMMITTED, TABLE_SUFFIX, Ledger, unstem
from batchgen.mending import move_out, sweep_mended
from batchgen.owners import is_gone, this_process
from batchgen.plan_index import PlanIndex
from batchgen.rundir import RunDirectory

ABANDONED_S = 24 * 3600.0
"""Without a change, until what a process needed for a moment is nobody's any more."""
_FLEETING = (".tmp", ".link")
"""Of files right under `.run/` that a process needs for a moment."""


def withdraw(run: RunDirectory, ledger: Ledger) -> None:
    """Take out of `data/` what lies there under the name of an epoch that was not committed."""
    for name in run.files.names(run.data):
        if is_stray(ledger, name):
            move_out(run, run.data / name)


def is_stray(ledger: Ledger, name: str) -> bool:
    """Whether a name in `data/` is that of an epoch that was not committed, or not with it."""
    place = unstem(Path(name).stem)
    receipt = None if place is None else ledger.receipt(*place)
    return receipt is not None and receipt.part != name


def sweep_left(run: RunDirectory, scratch: Path) -> None:
    """Remove what processes needed for a moment that were killed in it: they are known to be gone, or have changed
    nothing for so long, by the file system's clock, that they are taken for dead."""
    me, now_s, claims = this_process(), _changed_s(run, scratch), run.root / "claims"
    names = run.files.names(run.root)
    left = [run.root / name for name in names if name.startswith("finalize-") or name.endswith(_FLEETING)]
    left += [claims / name for name in run.files.names(claims) if name.startswith("now.")]
    for path in left:
        if path != scratch and (is_gone(path.name, me) or now_s - _changed_s(run, path) > ABANDONED_S):
            run.files.remove_any(path)


def sweep(run: RunDirectory, index: PlanIndex, ledger: Ledger) -> None:
    """Remove what no slot will ever name: parts of epochs whose receipt is something else, temporary files whose
    slot exists, plans that lost."""
    work = run.root / "work"
    for name in run.files.names(work):
        place = unstem(name.split(".")[0])
        # A part of a plan that was appended meanwhile may be committed and not yet published.
        receipt = ledger.receipt(*place) if place is not None and place[0] in index.shards else None
        if receipt is not None and not (receipt.kind == COMMITTED and name.endswith(TABLE_SUFFIX)):
            run.files.remove_any(work / name)
    for folder in (run.root / "claims", run.root / "receipts", run.plans):
        names = run.files.names(folder)
        known = frozenset(names)
        for name in names:
            is_temp = name.endswith(".tmp") and name.rsplit(".", 2)[0] in known
            number, dash, _ = name.partition("-")
            is_lost = folder == run.plans and dash and number.isdecimal() and int(number) <= index.number
            if is_temp or (is_lost and name not in index.folders):
                run.files.remove_any(folder / name)
    sweep_mended(run, index)


def _changed_s(run: RunDirectory, path: Path) -> float:
    """When a file, or anything in a folder, was changed last; never, if it is not there any more."""
    within = [path / name for name in run.files.names(path)] if run.files.is_folder(path) else []
    found = [run.files.stat(one) for one in (path, *within)]
    return max((one.mtime_s for one in found if one), default=float("inf"))
