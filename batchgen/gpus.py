"""The GPUs that a process started here would see, found without torch: by the CUDA driver's own library.

Neither `nvidia-smi` nor NVML is asked: a container may lack them, and they do not heed `CUDA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from batchgen.errors import UsageError
from batchgen.wording import counted

VISIBLE = "CUDA_VISIBLE_DEVICES"
_LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE"""


def choose_gpus(wanted: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Of the visible GPUs: "all", the first N ("2"), or those of a list of numbers as CUDA counts them ("0,2", "2,").

    Raises UsageError for anything else, and for GPUs that are not there.
    """
    text = wanted.strip()
    if text == "all":
        return names
    if re.fullmatch("[0-9]{1,4}", text):
        chosen = list(range(int(text)))
    elif re.fullmatch("([0-9]{1,4},)+([0-9]{1,4})?", text):
        chosen = [int(one) for one in text.split(",") if one]
    else:
        raise UsageError(f'--gpus {wanted!r} is not usable: it takes "all", a count like 2, or numbers like 0,2')
    if not chosen or len(set(chosen)) < len(chosen):
        raise UsageError(f"--gpus {wanted!r} is not usable: it names {'no GPU' if not chosen else 'a GPU twice'}")
    if max(chosen) >= len(names):
        raise UsageError(
            f"--gpus {wanted!r} asks for more than is there: {counted(len(names), 'GPU')} can be seen, "
            f"numbered from 0 ({', '.join(names)})"
        )
    return tuple(names[one] for one in chosen)


def visible_gpus(
    environment: Mapping[str, str] = os.environ, load: Callable[[str], Any] = ctypes.CDLL
) -> tuple[str, ...]:
    """The names by which `CUDA_VISIBLE_DEVICES` would give a process one GPU each: numbers, or what that variable
    already holds (numbers, UUIDs, MIG instances).

    Raises UsageError where there is none.
    """
    named = _named(environment)
    if named == ():
        raise UsageError(f"--gpus: {VISIBLE} is {environment[VISIBLE]!r}, which hides all GPUs; unset it or name some")
    count = _count(load, f" among {VISIBLE} = {environment[VISIBLE]!r}" if named else " here")
    if named is None:
        return tuple(map(str, range(count)))
    # A process sees one MIG instance, however many it is given.
    if count < len(named) and not any(name.startswith("MIG-") for name in named):
        raise UsageError(
            f"--gpus: {VISIBLE} is {environment[VISIBLE]!r}, and of these {counted(count, 'GPU')} can be used; "
            "name such as are there"
        )
    return named


def _named(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """What `CUDA_VISIBLE_DEVICES` names, as CUDA reads it: up to the first that is no name; None if it is unset."""
    if VISIBLE not in environment:
        return None
    names: list[str] = []
    for name in map(str.strip, environment[VISIBLE].split(",")):
        if not re.fullmatch(r"[0-9]+|(GPU|MIG)-[\w/.-]+", name):
            break
        names.append(name)
    return tuple(names)


def _count(load: Callable[[str], Any], where: str) -> int:
    """How many devices the driver finds (CUDA driver API: cuInit, cuDeviceGetCount). Takes no memory of any."""
    try:
        driver = load(_LIBRARY)
    except OSError as error:
        raise UsageError(
            f"--gpus: this machine has no NVIDIA driver that can be used ({error}); leave the option out to run on "
            "the CPU, or say --workers N for several processes"
        ) from None
    count = ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if failed and failed != _NO_DEVICE:
        raise UsageError(f"--gpus: the NVIDIA driver cannot be used: {_reason(driver, failed)}; see what it lacks")
    if failed or not count.value:
        raise UsageError(f"--gpus: the NVIDIA driver finds no GPU{where}; leave the option out to run on the CPU")
    return count.value


def _reason(driver: Any, failed: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(failed, ctypes.byref(text))
    return f"{(text.value or b'unknown').decode()} (CUDA error {failed})"
