"""Checked rows -> who each of them is: digests of what their manifest says of them, in one spelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.checks import Checked
from batchgen.columns import floats, integers, is_given
from batchgen.identity import U64, Digests, joined, number_digests, row_digests, text_digests
from batchgen.manifest import PARAMETERS


@dataclass(frozen=True, slots=True)
class Identified:
    """Who each row of a batch is."""

    ids: Digests
    """Of the `id` column, else of all columns as they stand in the manifest."""
    content: npt.NDArray[np.uint32]
    """Hash of all that makes a row's pixels but id, image number and seed."""


def identify(checked: Checked, samplers: list[str], loras: list[str]) -> Identified:
    """Digests of a batch's rows; `samplers` and `loras` are the names that `checked.sampler` and `.lora` count."""
    prompt = text_digests(checked.prompt)
    if checked.id_texts is None:
        ids = row_digests(_canonical(checked), len(checked.prompt), {"prompt": prompt})
    else:
        ids = text_digests(checked.id_texts)
    total = joined(prompt, text_digests(checked.negative_prompt))
    total = joined(total, number_digests(is_given(checked.negative_prompt).astype(np.uint64)))
    total = joined(total, text_digests(pa.array([*samplers, ""])).take(checked.sampler.astype(np.intp)))
    for numbers in (checked.width, checked.height, checked.steps, checked.guidance_scale):
        total = joined(total, number_digests(numbers.view(np.uint64)))
    if not np.isnan(checked.true_cfg_scale).any():
        total = joined(total, number_digests(checked.true_cfg_scale.view(np.uint64)))
    if checked.init is not None:
        total = joined(total, text_digests(checked.init.hashes()))
        total = joined(total, number_digests(checked.strength.view(np.uint64)))
    # Rows without a set are what they were before there were any.
    with_lora = joined(total, text_digests(pa.array([*loras, ""])).take(checked.lora.astype(np.intp)))
    low = np.where(checked.lora == 0, total.low, with_lora.low)
    return Identified(ids, low.astype(np.uint32))


def _canonical(checked: Checked) -> Mapping[str, pa.Array]:
    """The columns with our own parameters in one spelling, so that 20, 20.0 and "20" are the same row; a picture is its
    content, wherever it lies."""
    canonical = dict(checked.columns)
    if checked.init is not None:
        canonical["image"] = checked.init.hashes()
    for name in ("width", "height", "steps", "num_images", "seed"):
        if name in canonical:
            parsed, is_negative = integers(canonical[name])
            is_null = ~parsed.given | (is_negative & (name == "seed"))
            canonical[name] = pa.array(parsed.values, mask=is_null | parsed.is_bad)
    for name in ("guidance_scale", "true_cfg_scale", "strength"):
        if name in canonical:
            numbers = floats(canonical[name])
            canonical[name] = pa.array(numbers.values + 0.0, mask=~numbers.given | numbers.is_bad)
    return canonical


def digest_sum(checked: Checked, who: Identified, good: npt.NDArray[np.intp]) -> U64:
    """Sum over rows of a hash of all that is asked of each: the same for any order of the rows."""
    total = joined(who.ids.take(good), number_digests(who.content[good].astype(np.uint64)))
    if checked.id_texts is not None:
        own = {name: column.take(good) for name, column in checked.columns.items() if name not in PARAMETERS}
        total = joined(total, row_digests(own, len(good), {}))
    for numbers in (checked.seed, checked.has_seed, checked.num_images, checked.asked_width, checked.asked_height):
        total = joined(total, number_digests(numbers[good].astype(np.uint64)))
    with np.errstate(over="ignore"):
        return np.array([total.high.sum(dtype=np.uint64), total.low.sum(dtype=np.uint64)], np.uint64)
