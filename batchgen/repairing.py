"""What `verify` found, put right: damaged images are made again, and what lies beside whole ones is written anew."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from batchgen.appending import append_rows
from batchgen.errors import BatchgenError, Interrupted
from batchgen.ledger import Ledger
from batchgen.marker import remove_marker
from batchgen.mending import content_of, mend, part_table, rewrite
from batchgen.owners import mark, this_process
from batchgen.plan_index import PlanIndex
from batchgen.publish import published
from batchgen.rundir import RunDirectory
from batchgen.verify import Checked


def repair(run: RunDirectory, damaged: Iterable[Checked], model: str | None = None) -> PlanIndex:
    """Write parts anew whose images are whole, and append a plan of exactly those rows whose images are not. The run's
    plans then; working them off makes the images.

    Rows whose part cannot be written as it was, because another version of a library wrote it, are made again too.
    """
    index, rows = run.index(), dict[int, frozenset[int]]()
    ledger = Ledger(run.root, run.files, plan=index.token)
    ledger.make_folders()
    run.files.make_folder(run.data)
    for one in damaged:
        bad = one.rows
        if not bad and one.is_altered and not _restore(run, index, ledger, one):
            bad = index.made(one.receipt)
        if bad:
            shard = one.receipt.shard
            rows[shard] = rows.get(shard, frozenset()) | bad
    remove_marker(run)  # Its tables are to be written again.
    index = append_rows(run, index, rows, model)
    mend(run, index, ledger)
    return index


def _restore(run: RunDirectory, index: PlanIndex, ledger: Ledger, one: Checked) -> bool:
    """Put a part in its place whose bytes are those that were committed; False if they do not come out."""
    receipt, made = one.receipt, index.made(one.receipt)
    target = published(run, receipt)
    # Not among what `mending` writes, which whoever finalizes this run takes for nobody's.
    temp = run.root / f"part.{secrets.token_hex(8)}.{mark(this_process())}.tmp"
    try:
        table = part_table(ledger, receipt, made)
        is_same = rewrite(run, index, receipt, table, temp) == content_of(run, index, receipt, table)
    except Interrupted:
        raise
    except BatchgenError:
        return False
    if is_same:
        run.files.replace(temp, target)
    else:
        run.files.remove_any(temp)
    return is_same
