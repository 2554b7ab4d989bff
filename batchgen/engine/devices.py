"""The device that a job is made on: found, named, and its errors told in our words."""

from __future__ import annotations

import logging
import platform
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import diffusers
import torch
import transformers

from batchgen.engine.graphs import device_bytes
from batchgen.errors import UsageError
from batchgen.generator import DeviceLost, OutOfMemory
from batchgen.models.facts import Facts
from batchgen.version import VERSION
from batchgen.wording import first_line, sized


def versions_of(device: torch.device, dtype: torch.dtype) -> Mapping[str, str]:
    """What pixels may depend on beside the job."""
    return {
        "batchgen": VERSION,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
    }


def dtype_of(name: str | None, facts: Facts, device: torch.device) -> torch.dtype:
    """What the job names, else float32 on a CPU and the family's half precision on a GPU."""
    dtype = getattr(torch, name or ("float32" if device.type == "cpu" else facts.half_dtype))
    assert isinstance(dtype, torch.dtype)
    return dtype


_MEMORY = re.compile(r"STATUS_ALLOC_FAILED|CUDA error: out of memory")
_LOST = re.compile(r"(CUBLAS|CUDNN|CUSOLVER|CUFFT)_STATUS_(?!NOT_SUPPORTED|BAD_PARAM|INVALID_VALUE)")
"""What CUDA's libraries say of the device; the others are of what was asked of them."""


def is_memory(error: Exception) -> bool:
    """Whether an error is a lack of memory, be it torch's own or one that CUDA or its libraries report."""
    is_ours = isinstance(error, torch.OutOfMemoryError)
    return is_ours or (isinstance(error, RuntimeError) and _MEMORY.search(str(error)) is not None)


def is_alive(device: torch.device) -> bool:
    """Whether a device still answers: after some errors it does, such as those of a capture."""
    try:
        torch.ones(1, device=device).item()
    except RuntimeError:
        return False
    return True


@contextmanager
def errors_named(device: str) -> Iterator[None]:
    """Raises OutOfMemory and DeviceLost, which names the device, for what torch has for them."""
    try:
        yield
    except RuntimeError as error:
        if is_memory(error):
            raise OutOfMemory(first_line(error)) from error
        if not isinstance(error, torch.AcceleratorError) and not _LOST.search(str(error)):
            raise
        raise DeviceLost(
            f"{device} reports: {first_line(error)}. Everything committed is kept; run the same command again"
        ) from error


@contextmanager
def placing(model: str, device: torch.device) -> Iterator[None]:
    """Put a model's weights on a device within the block. Raises UsageError where they do not fit."""
    try:
        yield
    except RuntimeError as error:
        if not is_memory(error):
            raise
        raise UsageError(
            f"the weights of model {model!r} do not fit into the memory that is free on {device_name(device)}: "
            f"{first_line(error)}. `batchgen plan` says what they take, `nvidia-smi` what others hold of the GPU; take "
            "a larger GPU, a half precision in model.dtype, or a smaller model"
        ) from error


@contextmanager
def quiet_libraries(level: int = logging.ERROR) -> Iterator[None]:
    """Errors only from diffusers and transformers, or what is above another level: their advice while loading, and of
    what they will drop some day, is for people who write pipelines."""
    loggers = (diffusers.utils.logging, transformers.utils.logging)
    before = [logger.get_verbosity() for logger in loggers]
    for logger in loggers:
        logger.set_verbosity(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, verbosity in zip(loggers, before, strict=True):
            logger.set_verbosity(verbosity)


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
        reason = first_line(error)
        raise UsageError(f"engine.device = {name!r} is not there ({reason}); on this machine: {there}") from None
    return device


def limit_memory(limit_bytes: int | None, device: torch.device, say: Callable[[str], object]) -> None:
    """Let torch take no more of a GPU than a job allows; nothing on a CPU."""
    total_bytes = device_bytes(device)
    if limit_bytes is None or total_bytes is None:
        return
    if limit_bytes > total_bytes:
        say(f"engine.max_memory is {sized(limit_bytes)}, and this GPU has {sized(total_bytes)}: batches may not fit")
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)


def usable_bytes(limit_bytes: int | None, device: torch.device) -> int | None:
    """What torch may take of a GPU; None on a CPU."""
    total_bytes = device_bytes(device)
    return total_bytes if total_bytes is None or limit_bytes is None else min(total_bytes, limit_bytes)


def device_name(device: torch.device) -> str:
    """What the pixels' last bits depend on: the GPU's model, or the kind of processor and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()}, {torch.get_num_threads()} threads"
