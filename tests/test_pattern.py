import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen import codec, job
from batchgen.errors import RowError
from batchgen.generator import Dropped, open_generator
from batchgen.models import pattern
from batchgen.models.pattern import PatternGenerator, expected, paint, read_pattern
from batchgen.records import Batch, Failure, Group, Image, Outcome, Row
from tests.shards import AWKWARD_TEXTS, make_row

FAULTS = job.Model(path="pattern", variant="faults")


def never() -> bool:
    return False


def batch_of(*rows: Row, size: int = 0) -> Batch:
    group = Group(rows[0].width, rows[0].height, True, 0, "x,e")
    return Batch(0, size or len(rows), group, rows)


def generate(*rows: Row, model: job.Model = FAULTS) -> list[Outcome]:
    return PatternGenerator(model).submit(batch_of(*rows), never)()


def faulty(index: int, fault: str) -> Row:
    return make_row(index, f"fault: {fault}")


@settings(max_examples=80, deadline=None)
@given(
    st.text(max_size=20),
    st.text(max_size=300),
    st.one_of(st.none(), st.text(max_size=5)),
    st.integers(0, 2**64 - 1),
    st.integers(8, 40),
    st.integers(8, 40),
)
def test_a_picture_says_which_row_it_is(
    row_id: str, prompt: str, negative: str | None, seed: int, columns: int, lines: int
) -> None:
    row = make_row(id=row_id, prompt=prompt, negative_prompt=negative, seed=seed, width=8 * columns, height=8 * lines)
    pixels = paint(row)
    assert pixels.shape == (row.height, row.width, 3)
    assert pixels.dtype == np.uint8
    assert read_pattern(pixels) == expected(row)


