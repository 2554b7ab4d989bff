"""What the first worker of a run settles for all others: slots under `.run/modes/`."""

from __future__ import annotations

from batchgen.errors import UsageError
from batchgen.ledger import Ledger
from batchgen.slots import NO_SLOT, sealed, unsealed


def settle(ledger: Ledger, name: str, value: str) -> str:
    """Make a value the run's under a name, or learn the one that is. Raises UsageError if it cannot be read."""
    assert ledger.owner is not None
    path = ledger.root / "modes" / name
    content = sealed(ledger.owner.token, {"value": value})
    if ledger.files.read(path) is None and ledger.files.put_if_absent(path, content):
        return value
    # Its putter may have died before the name was durable, and pixels are made by it from here on.
    ledger.files.sync_folder(path.parent)
    try:
        settled = unsealed(ledger.files.read(path) or b"")["value"]
        if isinstance(settled, str):
            return settled
        reason = f"its value is {settled!r}"
    except NO_SLOT as error:
        reason = repr(error)
    raise UsageError(f"{path} cannot be read ({reason}); remove it if no worker is running")


def settle_dtype(ledger: Ledger, dtype: str | None) -> None:
    """Make this worker's dtype the run's, or check that it is. Raises UsageError if the run has another one."""
    if dtype is None:
        return
    settled = settle(ledger, "dtype", dtype)
    if settled != dtype:
        raise UsageError(
            f"this run was begun in {settled}, and this worker would make its rows in {dtype}: pixels would differ. "
            f"Run it on a device like the first one, or with --set engine.device=… that one; a new run may set "
            "model.dtype"
        )
