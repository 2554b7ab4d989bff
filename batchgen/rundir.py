"""The run directory: where things lie, and the plan that a manifest and a job get in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa

from batchgen.differences import ROWS_ADDED, row_differences
from batchgen.drafts import Draft, plan_rows
from batchgen.errors import UsageError
from batchgen.filesystem import FileSystem, is_utf8, resumable
from batchgen.job import Job
from batchgen.known import Known
from batchgen.ledger import FOLDERS
from batchgen.manifest import Manifest, open_manifest
from batchgen.models.facts import Facts
from batchgen.models.folder import facts_of, identity, located
from batchgen.plan_index import PlanIndex, load_index
from batchgen.plan_reader import PlanReader
from batchgen.planned import Planned, plan_manifest
from batchgen.plans import Proposal, freeze

_FREE = (
    "run",
    "slurm",
    "columns",
    "model.path",
    "model.revision",
    "model.config",
    "model.vae",
    "model.scheduler",
    "model.scheduler_options",
    "model.loras",
    "engine.device",
    "engine.text_encoder",
    "engine.max_memory",
    "output.encoders",
    "plan.profile",
    "plan.image_folder",
    "plan.on_truncate",
)
"""Tables and keys of a job that may change between two starts of one run: pixels do not depend on them, or other
entries of the fingerprint hold what does."""
_OF_MANIFEST = ("manifest.files", "manifest.rows", "columns")
"""Entries of the fingerprint that a manifest has, which may grow."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run directory."""

    path: Path
    files: FileSystem = field(default_factory=FileSystem)

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def root(self) -> Path:
        """All bookkeeping."""
        return self.path / ".run"

    @property
    def plans(self) -> Path:
        return self.root / "plan"

    def find_index(self) -> PlanIndex | None:
        """All plans that lie here, None if there is none."""
        _check_links(self)
        return load_index(self.plans, self.files)

    def planned_rows(self, index: PlanIndex) -> Iterator[pa.Table]:
        """The rows of all plans, each once, a shard at a time."""
        reader = PlanReader(self.plans, index)
        for shard in index.shards:
            table, gone = reader.shard(shard), index.gone(shard)
            yield table.take(pa.array(sorted(index.rows(shard)), pa.int64())) if gone else table

    def newer(self, index: PlanIndex) -> PlanIndex | None:
        """All plans, if some were appended to these; None if these are all."""
        self.files.sync_folder(self.plans)  # Opening it makes NFS forget which plans it saw absent.
        found = self.index()
        return None if found.number == index.number else found

    @property
    def has_plan(self) -> bool:
        return self.find_index() is not None

    def index(self) -> PlanIndex:
        """All plans that lie here. Raises UsageError if there is none."""
        found = self.find_index()
        if found is None:
            raise UsageError(f"{self.path} is no run directory (it has no plan, .run/plan/0.json); name one")
        return found


def open_run(
    run: RunDirectory,
    names: Sequence[str | Path],
    job: Job,
    on_planned: Callable[[Planned], None] = lambda planned: None,
    on_progress: Callable[[int, int], None] = lambda rows, total: None,
) -> PlanIndex:
    """The run's plan: the one that lies there if it is of this manifest and job, else a new one, frozen.

    Raises UsageError for a directory of another job, with the differences field by field, and as `plan_manifest`.
    """
    check_place(run)
    index = run.find_index()
    if index is None:
        index = _freeze(run, names, job, on_planned, on_progress)
    _check_same(run, index, names, job, on_progress)
    return index


def check_place(run: RunDirectory) -> None:
    """Refuse a path that is no folder for a run."""
    with resumable(run.path):
        if not (is_utf8(run.path) and is_utf8(run.path.resolve().name)):
            raise UsageError(f"the run directory's name {str(run.path)!r} is not UTF-8; name another one with -o DIR")
        if run.path.exists() and not run.path.is_dir():
            raise UsageError(f"{run.path} is a file; the run directory needs a name of its own (-o DIR)")
        if run.path.is_dir() and any(run.path.iterdir()) and not run.root.is_dir():
            raise UsageError(f"{run.path} is a folder with something else in it; name a new one with -o DIR")


def _check_links(run: RunDirectory) -> None:
    """Refuse bookkeeping that leads out of the run directory."""
    for folder in (run.data, run.root, *(run.root / name for name in (*FOLDERS, "starts", "withdrawn"))):
        if run.files.is_link(folder):
            raise UsageError(
                f"{folder} is a symbolic link; a run directory holds its files itself: put a folder in its place"
            )


def fingerprint(job: Job, facts: Facts, manifest: Manifest | None = None) -> dict[str, str]:
    """All that changes images, but for the rows themselves: model files, and every key of the job that is not free.
    Without a manifest, what does not depend on it."""
    fields = {"model.family": facts.family}
    files = identity(job.model, has_checker=job.engine.safety_checker)
    fields |= {f"model.file:{name}": value for name, value in files.items()}
    if manifest is not None:
        columns = json.dumps(dict(sorted(job.columns.items())), ensure_ascii=False)
        fields |= {"manifest.files": manifest.content_hash(), "columns": columns}
    return fields | _keys(job)


