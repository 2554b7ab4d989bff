"""Manifest rows -> rows with every parameter resolved, or the rule each breaks. One batch of rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.columns import Bools, decoded, floats, integers, is_garbled, is_given, shown, texts
from batchgen.errors import UsageError
from batchgen.init_images import InitImages, Looked
from batchgen.init_images import shown as shown_image
from batchgen.job import Job
from batchgen.manifest import PARAMETERS
from batchgen.models.facts import Facts
from batchgen.sizes import MAX_SIZE, sizes
from batchgen.strengths import NO_IMAGE, strengths

MAX_PIXELS = 2**26
"""Of one image: what readers such as Pillow still open without a warning of decompression bombs."""
MAX_STEPS = 1_000
"""Where the model does not say how many timesteps it was trained with."""
MAX_COUNTED_STEPS = 32_768
"""A row's model evaluations, two a step with some samplers, are counted in 16 bits."""
MAX_IMAGES = 1_000_000
NO_SCALE = "has no effect: this model takes no such scale"

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BadCell:
    """One rule that one manifest row breaks."""

    row: int
    """In the manifest, from 0."""
    column: str
    value: str
    rule: str


@dataclass(slots=True)
class Checked:
    """One batch of manifest rows. Arrays have one entry per row; they say nothing where `is_good` is false."""

    first_row: int
    is_good: Bools
    bad: list[BadCell]
    columns: Mapping[str, pa.Array]
    """As read."""
    id_texts: pa.Array | None
    prompt: pa.Array
    negative_prompt: pa.Array
    width: Ints
    height: Ints
    asked_width: Ints
    asked_height: Ints
    steps: Ints
    guidance_scale: npt.NDArray[np.float64]
    true_cfg_scale: npt.NDArray[np.float64]
    """NaN where the family knows none."""
    is_guided: Bools
    init: Looked | None
    """None where the manifest has no such column, or the family takes no init image."""
    strength: npt.NDArray[np.float64]
    """NaN where the row has no init image."""
    skipped: Ints
    """Steps that the init image stands for; -1 where the row has none."""
    sampler: npt.NDArray[np.int32]
    """Index into `Rules.samplers`."""
    lora: npt.NDArray[np.int32]
    """Index into `Rules.loras`."""
    seed: npt.NDArray[np.uint64]
    """0 where the row has none."""
    has_seed: Bools
    num_images: Ints


