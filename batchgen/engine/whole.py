"""The generic family at work: rows made one by one by diffusers' own pipeline call."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from batchgen.cost import Measurement
from batchgen.engine.attention import attention
from batchgen.engine.compiled_network import CompiledNetwork
from batchgen.engine.decode import CONSTANT, Fault
from batchgen.engine.devices import (
    dtype_of,
    errors_named,
    find_device,
    limit_memory,
    placing,
    quiet_libraries,
    versions_of,
)
from batchgen.engine.engine import Engine
from batchgen.engine.loras import Loras
from batchgen.engine.samplers import check_options
from batchgen.generator import Context, Dropped, Generator, Pending
from batchgen.job import Job
from batchgen.models.contents import ModelFolder
from batchgen.models.facts import Facts
from batchgen.models.fitting import check_keys
from batchgen.models.folder import BUILT_IN, facts_of, find_model
from batchgen.models.loading import load_pipeline
from batchgen.models.lora_files import lora_sets
from batchgen.records import Batch, Failure, Image, Outcome, Pixels, Row, Spent

NOT_FINITE = Fault("NotFinite", "the image has NaN or Inf in it")


def open_model(job: Job, context: Context | None) -> Generator:
    """What makes the job's rows: the engine, or for a model of the generic family its pipeline."""
    is_known = job.model.path in BUILT_IN or not find_model(job.model).is_generic
    return Engine(job, context) if is_known else WholePipeline(job, context)


class WholePipeline:
    """The job's model, loaded; a `batchgen.generator.Generator`. Raises UsageError as loading does, and for keys that
    would have no effect."""

    def __init__(self, job: Job, context: Context | None = None) -> None:
        folder, context = find_model(job.model), context or Context()
        check_keys(job, folder)
        self.device = find_device(job.engine.device)
        limit_memory(job.engine.max_memory_bytes, self.device, context.say)
        self.facts = facts_of(job.model, has_checker=job.engine.safety_checker)
        dtype = dtype_of(job.model.dtype, self.facts, self.device)
        with placing(job.model.path, self.device):
            self._pipeline = load(folder, dtype, self.device)
        if folder.replaced.has_scheduler:
            check_options(self._pipeline.scheduler, folder.replaced.scheduler)
        self._loras = Loras(self._pipeline, lora_sets(job.model), job.model.path)
        self._compiled: CompiledNetwork | None = None
        if job.engine.mode == "compiled":
            network = getattr(self._pipeline, folder.layout.network)
            self._compiled = CompiledNetwork(network, self.device, dtype, context)
        self._pipeline_s = 0.0
        self._attention = None if job.engine.attention == "auto" else job.engine.attention
        self._taken = inspect.signature(self._pipeline.__call__).parameters
        self.versions: Mapping[str, str] = versions_of(self.device, dtype)

    def prepare(self, batches: Sequence[Batch], should_drop: Callable[[], bool]) -> None:
        """Nothing is shared between rows."""

    def submit(self, batch: Batch, should_drop: Callable[[], bool]) -> Pending:
        """Make the rows at once. As Generator.submit."""
        with errors_named(self.versions["device"]), attention(self._attention, self.device):
            self._loras.use(batch.group.lora)
            outcomes = [self._make(row, should_drop) for row in batch.rows]
        return lambda: outcomes

    def measurements(self) -> Sequence[Measurement]:
        """None: nothing that is measured here would change a plan."""
        return ()

    def spent(self) -> Spent:
        """One stage, "pipeline", by the clock of the host, which waits for each row."""
        return Spent({"pipeline": self._pipeline_s})

    def _make(self, row: Row, should_drop: Callable[[], bool]) -> Outcome:
        started = time.perf_counter()
        made = self._pipeline(**self._arguments(row, should_drop)).images[0]
        seconds = time.perf_counter() - started
        self._pipeline_s += seconds
        result = judge(np.asarray(made), row)
        if isinstance(result, Fault):
            return Failure(row, result.error, result.message)
        mode = self._compiled.mode if self._compiled else "eager"
        return Image(row, result, 1, mode, None, None, seconds)

    def _arguments(self, row: Row, should_drop: Callable[[], bool]) -> dict[str, Any]:
        """What the pipeline is told of a row; of what it knows nothing, nothing."""

        def on_step_end(pipeline: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            if should_drop():
                raise Dropped
            return {}

        offered = arguments(row, self.facts) | {"callback_on_step_end": on_step_end}
        return {name: value for name, value in offered.items() if name in self._taken}


def arguments(row: Row, facts: Facts) -> dict[str, Any]:
    """A row as diffusers' pipelines are told of it. A null negative prompt is what the pipeline itself takes where it
    is told none; sizes are never changed to one of a pipeline's bins, nor prompts cleaned, which diffusers does only
    where the packages for it are installed."""
    is_told = facts.guided_above is not None and row.negative_prompt is not None
    guided: dict[str, Any] = {"negative_prompt": row.negative_prompt} if is_told else {}
    if facts.takes_guidance_scale:
        guided["guidance_scale"] = row.guidance_scale
    return {
        "prompt": row.prompt,
        **guided,
        "width": row.width,
        "height": row.height,
        "num_inference_steps": row.steps,
        "true_cfg_scale": row.true_cfg_scale,
        "generator": torch.Generator("cpu").manual_seed(row.seed),
        "use_resolution_binning": False,
        "clean_caption": False,
        "output_type": "np",
    }


def judge(made: Any, row: Row) -> Pixels | Fault:
    """The pixels of an image `[H, W, 3]` of 0 to 1, rounded as diffusers rounds, or why it is none."""
    if made.shape != (row.height, row.width, 3):
        asked, found = f"{row.width}x{row.height}", "x".join(map(str, made.shape[1::-1]))
        return Fault("WrongSize", f"{asked} was asked for and the pipeline made {found}: take a size that it can do")
    if not np.isfinite(made).all():
        return NOT_FINITE
    pixels: Pixels = (made * 255).round().astype(np.uint8)
    return CONSTANT if (pixels == pixels[0, 0]).all() else pixels


def load(folder: ModelFolder, dtype: torch.dtype, device: torch.device) -> Any:
    """The pipeline of a checked folder, on the device: safetensors only, no code from the folder. Raises UsageError for
    weights that cannot be read or do not fill the networks, or if a package is lacking."""
    with quiet_libraries():
        made = load_pipeline(folder, dtype)
    made.set_progress_bar_config(disable=True)
    return made.to(device)
