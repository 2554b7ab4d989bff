"""The manifest's columns `width` and `height`: as asked for, as made, and the rules that one may break."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.columns import Bools, integers
from batchgen.models.facts import Facts

MAX_SIZE = 32_768
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sizes:
    """A batch's widths or heights; arrays have an entry per row."""

    asked: Ints
    made: Ints
    broken: Mapping[str, Bools]
    """The rows that break each rule."""


def sizes(
    column: pa.Array | None,
    default: Ints,
    of_image: npt.NDArray[np.int32] | None,
    facts: Facts,
    policy: Literal["strict", "round"],
) -> Sizes:
    """The sizes of rows. Where the column says nothing it is that of the row's init image (0: it has none), rounded
    down to what the model can do; without one, the default. `of_image` is None where the default goes before it."""
    is_own = np.zeros(len(default), bool) if of_image is None else of_image > 0
    asked, is_no_size = default, np.zeros(len(default), bool)
    if column is not None:
        parsed, is_negative = integers(column)
        is_no_size = parsed.is_bad | (parsed.given & (is_negative | (parsed.values > MAX_SIZE)))
        asked, is_own = parsed.filled(is_no_size, default), is_own & ~parsed.given
    if of_image is not None:
        asked = np.where(is_own, of_image, asked)
    multiple, least, most = facts.size_multiple, facts.min_size, facts.max_size or MAX_SIZE
    made = asked
    if policy == "round":
        rounded = (asked + multiple // 2) // multiple * multiple
        made = np.where(asked > 0, np.maximum(rounded, least), asked)
    made = np.where(is_own, asked // multiple * multiple, made)
    is_bad = ~is_no_size & ((made < least) | (made > most) | (made % multiple != 0))
    bounds = f"at least {least}" + (f" and at most {most}" if facts.max_size else "")
    hint = f"; the default is {default[0]}" if column is None and len(default) else ""
    return Sizes(
        asked=asked,
        made=made,
        broken={
            f"must be a whole number of pixels up to {MAX_SIZE}": is_no_size,
            f"is that of the init image, which is below {least} or above {most}: give the row a size": is_own & is_bad,
            f"must be a multiple of {multiple}, {bounds} (--set plan.size_policy=round rounds){hint}": is_bad & ~is_own,
        },
    )