@dataclass(slots=True)
class Rules:
    """What the job and the model ask of a row."""

    job: Job
    facts: Facts
    init_images: InitImages = field(default_factory=InitImages)
    samplers: list[str] = field(default_factory=list)
    """Names met so far; a row's `sampler` is an index into this."""
    _known: dict[str, int] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises UsageError for a default of the job that no row may have."""
        for name, most in self.limits.items():
            value = getattr(self.job.sampling, name)
            if value is not None and value > most:
                raise UsageError(f"sampling.{name} = {value} must be a whole number from 1 to {most}")
        if (self.facts.guided_above is None or not self.facts.takes_negative) and self.job.sampling.negative_prompt:
            raise UsageError(f"sampling.negative_prompt {self.no_effect}; leave it out")
        if (self.job.sampling.lora or "") not in self.loras:
            raise UsageError(f"sampling.lora = {self.job.sampling.lora!r} {self.no_lora}")
        for name, is_taken in self.scales.items():
            if not is_taken and getattr(self.job.sampling, name):
                raise UsageError(f"sampling.{name} {NO_SCALE}; leave it out")
        if self.job.sampling.strength is not None and not self.facts.takes_image:
            raise UsageError(f"sampling.strength {NO_IMAGE}; leave it out")

    @property
    def limits(self) -> dict[str, int]:
        """The largest value of each parameter that is a whole number."""
        steps = min(self.facts.max_steps or MAX_STEPS, MAX_COUNTED_STEPS)
        return {"width": MAX_SIZE, "height": MAX_SIZE, "steps": steps, "num_images": MAX_IMAGES}

    @property
    def scales(self) -> dict[str, bool]:
        """The columns of scales, and whether the model takes them."""
        return {"guidance_scale": self.facts.takes_guidance_scale, "true_cfg_scale": self.facts.has_true_cfg}

    @property
    def loras(self) -> list[str]:
        """Names of the job's LoRA sets, after "", which is none."""
        return ["", *self.job.model.loras]

    @property
    def no_lora(self) -> str:
        """Why a name that is none of theirs is refused."""
        if len(self.loras) == 1:
            return "is no LoRA set of this job, which has none: name them in the job file, as model.loras"
        return f"is no LoRA set of this job; model.loras has {', '.join(map(repr, self.loras[1:]))}"

    @property
    def no_effect(self) -> str:
        """Why a negative prompt of a row that is not guided is refused."""
        above = self.facts.guided_above
        if not self.facts.takes_negative:
            return "has no effect: this model takes no negative prompt"
        if above is None:
            return "has no effect: this model is never guided"
        return f"has no effect at this row's {self.facts.guiding}: this model is guided above {above:g}"

    def check(self, batch: pa.RecordBatch, first_row: int) -> Checked:
        """Resolve and check one batch of manifest rows that begins at manifest row `first_row`."""
        return _Check(self, batch, first_row).run()

    def sampler_number(self, name: str) -> int:
        """The index of a sampler's name, -1 for one that the model does not know."""
        if name not in self._known:
            try:
                self.facts.sampler_facts(name)
            except UsageError as error:
                self._refused[name] = str(error).removeprefix(f"{name!r} ")  # Which stands before it.
                self._known[name] = -1
            else:
                self._known[name] = len(self.samplers)
                self.samplers.append(name)
        return self._known[name]

    def refusal(self, name: str) -> str:
        return self._refused[name]


