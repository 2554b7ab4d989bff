"""torch and the GPUs it sees, asked in a process of its own: importing it takes seconds, and may fail in many ways."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec

TIMEOUT_S = 120.0
_PROGRAM = """
import json
found = {"version": "", "cuda": None, "gpus": [], "error": ""}
try:
    import torch
    found["version"], found["cuda"] = torch.__version__, torch.version.cuda
    if torch.version.cuda:
        torch.cuda.init()
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            name = torch.cuda.get_device_name(number)
            found["gpus"].append({"name": name, "free_bytes": free, "total_bytes": total})
except Exception as error:
    found["error"] = (str(error).strip() or type(error).__name__).splitlines()[0]
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as torch sees it."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Torch:
    """What torch says of itself."""

    version: str = ""
    """"" where it is not installed, or cannot be imported."""
    cuda: str | None = None
    """The version of CUDA that it was built for; None for a build without."""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""
    """Why it cannot be imported, or cannot use the GPUs."""


class Probe:
    """The process, started at once; `result` waits for it."""

    def __init__(self, program: str = _PROGRAM) -> None:
        self._process = None
        if find_spec("torch") is not None:
            words = [sys.executable, "-P", "-c", program]
            self._process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def result(self) -> Torch:
        if self._process is None:
            return Torch()
        try:
            out, said = self._process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return Torch(error=f"it has not answered for {TIMEOUT_S:.0f} s")
        try:
            found = json.loads(out.splitlines()[-1])
        except (ValueError, IndexError):
            last = said.strip().splitlines()[-1:] or ["nothing"]
            return Torch(error=f"its process ended with code {self._process.returncode} and said: {last[0]}")
        gpus = tuple(Gpu(**one) for one in found.pop("gpus"))
        return Torch(**found, gpus=gpus)
