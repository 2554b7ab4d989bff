"""The run directory: where things lie, and the plan that a manifest and a job get in it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchgen.checks import Rules
from batchgen.cost import ConservativeModel, Cost, PatternModel, load_profile
from batchgen.costs import recall
from batchgen.differences import row_differences
from batchgen.drafts import Draft, draft, plan_rows
from batchgen.errors import UsageError
from batchgen.filesystem import FileSystem, is_utf8, resumable
from batchgen.job import Job
from batchgen.manifest import PARAMETERS, Manifest, open_manifest
from batchgen.metadata import RESERVED
from batchgen.models.facts import Facts
from batchgen.models.folder import architecture, facts_of, identity
from batchgen.planner import Limits
from batchgen.plans import PlanIndex, PlanReader, freeze, load_index
from batchgen.rejections import Rejections
from batchgen.survey import Survey, survey
from batchgen.truncation import check_truncation
from batchgen.wording import listed

_FREE = (
    "run",
    "slurm",
    "columns",
    "model.path",
    "model.revision",
    "engine.device",
    "engine.text_encoder",
    "output.encoders",
    "plan.profile",
    "plan.on_truncate",
)
"""Tables and keys of a job that may change between two starts of one run: pixels do not depend on them, or other
entries of the fingerprint hold what does."""


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

    @property
    def has_plan(self) -> bool:
        return load_index(self.plans, self.files) is not None

    def index(self) -> PlanIndex:
        """The plan that lies here. Raises UsageError if there is none."""
        found = load_index(self.plans, self.files)
        if found is None:
            raise UsageError(f"{self.path} is no run directory (it has no plan, .run/plan/0.json); name one")
        return found


@dataclass(frozen=True, slots=True)
class Planned:
    """A draft and what is to be said of it."""

    draft: Draft
    facts: Facts
    rejections: Rejections
    notes: tuple[str, ...]


def plan_manifest(
    names: Sequence[str | Path], job: Job, on_progress: Callable[[int, int], None] = lambda rows, total: None
) -> Planned:
    """Check, group and cut a manifest; nothing is written.

    Raises UsageError for a manifest that cannot be read, or (unless the job skips them) for bad rows, which the
    message names.
    """
    facts = facts_of(job.model)
    _check_sampler(job, facts)
    manifest = open_manifest(names, job.columns)
    _check_names(manifest)
    rejections = Rejections(manifest)
    surveyed = survey(manifest, Rules(job, facts), rejections.add, lambda rows: on_progress(rows, manifest.num_rows))
    manifest.check_unchanged()
    if rejections.num_cells and job.plan.on_bad_row == "stop":
        raise UsageError(rejections.message(surveyed.num_rejected))
    limits = Limits(job.plan.batch_sizes, job.plan.max_batch, job.plan.shard_images)
    check_truncation(surveyed, job)
    notes = _notes(surveyed, facts, job)
    return Planned(draft(surveyed, _cost(job, facts), limits), facts, rejections, tuple(notes))


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
    _check_place(run)
    index = load_index(run.plans, run.files)
    if index is None:
        index = _freeze(run, names, job, on_planned, on_progress)
    _check_same(run, index, names, job, on_progress)
    return index


def _check_place(run: RunDirectory) -> None:
    with resumable(run.path):
        if not (is_utf8(run.path) and is_utf8(run.path.resolve().name)):
            raise UsageError(f"the run directory's name {str(run.path)!r} is not UTF-8; name another one with -o DIR")
        if run.path.exists() and not run.path.is_dir():
            raise UsageError(f"{run.path} is a file; the run directory needs a name of its own (-o DIR)")
        if run.path.is_dir() and any(run.path.iterdir()) and not run.root.is_dir():
            raise UsageError(f"{run.path} is a folder with something else in it; name a new one with -o DIR")


def fingerprint(job: Job, facts: Facts, manifest: Manifest) -> dict[str, str]:
    """All that changes pixels, but for the rows themselves: model files, and every key of the job that is not free."""
    fields = {"manifest.files": manifest.content_hash(), "model.family": facts.family}
    fields |= {f"model.file:{name}": value for name, value in identity(job.model).items()}
    fields["columns"] = json.dumps(dict(sorted(job.columns.items())), ensure_ascii=False)
    for table, keys in job.model_dump().items():
        if table not in _FREE:
            fields |= {
                f"{table}.{key}": json.dumps(value, ensure_ascii=False)
                for key, value in keys.items()
                if f"{table}.{key}" not in _FREE
            }
    return fields


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
    for folder in (run.root, run.plans, run.data):
        run.files.make_folder(folder)
    run.files.probe(run.root)
    surveyed = planned.draft.survey
    prints = {
        **fingerprint(job, planned.facts, surveyed.manifest),
        "manifest.rows": surveyed.rows_digest,
    }
    content = job.model_dump(mode="json")
    return freeze(planned.draft, run.plans, run.files, job.model.path, content, prints, planned.rejections)


def _check_same(
    run: RunDirectory,
    index: PlanIndex,
    names: Sequence[str | Path],
    job: Job,
    on_progress: Callable[[int, int], None],
) -> None:
    """Refuse a directory whose fingerprint is another one. A manifest whose files changed is read again: what
    counts is whether it has the same rows."""
    facts = facts_of(job.model)
    manifest = open_manifest(names, job.columns)
    ours, theirs = fingerprint(job, facts, manifest), dict(index.fingerprint)
    rows = theirs.pop("manifest.rows")
    of_manifest = ("manifest.files", "columns")
    is_same_manifest = [ours.pop(name) for name in of_manifest] == [theirs.pop(name) for name in of_manifest]
    if index.model != job.model.path and ours != theirs:
        ours["model.path"], theirs["model.path"] = job.model.path, index.model
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    lines = [f"{name}: {theirs.get(name, 'nothing')} there, {ours.get(name, 'nothing')} now" for name in differing]
    if not differing and not is_same_manifest:
        now = plan_manifest(names, job, on_progress).draft
        if now.survey.num_rejected != index.num_rejected:
            lines.append(f"rows rejected: {index.num_rejected} there, {now.survey.num_rejected} now")
        if now.survey.rows_digest != rows:
            lines += _row_differences(run, index, now)
    if lines:
        raise UsageError(
            "\n  ".join([f"{run.path} is the run directory of another job; it differs in", *lines])
            + "\nGive the same manifest and options to resume it, or another directory with -o DIR"
        )


def _row_differences(run: RunDirectory, index: PlanIndex, now: Draft) -> list[str]:
    reader = PlanReader(run.plans, index)
    return row_differences(lambda: map(reader.shard, index.shards), lambda: (rows for rows, _ in plan_rows(now)))


def _check_sampler(job: Job, facts: Facts) -> None:
    if job.sampling.sampler is not None:
        facts.sampler_facts(job.sampling.sampler)


def _check_names(manifest: Manifest) -> None:
    taken = [name for name in manifest.carried if name in RESERVED]
    if taken:
        raise UsageError(
            f"manifest: column {taken[0]!r} has a name that batchgen's own metadata uses; carry it under another one "
            f"with --set columns.manifest_{taken[0]}={taken[0]!r} or in the job file's [columns]"
        )


def _cost(job: Job, facts: Facts) -> Cost:
    if job.plan.profile is not None:
        return load_profile(Path(job.plan.profile))
    if not facts.needs_torch:
        return PatternModel()
    measured = None if job.engine.device == "cpu" else recall(architecture(job.model), job.engine.mode)
    return measured or ConservativeModel()


def _carried_notes(manifest: Manifest) -> list[str]:
    """What is only carried, so that a misspelt parameter is seen before a night is spent on it."""
    if not manifest.carried:
        return []
    taken = set(manifest.schema.names)
    notes = [f"carried into the metadata as they are: {listed(manifest.carried)}"]
    for name in manifest.carried:
        near = difflib.get_close_matches(name.lower().replace(" ", "_"), PARAMETERS, n=1, cutoff=0.8)
        if near and near[0] not in taken:
            notes.append(f"column {name!r} is not read; if it is {near[0]}, say --set columns.{near[0]}={name!r}")
    return notes


def _notes(surveyed: Survey, facts: Facts, job: Job) -> list[str]:
    notes = [facts.note] if facts.note else []
    if facts.text_length and job.plan.on_truncate == "warn":
        notes.append(
            f"the model reads {facts.text_length - 2} tokens of a prompt: longer ones are cut, and counted in the "
            "closing lines; --on-truncate error names them before anything is made"
        )
    notes += _carried_notes(surveyed.manifest)
    if surveyed.num_repeated_noise:
        notes.append(
            "images that repeat another one's prompt, parameters and noise seed, and will equal it: "
            f"{surveyed.num_repeated_noise:,} (explicit seeds are kept as they are)"
        )
    if len(surveyed.redrawn.rows):
        notes.append(
            f"derived seeds that met another of the same prompt and were drawn again: {len(surveyed.redrawn.rows):,}"
        )
    return notes