class _Check:
    def __init__(self, rules: Rules, batch: pa.RecordBatch, first_row: int) -> None:
        self.rules, self.first_row, self.num = rules, first_row, batch.num_rows
        self.columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        self.is_good = np.ones(self.num, dtype=bool)
        self.bad: list[BadCell] = []

    def run(self) -> Checked:
        job, facts = self.rules.job.sampling, self.rules.facts
        prompt = self._text("prompt", None, is_required=True)
        guidance = self._scale("guidance_scale", facts.guidance_scale)
        true_cfg = self._scale("true_cfg_scale", np.nan if facts.true_cfg_scale is None else facts.true_cfg_scale)
        negative, is_guided = self._negative_prompt(true_cfg if facts.has_true_cfg else guidance)
        init = self._init_images()
        asked_width, width = self._size("width", job.width, facts.width, init)
        asked_height, height = self._size("height", job.height, facts.height, init)
        is_large = self.is_good & (width * height > MAX_PIXELS)
        self._refuse("height", is_large, f"times width must be at most {MAX_PIXELS}")
        steps = self._count("steps", job.steps or facts.steps)
        strength, skipped = self._strength(init, steps)
        num_images = self._count("num_images", job.num_images)
        sampler = self._sampler(job.sampler or facts.sampler)
        self._refuse_impossible(steps, sampler)
        lora = self._lora(job.lora or "")
        seed, has_seed = self._seed()
        id_texts = self._ids()
        for column in (name for name in self.columns if name not in PARAMETERS):
            self._refuse(column, is_garbled(self.columns[column]), "must be UTF-8 text")
        return Checked(
            self.first_row, self.is_good, self.bad, self.columns, id_texts, prompt, negative, width, height,
            asked_width, asked_height, steps, guidance, true_cfg, is_guided, init, strength, skipped, sampler, lora,
            seed, has_seed, num_images,
        )  # fmt: skip

    def _refuse_impossible(self, steps: Ints, sampler: npt.NDArray[np.int32]) -> None:
        """Refuse the good rows whose sampler cannot make their number of steps."""
        pairs = np.where(self.is_good, (sampler.astype(np.int64) << 16) | steps, -1)
        for pair in (one for one in np.unique(pairs).tolist() if one >= 0):
            name, number = self.rules.samplers[pair >> 16], pair & 0xFFFF
            known = self.rules.facts.sampler_facts(name)
            if not known.makes(number):
                most = self.rules.limits["steps"]
                near = min(filter(known.makes, range(1, most + 1)), key=lambda one: abs(one - number), default=0)
                hint = f"the nearest number that can is {near}" if near else "nor can any other number"
                rule = f"cannot be made: {number} steps of {name} do not fit this model's schedule; {hint}"
                self._refuse("steps", pairs == pair, rule, str(number))

    def _refuse(self, column: str, is_bad: Bools, rule: str, in_force: npt.NDArray[Any] | str = "None") -> None:
        """Note the rule for every row of the mask. `in_force`: the value, or each row's, where the cell is null."""
        show = shown_image if column == "image" else shown
        told = self.columns.get(column)
        for row in np.flatnonzero(is_bad).tolist():
            value = in_force if isinstance(in_force, str) else str(in_force[row])
            if told is not None and is_given(told[row : row + 1]).all():
                value = show(told[row])
            self.bad.append(BadCell(self.first_row + row, column, value, rule))
        self.is_good &= ~is_bad

    def _text(self, column: str, default: str | None, *, is_required: bool = False) -> pa.Array:
        if column not in self.columns:
            return pa.array([default] * self.num, pa.large_string())
        values, is_bad = texts(self.columns[column])
        self._refuse(column, is_bad, f"must be UTF-8 text; the column's type is {self.columns[column].type}")
        given = is_given(self.columns[column])
        if is_required:
            self._refuse(column, ~given, "must be text")
        return values if default is None else values.fill_null(default)

    def _negative_prompt(self, scale: npt.NDArray[np.float64]) -> tuple[pa.Array, Bools]:
        """What weighs against the prompt, and which rows are guided by it."""
        facts, default = self.rules.facts, self.rules.job.sampling.negative_prompt
        column = self._text("negative_prompt", None)
        is_guided = scale > (np.inf if facts.guided_above is None else facts.guided_above)
        is_text = pc.greater(pc.binary_length(column), 0).fill_null(False).to_numpy(zero_copy_only=False)
        is_idle = is_text if not facts.takes_negative else is_text & ~is_guided
        self._refuse("negative_prompt", is_idle, self.rules.no_effect)
        if default is not None:
            column = pc.if_else(pa.array(is_guided), column.fill_null(default), column)
        if not facts.needs_negative:
            return column, is_guided
        asked = self.rules.job.sampling.true_cfg_scale
        is_asked = is_given(self.columns[facts.guiding]) if facts.guiding in self.columns else np.zeros(self.num, bool)
        is_alone = is_guided & np.isfinite(scale) & ~is_given(column) & (is_asked | (asked is not None))
        rule = 'has no effect without a negative_prompt, of which "" is one: give the row one, or a scale of 1'
        self._refuse(facts.guiding, is_alone, rule, str(asked))
        return column, is_guided & is_given(column)

    def _scale(self, column: str, default: float) -> npt.NDArray[np.float64]:
        told = getattr(self.rules.job.sampling, column)
        default = default if told is None else told
        if column not in self.columns:
            return np.full(self.num, default)
        parsed = floats(self.columns[column])
        self._refuse(column, parsed.is_bad, "must be a finite number")
        if not self.rules.scales[column]:
            self._refuse(column, parsed.given & ~parsed.is_bad & (parsed.values != 0), NO_SCALE)
            return np.full(self.num, default)
        # Nothing is known of a bad row's guidance: no rule about what it would do shall name the row as well.
        return np.where(parsed.is_bad, np.inf, np.where(parsed.given, parsed.values, default)) + 0.0

    def _count(self, column: str, default: int) -> Ints:
        most = self.rules.limits[column]
        if column not in self.columns:
            return np.full(self.num, default)
        parsed, is_negative = integers(self.columns[column])
        outside = is_negative | (parsed.values < 1) | (parsed.values > np.uint64(most))
        is_bad = parsed.is_bad | (parsed.given & outside)
        self._refuse(column, is_bad, f"must be a whole number from 1 to {most}")
        return parsed.filled(is_bad, np.full(self.num, default))

    def _init_images(self) -> Looked | None:
        if "image" not in self.columns:
            return None
        if not self.rules.facts.takes_image:
            self._refuse("image", is_given(self.columns["image"]), NO_IMAGE)
            return None
        looked, faults = self.rules.init_images.look(self.columns["image"], self.first_row)
        self.bad += [BadCell(self.first_row + one.place, "image", one.value, one.rule) for one in faults]
        self.is_good[[one.place for one in faults]] = False
        return looked

    def _strength(self, init: Looked | None, steps: Ints) -> tuple[npt.NDArray[np.float64], Ints]:
        """The strengths, and how many steps are skipped for them."""
        facts, has_image = self.rules.facts, np.zeros(self.num, bool) if init is None else init.given
        column = self.columns.get("strength", pa.nulls(self.num))
        found = strengths(column, has_image, np.where(self.is_good, steps, MAX_COUNTED_STEPS), facts, self.rules.job)
        for rule, is_bad in found.broken.items():
            self._refuse("strength", is_bad, rule, found.values)
        return found.values, found.skipped

    def _size(self, column: str, told: int | None, usual: int, init: Looked | None) -> tuple[Ints, Ints]:
        """Sizes as asked for and as made."""
        of_image = None if init is None else getattr(init, column)
        facts, policy = self.rules.facts, self.rules.job.plan.size_policy
        default = np.full(self.num, told or usual)
        found = sizes(self.columns.get(column), default, None if told else of_image, facts, policy)
        for rule, is_bad in found.broken.items():
            self._refuse(column, is_bad, rule, found.asked)
        return found.asked, found.made

    def _sampler(self, default: str) -> npt.NDArray[np.int32]:
        number = self.rules.sampler_number
        if "sampler" not in self.columns and number(default) >= 0:
            return np.full(self.num, number(default), np.int32)
        column = self._text("sampler", default).dictionary_encode()
        names = column.dictionary.to_pylist()
        numbers = np.array([number(name) for name in names], np.int32)
        codes = column.indices.to_numpy(zero_copy_only=False)
        for code, name in enumerate(names):
            if numbers[code] < 0:
                self._refuse("sampler", codes == code, self.rules.refusal(name), repr(name))
        return numbers[codes] if len(codes) else np.zeros(0, np.int32)

    def _lora(self, default: str) -> npt.NDArray[np.int32]:
        number = {name: index for index, name in enumerate(self.rules.loras)}
        if "lora" not in self.columns:
            return np.full(self.num, number[default], np.int32)
        column = self._text("lora", default).dictionary_encode()
        numbers = np.array([number.get(name, -1) for name in column.dictionary.to_pylist()], np.int32)
        found = numbers[column.indices.to_numpy(zero_copy_only=False)] if len(numbers) else np.zeros(0, np.int32)
        self._refuse("lora", found < 0, self.rules.no_lora)
        return found

    def _seed(self) -> tuple[npt.NDArray[np.uint64], Bools]:
        if "seed" not in self.columns:
            return np.zeros(self.num, np.uint64), np.zeros(self.num, bool)
        parsed, is_negative = integers(self.columns["seed"])
        is_minus_one = is_negative & (parsed.values == 1)
        is_bad = parsed.is_bad | (parsed.given & is_negative & ~is_minus_one)
        self._refuse("seed", is_bad, "must be a whole number from 0 to 2^64 - 1, or -1 or null for a derived seed")
        has_seed = parsed.given & ~is_minus_one & ~is_bad
        return np.where(has_seed, parsed.values, np.uint64(0)), has_seed

    def _ids(self) -> pa.Array | None:
        if "id" not in self.columns:
            return None
        column = decoded(self.columns["id"])
        if pa.types.is_integer(column.type):
            column = column.cast(pa.large_string())
        values, is_bad = texts(column)
        self._refuse("id", is_bad, f"must be text or a whole number; the column's type is {column.type}")
        rule = "must be text or a whole number: give every row an id, or drop the column"
        self._refuse("id", ~is_given(column), rule)
        return values
