"""Which mode is predicted to pay: the kernels of each bucket by the work that is left in it, and those of decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchgen.engine.compiling import mode_named
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
LAUNCH_BOUND_S = 0.025
"""An eager evaluation is never faster: Python launches its kernels one by one."""
REGIONAL_LAUNCH_S = 0.035
"""The same of kernels by blocks, each of which has its guards checked in Python."""
UNCAPTURED = 1.02
"""How much longer an evaluation takes whose kernels Python launches, beyond the bound: 1.01 to 1.03 were measured."""
CAPTURE_EVALUATIONS = 9
"""A capture runs about as many: warm-ups, the record, and the check against eager."""
CHECK_EVALUATIONS = 5
"""Compiled kernels without a capture are called once and then checked."""
_SURPLUS = 1.2
"""What is paid must be earned back this many times."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """How long a bucket's work is predicted to take, in the mode that suits it."""

    mode: str
    seconds: float
    """What must be captured, checked and compiled for it alone included."""
    eager_s: float
    price: float
    """`seconds`, but what is paid beforehand counts _SURPLUS times."""


def forecasts(
    work: Mapping[Bucket, Work], measured: Bucket, measured_s: float, compile_s: float
) -> dict[Bucket, Forecast]:
    """The mode of each bucket. Blocks are compiled once for all of them, so they are allowed where all that they save
    pays for that."""

    def told(*kernels: str) -> dict[Bucket, Forecast]:
        return {one: forecast(one, left, measured, measured_s, compile_s, kernels) for one, left in work.items()}

    without, regional = told("eager", "compiled"), told("eager", "regional", "compiled")
    saved = sum(without[one].price - regional[one].price for one in work)
    return regional if saved > _SURPLUS * compile_s else without


def forecast(
    bucket: Bucket, left: Work, measured: Bucket, measured_s: float, compile_s: float, kernels: Sequence[str]
) -> Forecast:
    """The mode of the given kernels that is done first with what is left, if what must be paid beforehand counts
    _SURPLUS times; compiling blocks is not in it.

    `measured_s` is an eager evaluation of one bucket; others are taken to be in proportion to their pixels.
    """
    pixels_s = measured_s * bucket.pixels / measured.pixels
    launched_s = max(pixels_s, LAUNCH_BOUND_S)
    options: dict[str, tuple[float, float]] = {}
    for one in kernels:
        compiling_s = compile_s if one == "compiled" else 0.0
        checked = 0 if one == "eager" else CHECK_EVALUATIONS
        kernel_s = pixels_s * SHARES[one]
        # How far a compiled whole is launched faster depends on the host: taken to be no faster.
        plain_s = max(UNCAPTURED * kernel_s, REGIONAL_LAUNCH_S if one == "regional" else LAUNCH_BOUND_S)
        options[one] = left.evaluations * plain_s, compiling_s + checked * launched_s
        captured = mode_named(one, is_captured=True)
        options[captured] = left.evaluations * kernel_s, compiling_s + CAPTURE_EVALUATIONS * launched_s
    if bucket.rows == 1:
        # A single row of the network has code of its own.
        options = {mode: cost for mode, cost in options.items() if not mode.startswith("regional")}
    prices = {mode: steady_s + _SURPLUS * paid_s for mode, (steady_s, paid_s) in options.items()}
    mode = min(prices, key=lambda name: prices[name])
    return Forecast(mode, sum(options[mode]), sum(options["eager"]), prices[mode])


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
