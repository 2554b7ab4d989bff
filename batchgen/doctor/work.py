"""A manifest or a run, and whether the disk has room for it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchgen.balance import take_balance
from batchgen.doctor.findings import Finding
from batchgen.errors import BatchgenError, UsageError
from batchgen.filesystem import FileSystem
from batchgen.job import Job
from batchgen.ledger import Ledger
from batchgen.planned import plan_manifest
from batchgen.report import image_bytes, num_parts, summarise
from batchgen.rundir import RunDirectory
from batchgen.wording import counted, first_line, sized

FILES_OF_A_SHARD = 5
"""At least: its claim, receipt, row table and part, and one to spare."""


@dataclass(frozen=True, slots=True)
class Need:
    """What is still to be written."""

    images: int
    num_bytes: int
    files: int


def of_manifest(manifest: Sequence[str], job: Job) -> tuple[Need | None, Finding]:
    """What a run of a manifest would write; None if it cannot be planned."""
    try:
        draft = plan_manifest(manifest, job).draft
    except UsageError as error:
        # The whole of it is a line a row.
        advice = f"{shlex.join(['batchgen', 'plan', *manifest])} says what is wrong, with the same job"
        return None, Finding("manifest", "amiss", first_line(error), advice, {"error": str(error)})
    cut = draft.cut
    size = image_bytes(sum(one.pixels for one in summarise(draft)), job)
    files = num_parts(cut.num_rows, cut.num_shards, job) + FILES_OF_A_SHARD * cut.num_shards
    found = f"{counted(cut.num_rows, 'image')}, {counted(draft.survey.num_rejected, 'row')} rejected"
    facts = {"images": cut.num_rows, "rejected": draft.survey.num_rejected}
    return Need(cut.num_rows, int(size), files), Finding("manifest", "ok", found, facts=facts)


def of_run(run: RunDirectory, job: Job) -> tuple[Need, Finding]:
    """What is left to be written of a run."""
    index = run.index()
    balance = take_balance(index, Ledger(run.root, run.files, plan=index.token))
    lanes = {bucket: bucket.size * work.batches for bucket, work in index.work(1.0).items()}
    pixels = sum(num * one.group.width * one.group.height for one, num in lanes.items()) / max(1, sum(lanes.values()))
    left = sum(1 for one in balance.shards if one.outstanding)
    size = int(image_bytes(balance.outstanding * pixels, job))
    files = num_parts(balance.outstanding, left, job) + FILES_OF_A_SHARD * left
    facts = {"rows": balance.rows, "outstanding": balance.outstanding}
    return Need(balance.outstanding, size, files), Finding("run", "ok", f"{run.path}: {balance.line()}", facts=facts)


def disk(folder: Path, need: Need | None) -> Finding:
    """Room and inodes of the file system that a folder is on or would be made on, against what is to be written."""
    place = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())
    found = os.statvfs(place)
    free, inodes = found.f_bavail * found.f_frsize, found.f_favail
    has_inodes = found.f_files > 0
    shown = f"{place}: {sized(free)} free" + (f", {inodes:,} more files" if has_inodes else "")
    facts = {"path": str(place), "free_bytes": free, "free_files": inodes if has_inodes else None}
    if need is not None:
        shown += f"; about {sized(need.num_bytes)} and {counted(need.files, 'file')} are to be written"
        facts |= {"needed_bytes": need.num_bytes, "needed_files": need.files}
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding("disk", "amiss", shown, f"{place} may not be written to: name another place with -o", facts)
    try:
        FileSystem().probe(place)
    except (BatchgenError, OSError) as error:
        return Finding("disk", "amiss", shown, str(error), facts)
    if need and need.num_bytes > free:
        return Finding("disk", "amiss", shown, "make room, name another place with -o, or write webp or jpeg", facts)
    if need and has_inodes and need.files > inodes:
        advice = "write tars (--format webdataset) or Parquet files, or name another place with -o"
        return Finding("disk", "amiss", shown, advice, facts)
    return Finding("disk", "ok", shown, facts=facts)
