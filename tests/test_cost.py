"""Predicted seconds: measured ones near what was measured, and profiles that are none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen import costs
from batchgen.cost import (
    ConservativeModel,
    Cost,
    Measurement,
    PatternModel,
    Profile,
    Seconds,
    load_profile,
    save_profile,
)
from batchgen.errors import UsageError
from batchgen.records import Group

ONE = {"width": 512, "height": 512, "is_guided": True, "batch_size": 4, "fixed_s": 0.5, "evaluation_s": 0.1}


def group_of(width: int, height: int, is_guided: bool) -> Group:
    return Group(width, height, is_guided, 77, "x,e")


GROUPS = st.builds(group_of, st.sampled_from([64, 512, 1024, 4096]), st.sampled_from([64, 768]), st.booleans())


@pytest.mark.parametrize("model", [ConservativeModel(), PatternModel()], ids=lambda model: type(model).__name__)
@given(GROUPS, st.integers(1, 32))
def test_guesses_grow_with_the_batch_and_favour_larger_ones(model: Cost, group: Group, size: int) -> None:
    one, next_one = model.seconds(group, size), model.seconds(group, size + 1)
    assert not model.is_measured
    assert 0 < one.of(20) < next_one.of(20)
    assert next_one.of(20) / (size + 1) <= one.of(20) / size * (1 + 1e-12)


SIDES = st.sampled_from([256, 512])
MEASURED = st.builds(
    Measurement, SIDES, SIDES, st.booleans(), st.sampled_from([1, 4, 8]), st.floats(0.1, 9), st.floats(0.1, 9)
)


@given(st.lists(MEASURED, min_size=1, max_size=6), GROUPS, st.integers(1, 16))
def test_a_profile_gives_back_what_was_measured_and_scales_the_rest(
    measured: list[Measurement], group: Group, size: int
) -> None:
    profile = Profile("a test", tuple(measured))
    for one in measured:
        bucket = (one.width, one.height, one.is_guided, one.batch_size)
        same = [o for o in measured if (o.width, o.height, o.is_guided, o.batch_size) == bucket]
        found = profile.seconds(group_of(one.width, one.height, one.is_guided), one.batch_size)
        assert found in [Seconds(o.fixed_s, o.evaluation_s) for o in same]
    guess = profile.seconds(group, size)
    assert guess.fixed_s > 0
    assert guess.evaluation_s > 0


def test_an_unmeasured_bucket_is_in_the_proportion_of_the_conservative_model() -> None:
    """A launch-bound evaluation costs the same for any small batch, so a small one is not taken for nearly free."""
    profile, model = Profile("a test", (measured(32, 0.2),)), ConservativeModel()
    for side, size, is_guided in ((512, 1, True), (1024, 32, True), (512, 8, False), (256, 2, False)):
        group = group_of(side, side, is_guided)
        guess, base = model.seconds(group, size), model.seconds(group_of(512, 512, True), 32)
        assert profile.seconds(group, size).evaluation_s == pytest.approx(0.2 * guess.evaluation_s / base.evaluation_s)
    assert profile.seconds(group_of(512, 512, True), 1).evaluation_s > 0.2 / 16


def test_a_profile_is_read_with_its_source(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"source": "one H200", "measurements": [ONE]}))
    assert load_profile(path) == Profile(f"{path} (one H200)", (Measurement(**ONE),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"measurements": []}',
        {"source": "x", "measurements": []},
        {"source": "x", "measurements": [{}]},
        {"source": "x", "measurements": "no"},
        *({"source": "x", "measurements": [ONE | bad]} for bad in (
            {"batch_size": 0}, {"batch_size": "many"}, {"width": -1}, {"fixed_s": -1.0}, {"evaluation_s": float("nan")},
            {"fixed_s": float("inf")}, {"more": 1}, {"height": None}
        )),
    ],
)  # fmt: skip
def test_what_is_no_profile_is_said_to_be_none(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UsageError, match=r"plan.profile = .*profile.json' is not a profile that batchgen can read"):
        load_profile(path)


def test_a_profile_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json"):
        load_profile(tmp_path / "none.json")


def test_a_wrong_measurement_is_pointed_at(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"source": "x", "measurements": [ONE, ONE | {"batch_size": 0}]}))
    with pytest.raises(UsageError, match=r"read: measurements\.1\.batch_size: Input should be greater than 0"):
        load_profile(path)


def measured(size: int, evaluation_s: float, **memory: int) -> Measurement:
    return Measurement(512, 512, True, size, 0.5, evaluation_s, **memory)


GB = 10**9


@pytest.mark.parametrize(
    ("lines", "largest"),
    [
        ([measured(32, 1.0)], 32),
        ([measured(32, 1.0), measured(64, 1.9)], 64),
        ([measured(32, 1.0), measured(64, 1.99)], 32),
        ([measured(8, 1.0, peak_bytes=12 * GB, weights_bytes=4 * GB, device_bytes=24 * GB)], 16),
        ([measured(8, 1.0, peak_bytes=20 * GB, weights_bytes=4 * GB, device_bytes=24 * GB)], 8),
        ([measured(8, 1.0, peak_bytes=90 * GB, weights_bytes=4 * GB, device_bytes=24 * GB)], 1),
    ],
)
def test_the_largest_batch_is_what_memory_holds_and_what_still_gains(lines: list[Measurement], largest: int) -> None:
    assert Profile("a test", tuple(lines)).max_batch(group_of(512, 512, True)) == largest


def test_a_saved_profile_is_read_back(tmp_path: Path) -> None:
    lines = (measured(1, 0.1), measured(8, 0.5, peak_bytes=9 * GB, weights_bytes=GB, device_bytes=80 * GB))
    save_profile(tmp_path / "p.json", "a test", lines)
    found = load_profile(tmp_path / "p.json")
    assert found.measurements == lines
    assert found.source == f"{tmp_path / 'p.json'} (a test)"
    with pytest.raises(UsageError, match="cannot be written here"):
        save_profile(tmp_path / "no" / "p.json", "a test", lines)


class TestKeptCosts:
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path))
        self.at(monkeypatch, None, "2.13")
        return tmp_path

    def at(self, monkeypatch: pytest.MonkeyPatch, gpu: str | None, torch: str | None) -> None:
        monkeypatch.setattr(costs, "gpu_name", lambda: gpu)
        monkeypatch.setattr(costs, "_torch", lambda: torch)

    def test_what_is_measured_again_replaces_what_was(self) -> None:
        costs.remember("net", "A", "2.13", [measured(1, 0.1), measured(2, 0.2)])
        costs.remember("net", "A", "2.13", [measured(2, 0.3, peak_bytes=5)])
        found = costs.recall("net", "auto")
        assert found is not None
        assert found.measurements == (measured(1, 0.1), measured(2, 0.3, peak_bytes=5))
        assert found.source == "measured earlier on A with torch 2.13"
        assert costs.recall("another net", "auto") is None

    @pytest.mark.parametrize(
        ("gpu", "torch", "evaluation_s"),
        [
            ("A", "2.11", 0.1), ("A", "2.13", 0.2), ("B", "2.13", 0.3),
            ("B", "2.11", None), ("C", "2.13", None), (None, "2.13", None), ("A", None, 0.2),
        ],
    )  # fmt: skip
    def test_gpu_and_torch_decide(
        self, monkeypatch: pytest.MonkeyPatch, gpu: str | None, torch: str | None, evaluation_s: float | None
    ) -> None:
        for number, key in enumerate([("A", "2.11"), ("A", "2.13"), ("B", "2.13")]):
            costs.remember("net", *key, [measured(1, round(0.1 + number / 10, 1))])
        self.at(monkeypatch, gpu, torch)
        found = costs.recall("net", "auto")
        assert (found and found.measurements[0].evaluation_s) == evaluation_s

    def test_of_a_bucket_the_mode_that_is_asked_for_counts_else_the_last_run(self) -> None:
        lines = [replace(measured(1, seconds), mode=mode) for mode, seconds in (("graph", 0.1), ("eager", 0.3))]
        costs.remember("net", "A", "2.13", lines)
        costs.remember("net", "A", "2.13", [replace(measured(1, 0.2), mode="graph")])
        for mode, evaluation_s in (("eager", 0.3), ("graph", 0.2), ("auto", 0.2), ("compiled", 0.2)):
            found = costs.recall("net", mode)
            assert found is not None
            assert [one.evaluation_s for one in found.measurements] == [evaluation_s]

    def test_a_machine_without_a_gpu_takes_the_only_gpu_that_was_used(self) -> None:
        costs.remember("net", "A", "2.13", [measured(1, 0.1)])
        assert costs.recall("net", "auto") is not None

    def test_a_file_that_cannot_be_put_in_its_place_leaves_nothing(
        self, place: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (place / "costs" / "net.json").mkdir(parents=True)
        costs.remember("net", "A", "2.13", [measured(1, 0.1)])
        assert "cannot be kept" in caplog.text
        assert [path.name for path in (place / "costs").iterdir()] == ["net.json"]

    def test_a_damaged_file_is_no_fault(self, place: Path, caplog: pytest.LogCaptureFixture) -> None:
        costs.remember("net", "A", "2.13", [measured(1, 0.1)])
        (place / "costs" / "net.json").write_text("{")
        assert costs.recall("net", "auto") is None
        assert "measured again" in caplog.text