def _keys(job: Job) -> dict[str, str]:
    """Every key of the job that is not free."""
    return {
        f"{table}.{key}": json.dumps(value, ensure_ascii=False)
        for table, keys in job.model_dump().items()
        if table not in _FREE
        for key, value in keys.items()
        if f"{table}.{key}" not in _FREE
    }


def _freeze(
    run: RunDirectory,
    names: Sequence[str | Path],
    job: Job,
    on_planned: Callable[[Planned], None],
    on_progress: Callable[[int, int], None],
) -> PlanIndex:
    planned = plan_manifest(names, job, on_progress)
    on_planned(planned)
    # The bookkeeping first: by it a run directory is told from a folder with something else in it.
    try:
        run.files.make_folder(run.root)
    except FileNotFoundError as error:
        raise UsageError(f"{run.path} cannot be made here ({error}); name another place with -o DIR") from None
    for folder in (run.plans, run.data):
        run.files.make_folder(folder)
    run.files.probe(run.root)
    return freeze_planned(run, job, planned)


def freeze_planned(run: RunDirectory, job: Job, planned: Planned, after: PlanIndex | None = None) -> PlanIndex:
    """Make a planned manifest the run's first plan, or the next `after` those that lie there; all plans then."""
    surveyed = planned.draft.survey
    prints = fingerprint(job, planned.facts, surveyed.manifest) | {"manifest.rows": surveyed.rows_digest}
    content = job.model_copy(update={"model": located(job.model)}).model_dump(mode="json")
    proposal = Proposal(planned.draft, planned.rejections, job.model.path, content, prints, after)
    return freeze(proposal, run.plans, run.files)


def _check_same(
    run: RunDirectory,
    index: PlanIndex,
    names: Sequence[str | Path],
    job: Job,
    on_progress: Callable[[int, int], None],
) -> None:
    """Refuse a directory whose fingerprint is another one. A manifest whose files changed is read again: what
    counts is whether it has the same rows."""
    manifest = open_manifest(names, job.columns)
    ours = fingerprint(job, facts_of(job.model, has_checker=job.engine.safety_checker), manifest)
    here, there = ([one.get(name) for name in ("manifest.files", "columns")] for one in (ours, index.fingerprint))
    check_differences(run, index, ours, job)
    if here != there:
        known = partial(known_rows, run, index)
        check_differences(run, index, ours, job, plan_manifest(names, job, on_progress, known).draft, may_grow=False)


def check_job(run: RunDirectory, index: PlanIndex, job: Job) -> None:
    """Refuse a job, or model files, that the run was not planned with; the manifest is not looked at."""
    check_differences(run, index, fingerprint(job, facts_of(job.model, has_checker=job.engine.safety_checker)), job)


def known_rows(run: RunDirectory, index: PlanIndex, has_ids: bool) -> Known:
    """The images of a run's plans; `has_ids`: their ids are the manifest's own."""
    return Known.of(run.planned_rows(index), has_ids=has_ids)


def check_differences(
    run: RunDirectory,
    index: PlanIndex,
    ours: Mapping[str, str],
    job: Job,
    now: Draft | None = None,
    *,
    may_grow: bool = True,
) -> None:
    """Refuse a job whose fingerprint (that without a manifest) is another one than the run's, and a draft of a
    manifest that has not the same rows; where it may grow, more rows are no difference."""
    theirs = {name: value for name, value in index.fingerprint.items() if name not in _OF_MANIFEST}
    theirs = _keys(Job()) | theirs  # A key that the run's version did not know has its default there.
    # No row that is planned names a set that the job did not have.
    theirs = {name: value for name, value in ours.items() if name.startswith("model.file:lora ")} | theirs
    ours = {name: value for name, value in ours.items() if name not in _OF_MANIFEST}
    if index.model != job.model.path and ours != theirs:
        ours["model.path"], theirs["model.path"] = job.model.path, index.model
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    lines = [f"{name}: {theirs.get(name, 'nothing')} there, {ours.get(name, 'nothing')} now" for name in differing]
    hint = ""
    if now is not None and not lines:
        if now.survey.num_rejected != index.num_rejected and not may_grow:
            lines.append(f"rows rejected: {index.num_rejected} there, {now.survey.num_rejected} now")
        if may_grow or now.survey.rows_digest != index.fingerprint.get("manifest.rows"):
            rows = _row_differences(run, index, now)
            only_added = all(line.startswith(ROWS_ADDED) for line in rows)
            hint = ", or with --extend to make the added rows too" if only_added and rows and not lines else ""
            lines += [] if may_grow and only_added else rows
    if lines:
        raise UsageError(
            "\n  ".join([f"{run.path} is the run directory of another job; it differs in", *lines])
            + f"\nGive the same manifest and options to resume it{hint}, or another directory with -o DIR"
            + ("" if _has_begun(run) else "; no worker has begun it: remove it to begin anew")
        )


def _has_begun(run: RunDirectory) -> bool:
    """Whether a shard was ever claimed: after that a part may be committed, or at work, that `data/` does not show."""
    claims = run.root / "claims"
    return run.files.is_folder(claims) and bool(run.files.names(claims))


def _row_differences(run: RunDirectory, index: PlanIndex, now: Draft) -> list[str]:
    return row_differences(lambda: run.planned_rows(index), lambda: (rows for rows, _ in plan_rows(now)))
