"""A manifest checked, grouped and cut, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchgen.checks import Rules
from batchgen.cost import ConservativeModel, Cost, PatternModel, load_profile
from batchgen.costs import recall
from batchgen.drafts import Draft, draft
from batchgen.errors import UsageError
from batchgen.init_images import InitImages
from batchgen.job import Job
from batchgen.known import Known
from batchgen.limits import Limits
from batchgen.manifest import Manifest, open_manifest
from batchgen.memory import Demand, room_of
from batchgen.metadata import RESERVED
from batchgen.models.contents import read_of
from batchgen.models.facts import Facts
from batchgen.models.fitting import check_keys
from batchgen.models.folder import architecture, facts_of, find_model
from batchgen.models.footprint import demand_of
from batchgen.notes import notes_of
from batchgen.rejections import Rejections
from batchgen.survey import survey
from batchgen.truncation import check_truncation


@dataclass(frozen=True, slots=True)
class Planned:
    """A draft and what is to be said of it."""

    draft: Draft
    facts: Facts
    rejections: Rejections
    notes: tuple[str, ...]
    demand: Demand | None
    """Of a GPU's memory; None of a model without weights."""

    def __repr__(self) -> str:
        return f"<Planned: {self.num_images:,} images, {self.num_rejected:,} rows rejected>"

    @property
    def num_images(self) -> int:
        return self.draft.cut.num_rows

    @property
    def num_rejected(self) -> int:
        """Manifest rows that are left out."""
        return self.draft.survey.num_rejected

    @property
    def seconds(self) -> float | None:
        """Of one GPU, as predicted; None where nothing was measured."""
        return float(self.draft.cut.batch_s.sum()) if self.draft.cost.is_measured else None


def plan_manifest(
    names: Sequence[str | Path],
    job: Job,
    on_progress: Callable[[int, int], None] = lambda rows, total: None,
    known: Callable[[bool], Known] | None = None,
) -> Planned:
    """Check, group and cut a manifest; nothing is written. `known` gives the images that are planned already, told
    whether the manifest has ids: only the others are cut.

    Raises UsageError for a manifest that cannot be read, or (unless the job skips them) for bad rows, which the
    message names.
    """
    facts = facts_of(job.model, has_checker=job.engine.safety_checker)
    if facts.needs_torch:
        check_keys(job, find_model(job.model, has_checker=job.engine.safety_checker))
    _check_sampler(job, facts)
    manifest = open_manifest(names, job.columns)
    _check_names(manifest)
    rejections = Rejections(manifest)
    surveyed = survey(
        manifest,
        Rules(job, facts, _init_images(manifest, job)),
        rejections.add,
        lambda rows: on_progress(rows, manifest.num_rows),
        known("id" in manifest.schema.names) if known else None,
    )
    manifest.check_unchanged()
    if rejections.num_cells and job.plan.on_bad_row == "stop":
        raise UsageError(rejections.message(surveyed.num_rejected))
    largest, demand = job.plan.max_batch if facts.is_captured else 1, _demand(job, facts)
    limit = job.engine.max_memory_bytes
    room = None if demand is None or limit is None else room_of(job, demand, limit)
    limits = Limits(job.plan.batch_sizes, largest, job.plan.shard_images, room)
    check_truncation(surveyed, job)
    notes = notes_of(surveyed, facts, job)
    return Planned(draft(surveyed, _cost(job, facts), limits), facts, rejections, tuple(notes), demand)


def _init_images(manifest: Manifest, job: Job) -> InitImages:
    if job.plan.image_folder is None:
        return InitImages(manifest.folder)
    folder = Path(job.plan.image_folder)
    if not folder.is_dir():
        raise UsageError(f"plan.image_folder = {str(folder)!r} is no folder; name the one that paths begin in")
    return InitImages(lambda row: folder)


def _check_sampler(job: Job, facts: Facts) -> None:
    if job.sampling.sampler is not None:
        try:
            facts.sampler_facts(job.sampling.sampler)
        except UsageError as error:
            raise UsageError(f"sampling.sampler: {error}") from None


def _check_names(manifest: Manifest) -> None:
    taken = [name for name in manifest.carried if name in RESERVED]
    if taken:
        raise UsageError(
            f"manifest: column {taken[0]!r} has a name that batchgen's own metadata uses; carry it under another one "
            f"with --set columns.manifest_{taken[0]}={taken[0]!r} or in the job file's [columns]"
        )


def _demand(job: Job, facts: Facts) -> Demand | None:
    """What the job's model needs of a GPU; None of one without weights, or of a run that is kept to the CPU and has no
    limit."""
    if not facts.needs_torch or (job.engine.device == "cpu" and job.engine.max_memory is None):
        return None
    folder = find_model(job.model, has_checker=job.engine.safety_checker)
    with read_of(folder.path):
        return demand_of(folder, facts, job)


def _cost(job: Job, facts: Facts) -> Cost:
    if job.plan.profile is not None:
        return load_profile(Path(job.plan.profile))
    if not facts.needs_torch:
        return PatternModel()
    measured = None if job.engine.device == "cpu" else recall(architecture(job.model), job.engine.mode)
    return measured or ConservativeModel()
