"""What a person should know of a manifest before a night is spent on it."""

from __future__ import annotations

import difflib

from batchgen.job import Job
from batchgen.manifest import PARAMETERS, Manifest
from batchgen.models.facts import Facts
from batchgen.survey import Survey
from batchgen.wording import counted, listed


def notes_of(surveyed: Survey, facts: Facts, job: Job) -> list[str]:
    """All of them, in the order in which they are said."""
    notes = [facts.note] if facts.note else []
    if facts.prompt_tokens and job.plan.on_truncate == "warn":
        added = " and what its pipeline adds to it" if facts.is_added_within else ""
        notes.append(
            f"the model reads {facts.prompt_tokens} tokens of a prompt{added}: longer ones are cut, and counted in the "
            "closing lines; --on-truncate error names them before anything is made"
        )
    notes += _carried_notes(surveyed.manifest)
    notes += _idle_notes(surveyed, facts, job)
    if surveyed.num_from_images:
        notes.append(
            f"{counted(surveyed.num_from_images, 'manifest row')} of {len(surveyed.group):,} begin from an image"
        )
    if surveyed.num_cropped:
        notes.append(
            f"init images whose own size is no multiple of {facts.size_multiple}, and whose rows have no other: "
            f"{surveyed.num_cropped:,}; they are made at the next smaller one, and the metadata has both"
        )
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


def _idle_notes(surveyed: Survey, facts: Facts, job: Job) -> list[str]:
    """What the job says and no row is made by: its defaults may serve other manifests, or rows may lack something."""
    notes = []
    if job.sampling.strength is not None and not surveyed.num_from_images:
        notes.append("sampling.strength has no effect: no row begins from an image")
    if job.sampling.negative_prompt and not any(group.is_guided for group in surveyed.groups):
        notes.append(f"sampling.negative_prompt has no effect: no row has a {facts.guiding} by which it is guided")
    idle = [repr(name) for name in job.model.loras if name not in {group.lora for group in surveyed.groups}]
    if idle:
        notes.append(
            f"LoRA sets of model.loras that no row has: {listed(idle)}; rows take one by the column lora or by "
            "sampling.lora"
        )
    return notes


def _carried_notes(manifest: Manifest) -> list[str]:
    """What is only carried, so that a misspelt parameter is seen before a night is spent on it."""
    notes = [
        f"column {name!r} is an index of pandas' and left out; to_parquet(index=False) does not write it"
        for name in manifest.index_columns
    ]
    if not manifest.carried:
        return notes
    taken = set(manifest.schema.names)
    notes += [f"carried into the metadata as they are: {listed(manifest.carried)}"]
    for name in manifest.carried:
        near = difflib.get_close_matches(name.lower().replace(" ", "_"), PARAMETERS, n=1, cutoff=0.8)
        if near and near[0] not in taken:
            notes.append(f"column {name!r} is not read; if it is {near[0]}, say --set columns.{near[0]}={name!r}")
    return notes
