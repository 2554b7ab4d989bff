"""Which mode is predicted to pay: the kernels of each bucket by the work that is left in it, and those of decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchgen.engine.compiling import mode_named, mode_of
from batchgen.records import Bucket, Work

SHARES = {"eager": 1.0, "regional": 0.74, "compiled": 0.69}
"""Of the seconds of an eager evaluation, by kernels: SD1.5 at 512x512, 64 rows of the network, one H200, torch 2.11. By
16 rows regional ones need 0.71."""
COMPILE_S = 30.0
COMPILE_S_PER_PARAMETER = 3e-8
"""Compiling took 50 to 60 s for SD1.5 (0.86e9 parameters), whole or by blocks, and about 100 s for SDXL (2.6e9)."""
DECODE_GAIN_S = 35e-9
"""Seconds per pixel that a compiled VAE saves: 77 ms against 35 ms for 1024x1024."""
DECODE_COMPILE_S = 40.0
REGIONAL_LAUNCHES = 1.4
"""How much longer than eager ones kernels by blocks take to launch: each block has its guards checked in Python. 35 ms
against 25 on one host."""
UNCAPTURED = 1.02
"""How much longer an evaluation takes whose kernels Python launches, beyond the bound: 1.01 to 1.03 were measured."""
CAPTURE_EVALUATIONS = 9
"""A capture runs about as many: warm-ups, the record, and the check against eager."""
CHECK_EVALUATIONS = 5
"""Compiled kernels without a capture are called once and then checked."""
_SURPLUS = 1.2
"""What is paid must be earned back this many times."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of eager evaluations on this host and device."""

    launch_s: float
    """None is faster: Python launches its kernels one by one."""
    pixel_s: float
    """That the device is busy for each of a bucket's pixels."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """How long a bucket's work is predicted to take, and the mode that suits it."""

    mode: str
    modes_s: Mapping[str, float]
    """Seconds in each mode, what must be captured, checked and compiled for the bucket alone included."""
    price: float
    """Seconds in `mode`, but what is paid beforehand counts _SURPLUS times."""

    @property
    def seconds(self) -> float:
        return self.modes_s[self.mode]

    @property
    def eager_s(self) -> float:
        return self.modes_s["eager"]


def forecasts(work: Mapping[Bucket, Work], speed: Speed, compile_s: float) -> dict[Bucket, Forecast]:
    """The mode of each bucket. Blocks are compiled once for all of them, so they are allowed where all that they save
    pays for that."""

    def told(*kernels: str) -> dict[Bucket, Forecast]:
        return {one: forecast(one, left, speed, compile_s, kernels) for one, left in work.items()}

    without, regional = told("eager", "compiled"), told("eager", "regional", "compiled")
    saved = sum(without[one].price - regional[one].price for one in work)
    return regional if saved > _SURPLUS * compile_s else without


def forecast(bucket: Bucket, left: Work, speed: Speed, compile_s: float, kernels: Sequence[str]) -> Forecast:
    """The mode of the given kernels that is done first with what is left, if what must be paid beforehand counts
    _SURPLUS times; compiling blocks is not in it."""
    pixels_s = speed.pixel_s * bucket.pixels
    launched_s = max(pixels_s, speed.launch_s)
    options: dict[str, tuple[float, float]] = {}
    for one in SHARES:
        compiling_s = compile_s if one == "compiled" else 0.0
        checked = 0 if one == "eager" else CHECK_EVALUATIONS
        kernel_s = pixels_s * SHARES[one]
        # How far a compiled whole is launched faster depends on the host: taken to be no faster.
        launches = REGIONAL_LAUNCHES if one == "regional" else 1.0
        plain_s = max(UNCAPTURED * kernel_s, launches * speed.launch_s)
        options[one] = left.evaluations * plain_s, compiling_s + checked * launched_s
        captured = mode_named(one, is_captured=True)
        options[captured] = left.evaluations * kernel_s, compiling_s + CAPTURE_EVALUATIONS * launched_s
    if bucket.rows == 1:
        # A single row of the network has code of its own.
        options = {mode: cost for mode, cost in options.items() if not mode.startswith("regional")}
    prices = {
        mode: steady_s + _SURPLUS * paid_s
        for mode, (steady_s, paid_s) in options.items()
        if mode_of(mode)[0] in kernels
    }
    mode = min(prices, key=lambda name: prices[name])
    return Forecast(mode, {name: sum(cost) for name, cost in options.items()}, prices[mode])


def decodes_that_pay(work: Mapping[Bucket, Work]) -> dict[str, str]:
    """The kernels of sizes whose decoder is worth compiling: whole for one with so many images left that it alone pays,
    else by blocks, once, if all that are left do."""
    pixels = Counter[str]()
    for bucket, left in work.items():
        pixels[size_of(bucket)] += left.batches * bucket.size * bucket.group.width * bucket.group.height
    least = _SURPLUS * DECODE_COMPILE_S / DECODE_GAIN_S
    whole = [size for size, num in pixels.items() if num > least]
    others = [size for size in pixels if size not in whole]
    if sum(pixels[size] for size in others) <= least:
        others = []
    return dict.fromkeys(whole, "compiled") | dict.fromkeys(others, "regional")


def size_of(bucket: Bucket) -> str:
    """The size of a bucket's images, as 512x512."""
    return f"{bucket.group.width}x{bucket.group.height}"
