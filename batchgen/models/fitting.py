"""Keys of a job's `[engine]` held against its model, before that is loaded. Needs no torch."""

from __future__ import annotations

from batchgen.errors import UsageError
from batchgen.job import Job
from batchgen.models.contents import ModelFolder

_OF_ENGINE = {
    "mode": ("auto", "eager", "compiled"),
    "decode_batch": (None,),
    "text_encoder": ("gpu",),
    "vae_tiling": (False,),
}
"""Keys whose other values have no effect on a model of the generic family."""


def check_keys(job: Job, folder: ModelFolder) -> None:
    """Raises UsageError for keys that would have no effect on the model or that it cannot obey."""
    if folder.is_generic:
        _check_generic(job, folder)
    elif job.engine.text_encoder == "load":
        _check_load(job, folder)


def _check_generic(job: Job, folder: ModelFolder) -> None:
    keys = {f"engine.{name}": (getattr(job.engine, name), allowed) for name, allowed in _OF_ENGINE.items()}
    keys["model.vae_dtype"] = (job.model.vae_dtype, (None,))
    for name, (value, allowed) in keys.items():
        if value not in allowed:
            raise UsageError(
                f"{name} = {value!r} has no effect on model {job.model.path!r}: its rows are made by diffusers' own "
                f"pipeline; {_advice(name)}"
            )
    if job.engine.mode == "compiled" and not folder.layout.network:
        raise UsageError(
            f"engine.mode = 'compiled' compiles a pipeline's transformer or unet, and model {job.model.path!r} has "
            f"neither, but {', '.join(folder.layout.components)}; take eager"
        )


def _advice(key: str) -> str:
    return "take eager or compiled" if key == "engine.mode" else "leave it out"


def _check_load(job: Job, folder: ModelFolder) -> None:
    """Text encoders that are read again and again must lie there as they are."""
    if job.model.loras:
        raise UsageError(
            'engine.text_encoder = "load" reads text encoders anew for each shard, and model.loras may change them; '
            'take "offload"'
        )
    if folder.in_checkpoint & set(folder.encoders):
        raise UsageError(
            f'engine.text_encoder = "load" reads text encoders from a folder, and {folder.checkpoint} is a single file '
            'that holds them; take "offload"'
        )