CHANGES = [
    {"id": "other"},
    {"image_number": 1},
    {"prompt": "a red apple "},
    {"negative_prompt": ""},
    {"steps": 21},
    {"guidance_scale": 7.25},
    {"sampler": "euler"},
    {"seed": 2**63},
    {"width": 72},
    {"height": 72},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_every_parameter_shows(change: dict[str, object]) -> None:
    assert read_pattern(paint(make_row(**change))) != expected(make_row())  # type: ignore[arg-type]


@pytest.mark.parametrize("text", AWKWARD_TEXTS)
@pytest.mark.parametrize("side", [64, 256])
def test_awkward_texts_are_painted(text: str, side: int) -> None:
    row = make_row(id=text, prompt=text, width=side, height=side)
    assert read_pattern(paint(row)) == expected(row)


@pytest.mark.parametrize("image", ["jpeg", "webp"])
@pytest.mark.parametrize("quality", [50, 90])
def test_the_pattern_survives_lossy_formats(image: str, quality: int) -> None:
    output = job.Output.model_validate({"image": image, "quality": quality})
    for index in range(40):
        row = make_row(index, f"prompt {index}", width=64 + 8 * index)
        assert read_pattern(codec.decode(codec.encode(paint(row), None, output))) == expected(row)


def test_a_damaged_or_cropped_picture_is_refused() -> None:
    pixels = paint(make_row(width=128, height=128))
    damaged = pixels.copy()
    damaged[20:24, 20:24] = 255 - damaged[20:24, 20:24]
    with pytest.raises(ValueError, match="checksum"):
        read_pattern(damaged)
    with pytest.raises(ValueError, match="says 128x128"):
        read_pattern(pixels[:120])
    with pytest.raises(ValueError, match="too small"):
        read_pattern(pixels[:32])


def test_pixels_do_not_depend_on_neighbours_or_batch_size() -> None:
    rows = [make_row(index, f"prompt {index}", steps=5 + index) for index in range(4)]
    together = generate(*rows)
    for row, outcome in zip(rows, together, strict=True):
        (alone,) = generate(row)
        assert isinstance(outcome, Image)
        assert isinstance(alone, Image)
        assert outcome.row == row
        assert np.array_equal(outcome.pixels, alone.pixels)
        assert (outcome.batch_size, alone.batch_size, outcome.mode) == (4, 1, "pattern")


def test_a_padded_slot_is_not_returned() -> None:
    rows = [make_row(0), make_row(1)]
    outcomes = PatternGenerator(FAULTS).submit(batch_of(*rows, size=4), never)()
    assert [outcome.row for outcome in outcomes] == rows


def test_pictures_of_different_prompts_differ_at_a_glance() -> None:
    means = {tuple(paint(make_row(prompt=f"prompt {index}"))[0, 0] // 16) for index in range(30)}
    assert len(means) > 10


def test_text_is_written_where_there_is_room() -> None:
    one, other = (paint(make_row(prompt="same", id=name, width=256, height=256)) for name in ("aa", "bb"))
    assert not np.array_equal(one[64:80], other[64:80])
    assert np.array_equal(one[200:], other[200:])


@pytest.mark.parametrize(("fault", "error"), [("nan", "NotFinite"), ("flat", "Constant")])
def test_a_row_that_cannot_be_saved_fails_alone(fault: str, error: str) -> None:
    before, failed, after = generate(make_row(0), faulty(1, fault), make_row(2))
    assert isinstance(before, Image)
    assert isinstance(after, Image)
    assert isinstance(failed, Failure)
    assert (failed.error, failed.row.id) == (error, "row-1")


def test_a_row_that_raises_takes_its_batch_with_it() -> None:
    with pytest.raises(RuntimeError, match="row-1"):
        generate(make_row(0), faulty(1, "raise"))


def test_raise_once_is_once_per_row() -> None:
    generator = PatternGenerator(FAULTS)
    for index in (0, 1):
        batch = batch_of(faulty(index, "raise once"))
        with pytest.raises(RuntimeError, match="once"):
            generator.submit(batch, never)()
        (outcome,) = generator.submit(batch, never)()
        assert isinstance(outcome, Image)


def test_exit_kills_the_process() -> None:
    script = "from tests import test_pattern as t; t.generate(t.faulty(0, 'exit'))"
    ended = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[1])
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.parametrize("prompt", ["fault: explode", "fault:", "fault: slow", "fault: slow x", "fault: slow -1"])
def test_an_unknown_fault_is_an_error_of_its_row(prompt: str) -> None:
    with pytest.raises(RowError, match="known are raise, raise once"):
        generate(make_row(0, prompt))


def test_faults_are_ordinary_prompts_unless_asked_for() -> None:
    (outcome,) = generate(faulty(0, "raise"), model=job.Model(path="pattern"))
    assert isinstance(outcome, Image)


def test_slow_takes_its_time_and_can_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only sleeping moves."""
    now_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[-1], sleep=lambda seconds: now_s.append(now_s[-1] + seconds))
    monkeypatch.setattr(pattern, "time", clock)
    generate(faulty(0, "slow 0.25"))
    assert now_s[-1] == 0.25
    with pytest.raises(Dropped):
        PatternGenerator(FAULTS).submit(batch_of(faulty(0, "slow 60")), lambda: now_s[-1] > 0.5)()
    assert 0.5 < now_s[-1] < 60


def test_a_batch_can_be_dropped_between_any_two_steps() -> None:
    batch = batch_of(make_row(0, steps=3), make_row(1, steps=7))
    for allowed in range(7):
        answers = iter([False] * allowed + [True])
        with pytest.raises(Dropped):
            PatternGenerator(FAULTS).submit(batch, lambda: next(answers))()  # noqa: B023
    answers = iter([False] * 7)
    assert len(PatternGenerator(FAULTS).submit(batch, lambda: next(answers))()) == 2


def test_sizes_that_hold_no_pattern_are_refused() -> None:
    with pytest.raises(RowError, match="56x64"):
        generate(make_row(0, width=56))


def test_the_run_opens_it_by_name() -> None:
    generator = open_generator(job.Job(model=FAULTS))
    assert generator.versions == {"pattern": "1"}
