"""The engine: a batch of rows in, one outcome per row out, on one device."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import diffusers
import torch
import transformers
from torch import Tensor

from batchgen.engine.denoise import denoise, denoise_own
from batchgen.engine.samplers import Samplers
from batchgen.errors import UsageError
from batchgen.generator import DeviceLost, OutOfMemory
from batchgen.job import Job
from batchgen.models import demo, sd
from batchgen.models.facts import OWN_UPDATE
from batchgen.models.folder import facts_of, find_model
from batchgen.models.tokens import TokenCount, count_tokens
from batchgen.records import Batch, Failure, Image, Outcome, Pixels, Row
from batchgen.version import VERSION

_EAGER = "eager"


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why decoded pixels are no picture."""

    error: str
    message: str


_NOT_FINITE = _Fault("NotFinite", "the decoded image has NaN or Inf in it, in float32 too")
_CONSTANT = _Fault("Constant", "the decoded image is one single colour, in float32 too")


class Engine:
    """The job's model, loaded; a `batchgen.generator.Generator`. Raises UsageError as loading does."""

    def __init__(self, job: Job) -> None:
        self.device = find_device(job.engine.device)
        self.facts = facts_of(job.model)
        self.model = _load(job, _dtype(job, self.device), self.device)
        self.samplers = Samplers(self.model.scheduler, self.facts)
        self.versions: Mapping[str, str] = {
            "batchgen": VERSION,
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "transformers": transformers.__version__,
            "device": device_name(self.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }
        self._decode_batch = job.engine.decode_batch

    def generate(self, batch: Batch, should_drop: Callable[[], bool]) -> list[Outcome]:
        """One outcome per row, in order. A row that is no picture fails alone.

        Raises Dropped; OutOfMemory; DeviceLost for any other CUDA error, after which the context is unusable.
        """
        try:
            return self._generate(batch, should_drop)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(str(error).splitlines()[0]) from error
        except torch.AcceleratorError as error:
            raise DeviceLost(
                f"{self.versions['device']} reports: {str(error).splitlines()[0]}. Everything committed is kept; "
                "run the same command again"
            ) from error

    @torch.inference_mode()
    def _generate(self, batch: Batch, should_drop: Callable[[], bool]) -> list[Outcome]:
        start_s = time.perf_counter()
        latents = self.denoise(batch, should_drop)
        decoded = self.decode(latents)
        counts = self._count(batch)
        seconds = (time.perf_counter() - start_s) / len(batch.rows)
        return [
            _outcome(row, result, batch.size, count, seconds)
            for row, result, count in zip(batch.rows, decoded, counts, strict=True)
        ]

    @torch.inference_mode()
    def denoise(self, batch: Batch, should_drop: Callable[[], bool]) -> Tensor:
        """Final latents `[R, C, h, w]` of the batch's R rows; padding repeats the last row and is cut off."""
        rows = batch.rows + batch.rows[-1:] * (batch.size - len(batch.rows))
        conditioning = self.model.conditioning(rows, batch.group.is_guided)
        if batch.group.form == OWN_UPDATE:
            scheduler = self.samplers.scheduler(batch.group.sampler, batch.group.steps, self.device)
            latents = denoise_own(self.model, rows, scheduler, conditioning, should_drop)
        else:
            tables = [self.samplers.table(row.sampler, row.steps) for row in rows]
            latents = denoise(self.model, rows, tables, conditioning, should_drop)
        return latents[: len(batch.rows)]

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> list[Pixels | _Fault]:
        """Each row's pixels, or what is wrong with them, in chunks of one padded size."""
        decoded: list[Pixels | _Fault] = []
        for chunk in torch.split(latents, self._decode_batch):
            padding = chunk[-1:].expand(self._decode_batch - len(chunk), *chunk.shape[1:])
            images = self.model.decode(torch.cat([chunk, padding]))[: len(chunk)]
            results = _inspect(images)
            decoded += [self._again(chunk[i : i + 1], result) for i, result in enumerate(results)]
        return decoded

    def _again(self, latents: Tensor, result: Pixels | _Fault) -> Pixels | _Fault:
        """A faulty row's second chance, in float32 and alone; a float32 decode would only repeat itself."""
        if isinstance(result, _Fault) and self.model.dtype != torch.float32:
            return _inspect(self.model.decode_float32(latents))[0]
        return result

    def _count(self, batch: Batch) -> list[TokenCount]:
        """Tokens read of each prompt; dropped of it and, where the row is guided, of its negative prompt."""
        prompts = count_tokens(self.model.tokenizer, [row.prompt for row in batch.rows])
        texts = [(row.negative_prompt or "") if batch.group.is_guided else "" for row in batch.rows]
        negatives = count_tokens(self.model.tokenizer, texts)
        return [
            TokenCount(prompt.read, prompt.dropped + negative.dropped)
            for prompt, negative in zip(prompts, negatives, strict=True)
        ]


def _outcome(row: Row, result: Pixels | _Fault, batch_size: int, count: TokenCount, seconds: float) -> Outcome:
    if isinstance(result, _Fault):
        return Failure(row, result.error, result.message)
    return Image(row, result, batch_size, _EAGER, count.read, count.dropped, seconds)


def _inspect(images: Tensor) -> Sequence[Pixels | _Fault]:
    """Pixels of each of `[B, 3, H, W]`, or its fault; finiteness is tested before uint8 hides it."""
    is_finite = images.isfinite().flatten(1).all(1).tolist()
    pixels = sd.to_pixels(images)
    is_constant = (pixels.max(axis=(1, 2)) == pixels.min(axis=(1, 2))).all(axis=1)
    return [_NOT_FINITE if not is_finite[i] else _CONSTANT if is_constant[i] else pixels[i] for i in range(len(pixels))]


def _load(job: Job, dtype: torch.dtype, device: torch.device) -> sd.StableDiffusion:
    with _quiet_libraries():
        if job.model.path == "demo":
            return sd.StableDiffusion(demo.build().to(dtype), device)
        return sd.load(find_model(job.model), dtype, device)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Errors only from diffusers and transformers, whose advice while loading is for people who write pipelines."""
    loggers = (diffusers.utils.logging, transformers.utils.logging)
    before = [logger.get_verbosity() for logger in loggers]
    for logger in loggers:
        logger.set_verbosity_error()
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.set_verbosity(level)


def _dtype(job: Job, device: torch.device) -> torch.dtype:
    name = job.model.dtype or ("float32" if device.type == "cpu" else "float16")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def find_device(name: str | None) -> torch.device:
    """The named device, else the first GPU, else the CPU. Raises UsageError if it is not there."""
    if name is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        num_gpus = torch.cuda.device_count()
        there = ", ".join(["cpu", *(f"cuda:{i}" for i in range(num_gpus))])
        reason = str(error).splitlines()[0]
        raise UsageError(f"engine.device = {name!r} is not there ({reason}); on this machine: {there}") from None
    return device


def device_name(device: torch.device) -> str:
    """What the pixels' last bits depend on: the GPU's model, or the kind of processor and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()}, {torch.get_num_threads()} threads"
