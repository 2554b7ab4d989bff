"""`batchgen report`: what its page says of whole runs, unfinished ones, several workers and damaged parts."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from batchgen import codec
from batchgen.ledger import COMMITTED, Ledger, Receipt
from batchgen.models import facts
from batchgen.owners import this_process
from batchgen.plan_reader import PlanReader
from batchgen.records import Captured, Group, Spent
from batchgen.reporting import page as pages_module
from batchgen.reporting import tables
from batchgen.reporting.cards import THUMBNAIL, thumbnail
from batchgen.reporting.findings import group_labels
from batchgen.reporting.plan_counts import count_plan
from batchgen.reporting.plots import pace_plots, stage_plots
from batchgen.reporting.sample import Sample, quotas
from batchgen.reporting.spending import Spending, pace
from batchgen.rundir import RunDirectory
from batchgen.slots import sealed
from tests import plans, runs
from tests.pages import HOSTILE, ReadPage
from tests.test_init_images import encoded

SMALL_SHARDS = ("--set", "plan.shard_images=2", "--set", "plan.max_batch=2")
FAULTS = ("--set", "model.variant=faults")


def reported(out: Path, *args: object) -> ReadPage:
    ended = runs.batchgen("report", out, *args)
    assert ended.code == 0, ended.err
    return ReadPage(out / "report.html")


def mixed(path: Path, num: int = 24) -> Path:
    """Rows of four groups, of which three fail for two reasons."""
    rows = [
        {
            "id": f"r{n:02d}",
            "prompt": f"prompt number {n}",
            "width": 64 + 32 * (n % 2),
            "height": 64,
            "guidance_scale": 1.0 + 3 * (n % 4 // 2),
            "seed": n % 3,
            "steps": 10 + n % 5,
            "source": f"<b>file {n}</b>",
        }
        for n in range(num)
    ]
    for n, prompt in ((3, "fault: nan"), (7, "fault: flat"), (11, "fault: nan")):
        rows[n]["prompt"] = prompt
    return runs.manifest(path, rows)


def ledger_of(out: Path) -> tuple[RunDirectory, Ledger]:
    run = RunDirectory(out)
    return run, Ledger(run.root, run.files, plan=run.index().token)


@pytest.mark.parametrize("kind", runs.FORMATS)
def test_a_run_of_each_format(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    assert runs.run(mixed(tmp_path / "m.parquet"), out, "--format", kind, *FAULTS).code == 3
    found = reported(out)
    files, lines = runs.images(out), runs.by_id(out)
    assert [card.texts["id"] for card in found.cards[:3]] == ["r03", "r07", "r11"]
    assert [card.texts["reason"].split(":")[0] for card in found.failed] == ["NotFinite", "Constant", "NotFinite"]
    assert [card.texts["id"] for card in found.made] == [line["id"] for line in runs.metadata(out)]
    for card in found.made:
        line = lines[card.texts["id"]]
        assert card.texts["prompt"] == line["prompt"]
        assert {name: card.texts[name] for name in ("seed", "steps", "width", "file_name", "source")} == {
            name: str(line[name]) for name in ("seed", "steps", "width", "file_name", "source")
        }
        assert thumbnail(codec.decode(files[line["file_name"]])) in found.source
        assert card.picture is not None
        assert card.picture.shape == (line["height"], line["width"], 3)
        assert card.link == (line["file_name"] if kind == "files" else None)
    assert "21images made 3failed 0rejected 0outstanding" in found.words("totals")
    assert re.search("NotFinite2(r03|r11) the latents hold NaN.+Constant1r07", found.words("failures"))
    assert found.words("failures").count("the latents hold NaN, as the prompt says") == 1
    assert "This run is finished; not every image was made." in found.source
    assert len({card.attributes["data-group"] for card in found.cards}) == 4
    assert found.addresses == []
    assert runs.batchgen("verify", out).code == 0


def test_hostile_values_are_escaped(tmp_path: Path) -> None:
    rows = [{"id": f"{n} {prompt[:80]}", "prompt": prompt, "own <i>": prompt} for n, prompt in enumerate(HOSTILE)]
    out = tmp_path / "<b>out & 'co'"
    assert runs.run(runs.manifest(tmp_path / "m.parquet", rows), out).code == 0
    found = reported(out)
    made = {card.texts["id"]: card for card in found.made}
    for row in rows:
        card = made[row["id"]]
        assert card.texts["prompt"] == card.texts["own <i>"] == row["prompt"]
    assert Counter(found.tags)["script"] == 1
    assert set(found.tags).isdisjoint({"i", "iframe", "object", "link", "base"})


def test_control_characters_are_shown_as_pictures(tmp_path: Path) -> None:
    source = runs.manifest(tmp_path / "m.parquet", [{"prompt": "bell\x07 escape\x1b[31m return\r del\x7f"}])
    assert runs.run(source, tmp_path / "out").code == 0
    (card,) = reported(tmp_path / "out").made
    assert card.texts["prompt"] == "bell␇ escape␛[31m return␍ del␡"


def test_a_very_long_prompt_is_cut_and_says_so(tmp_path: Path) -> None:
    source = runs.manifest(tmp_path / "m.parquet", [{"prompt": "x" * 1_000_000}])
    assert runs.run(source, tmp_path / "out").code == 0
    (card,) = reported(tmp_path / "out").made
    assert card.texts["prompt"] == "x" * 19_999 + "…"
    assert (tmp_path / "out" / "report.html").stat().st_size < 200_000


def test_the_values_of_a_card_have_bounds(tmp_path: Path) -> None:
    row = {"prompt": "a fox", **{f"own {n}": "y" * 15_000 for n in range(50)}}
    assert runs.run(runs.manifest(tmp_path / "m.parquet", [row]), tmp_path / "out").code == 0
    (card,) = reported(tmp_path / "out").made
    assert [len(card.texts[f"own {n}"]) for n in (0, 1, 3, 49)] == [15_000, 15_000, 1, 1]
    assert card.texts["own 2"].endswith("y…")
    assert (tmp_path / "out" / "report.html").stat().st_size < 200_000


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert runs.run(mixed(tmp_path / "m.parquet"), out, "--set", "plan.shard_images=6", *FAULTS).code == 3
    (out / "_SUCCESS").unlink()
    assert "not finalized" in reported(out).source
    run, ledger = ledger_of(out)
    lost = run.index().shards[-1]
    settled = ledger.state(lost).settled
    for slot in (ledger.receipt_path(lost, 0), ledger.claim_path(lost, 0)):
        slot.unlink()
    found = reported(out)
    assert f"This run is not finished: {len(settled)} images of 24 outstanding" in " ".join(found.source.split())
    assert f"{len(settled)}outstanding" in found.words("totals")
    assert len(found.cards) == 24 - len(settled)


def test_a_run_in_which_nothing_is_made_yet(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert runs.run(runs.prompts(tmp_path / "m.parquet", 3), out).code == 0
    for folder in ("receipts", "claims"):
        shutil.rmtree(out / ".run" / folder)
        (out / ".run" / folder).mkdir()
    found = reported(out)
    assert "3 images of 3 outstanding" in found.source
    assert "No part has recorded when it was made." in found.words("pace")
    assert found.cards == []


def test_several_workers(tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = runs.prompts(tmp_path / "m.parquet", 30, width=256, height=256)
    assert runs.run(source, out, "--workers", 2, "--set", "plan.shard_images=3").code == 0
    found = reported(out)
    run, ledger = ledger_of(out)
    receipts = list(ledger.committed(run.index().shards))
    processes = Counter({one.by.pid: 0 for one in receipts})
    for one in receipts:
        processes[one.by.pid] += len(one.ok)
    assert f"{len(processes)}worker start" in found.words("totals")
    for pid in processes:
        assert str(pid) in found.words("workers")
    assert sum(processes.values()) == 30


def test_rejected_rows_are_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a fox", "steps": 5}, {"prompt": "<i>", "steps": 0}]
    source = runs.manifest(tmp_path / "m.parquet", rows)
    assert runs.run(source, tmp_path / "out", "--on-bad-row", "skip").code == 3
    found = reported(tmp_path / "out")
    assert "1 rejected row" in found.words("failures")
    assert f"{source} row 1: steps = 0" in found.words("failures")


def test_damaged_pictures_and_row_tables_are_said_and_the_rest_is_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert runs.run(runs.prompts(tmp_path / "m.parquet", 6), out, *SMALL_SHARDS).code == 0
    lines = runs.metadata(out)
    (out / lines[0]["file_name"]).write_bytes(b"no image")
    (out / lines[0]["file_name"]).with_name("another.png").write_bytes(b"not asked for")
    (out / lines[1]["file_name"]).unlink()
    run, ledger = ledger_of(out)
    tables = {shard: pq.read_table(ledger.table_path(shard, 0)) for shard in run.index().shards}
    places = {shard: set(table["id"].to_pylist()) for shard, table in tables.items()}
    hurt = next(shard for shard, ids in places.items() if ids.isdisjoint({lines[0]["id"], lines[1]["id"]}))
    ledger.table_path(hurt, 0).write_bytes(b"no table")
    found = reported(out)
    cards = {card.texts["id"]: card for card in found.made}
    assert "damaged" in cards[lines[0]["id"]].texts["reason"]
    assert "does not hold it" in cards[lines[1]["id"]].texts["reason"]
    assert sum(card.picture is not None for card in found.made) == 6 - 2 - len(places[hurt])
    assert "cannot be read" in found.source
    assert places[hurt].isdisjoint(cards)


@pytest.mark.parametrize("kind", runs.FORMATS)
def test_rows_made_again_are_shown_and_counted_once(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    columns = {"id": [f"row-{n}" for n in range(5)], "prompt": [*(f"prompt {n}" for n in range(4)), "fault: nan"]}
    source = runs.manifest(tmp_path / "m.parquet", columns)
    assert runs.run(source, out, "--format", kind, "--set", "plan.batch_sizes=[8]", *FAULTS).code == 3
    if kind == "files":
        (out / runs.metadata(out)[1]["file_name"]).write_bytes(b"")
        assert runs.batchgen("verify", out, "--repair").code == 3
    assert runs.batchgen("retry", out).code == 3
    found = reported(out)
    assert [card.texts["id"] for card in found.cards] == ["row-4", *(f"row-{n}" for n in range(4))]
    assert all(card.picture is not None for card in found.made)
    assert "4images made 1failed 0rejected 0outstanding" in found.words("totals")
    assert "NotFinite1row-4" in found.words("failures")
    batches, padded = (3, 3 + 7 + 7) if kind == "files" else (2, 3 + 7)
    assert f"8{batches}54{padded}" in found.words("buckets")


def rewrite(ledger: Ledger, receipt: Receipt, without: tuple[str, ...]) -> None:
    """The receipt as a version wrote it that did not know some of its fields."""
    path = ledger.receipt_path(receipt.shard, receipt.epoch)
    content = json.loads(path.read_text())
    token = content.pop("token")
    del content["check"]
    path.unlink()
    path.write_bytes(sealed(token, {name: value for name, value in content.items() if name not in without}))


def test_receipts_of_versions_that_recorded_no_times(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert runs.run(runs.prompts(tmp_path / "m.parquet", 6), out, *SMALL_SHARDS).code == 0
    run, ledger = ledger_of(out)
    receipts = list(ledger.committed(run.index().shards))
    assert len(receipts) == 3
    assert all(0 < one.started_s <= one.ended_s for one in receipts)
    assert all(one.spent.stage_s["write"] > 0 for one in receipts)
    assert sum(one.spent.stage_s["paint"] for one in receipts) > 0
    new = ("started_s", "ended_s", "spent")
    rewrite(ledger, receipts[0], new)
    assert ledger.receipt(0, 0) == replace(receipts[0], started_s=0.0, ended_s=0.0, spent=Spent())
    assert "1 part of earlier versions" in reported(out).words("pace")
    for receipt in receipts[1:]:
        rewrite(ledger, receipt, new)
    found = reported(out)
    assert "No part has recorded when it was made." in found.words("pace")
    assert "No part has recorded its stages." in found.words("stages")
    assert len(found.made) == 6


def test_pictures_that_are_shown_are_few_and_of_every_group(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert runs.run(mixed(tmp_path / "m.parquet"), out, *FAULTS).code == 3
    for num in (0, 4, 9):
        found = reported(out, "--images", num)
        assert len(found.made) == num
        assert len({card.attributes["data-group"] for card in found.made}) == min(4, num)
        assert len(found.failed) == 3
        assert [card.texts["id"] for card in reported(out, "--images", num).cards] == [
            card.texts["id"] for card in found.cards
        ]


def test_the_page_may_lie_elsewhere(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert runs.run(runs.prompts(tmp_path / "m.parquet", 2), out).code == 0
    assert runs.batchgen("report", out, "-o", tmp_path / "page.html").code == 0
    assert [card.link for card in ReadPage(tmp_path / "page.html").made] == [None, None]


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = runs.batchgen("report", tmp_path)
    assert (ended.code, "is no run directory" in ended.err) == (2, True)
    monkeypatch.setattr(pages_module, "find_spec", lambda name: None if name == "matplotlib" else name)
    ended = runs.batchgen("report", tmp_path)
    assert (ended.code, ended.err.strip().endswith("pip install matplotlib")) == (2, True)


def test_padding_is_what_the_planner_counted(tmp_path: Path) -> None:
    columns = {
        "prompt": [f"p{n}" for n in range(90)],
        "width": [64 if n % 3 else 128 for n in range(90)],
        "steps": [5 + n * 7 % 30 for n in range(90)],
        "sampler": ["heun" if n % 5 == 0 else "ddim" for n in range(90)],
        "image": [encoded(64, 64) if n % 4 == 0 else None for n in range(90)],
        "strength": [0.2 + n % 8 / 10 if n % 4 == 0 else None for n in range(90)],
    }
    overrides = ("plan.batch_sizes=[4, 16]", "plan.shard_images=13")
    cut = plans.planned(tmp_path, columns, overrides=overrides).draft.cut
    frozen = plans.frozen(tmp_path, columns, overrides=overrides)
    run = frozen.run
    counts = count_plan(
        frozen.index,
        PlanReader(run.plans, frozen.index),
        Ledger(run.root, run.files),
        facts.PATTERN.evaluations,
    )
    assert sum(one.batches for one in counts.buckets.values()) == len(cut.batch_size)
    assert sum(one.padded for one in counts.buckets.values()) == int(cut.batch_padding.sum()) > 0
    idle = int(cut.idle_evaluations.sum() + (cut.batch_padding * cut.batch_evaluations).sum())
    assert sum(one.lane_evaluations - one.evaluations for one in counts.buckets.values()) == idle > 0
    assert counts.planned == sum(one.images for one in counts.buckets.values()) == 90
    assert counts.made == counts.failed == 0


def test_groups_of_an_appended_plan_count_with_those_before(tmp_path: Path) -> None:
    columns = {"prompt": ["a", "b"], "width": [64, 96]}
    source, out = runs.manifest(tmp_path / "m.parquet", columns), tmp_path / "out"
    assert runs.run(source, out).code == 0
    runs.manifest(source, {"prompt": ["a", "b", "c"], "width": [64, 96, 64]})
    assert runs.run(source, out, "--extend").code == 0
    offered = re.findall(r'<option value="\d+">([^<]+)<', reported(out).source)
    assert offered == ["96×64, guided", "64×64, guided"]


def test_groups_are_told_apart_by_their_labels() -> None:
    plain = Group(64, 64, True, 77, "x,e")
    own = replace(plain, form="", sampler="LCMScheduler", steps=4)
    groups = [
        *(plain, replace(plain, width=96), replace(plain, is_guided=False), replace(plain, lora="a set")),
        *(own, replace(own, steps=8), replace(own, skipped=2), replace(plain, text_length=64, negative_length=32)),
    ]
    labels = group_labels(groups)
    assert len(set(labels)) == len(groups)
    assert labels[3] == "64×64, guided, form x,e, LoRA set a set"
    assert group_labels(groups[:1]) == ["64×64, guided"]


@given(st.lists(st.integers(0, 400), max_size=30), st.integers(0, 300))
def test_quotas_are_fair(counts: list[int], most: int) -> None:
    shares = quotas(dict(enumerate(counts)), most)
    assert sum(shares.values()) <= most
    assert all(0 < share <= counts[kind] for kind, share in shares.items())
    there = sum(count > 0 for count in counts)
    assert len(shares) == min(there, most)
    if sum(counts) <= most:
        assert shares == {kind: count for kind, count in enumerate(counts) if count}


def test_a_sample_does_not_depend_on_the_order_and_lies_evenly() -> None:
    def sampled(positions: np.ndarray, step: int) -> list[int]:
        sample: Sample[str] = Sample(lambda kind: 50)
        for start in range(0, len(positions), step):
            sample.add("a", pa.table({"position": pa.array(positions[start : start + step], pa.uint64())}))
        ((_, kept),) = sample.kinds()
        return sorted(kept["position"].to_pylist())

    positions = np.arange(10_000, dtype=np.uint64)
    found = sampled(positions, 999)
    assert found == sampled(np.random.default_rng(1).permutation(positions), 7)
    assert len(found) == 50
    assert max(np.diff([0, *found, 10_000])) < 3 * 10_000 / 50


def test_a_sample_holds_no_more_than_it_shows() -> None:
    sample: Sample[str] = Sample(lambda kind: 50)
    before = pa.total_allocated_bytes()
    for start in range(0, 200_000, 2000):
        rows = {"position": pa.array(range(start, start + 2000), pa.uint64()), "prompt": ["x" * 1000] * 2000}
        sample.add("a", pa.table(rows))
    del rows
    assert pa.total_allocated_bytes() - before < 1_000_000


def epoch(started_s: float, ended_s: float, pid: int = 1, **spent: Any) -> Receipt:
    owner = replace(this_process(), token=f"{pid:016x}", pid=pid)
    return Receipt(
        COMMITTED,
        0,
        0,
        owner,
        versions={"device": "GPU $1$"},
        started_s=started_s,
        ended_s=ended_s,
        spent=Spent(**spent),
    )


def test_pace_keeps_all_images_and_leaves_breaks_out() -> None:
    spending = Spending()
    for number in range(10):
        spending.add(epoch(1000 + 10 * number, 1010 + 10 * number, pid=number % 2), 40)
    spending.add(epoch(90_000, 90_100, pid=3), 100)
    spending.add(epoch(90_050, 90_050, pid=3), 1)
    spending.add(epoch(90_060, 90_020, pid=3), 5)
    found = pace(spending)
    assert found is not None
    assert found.work_s == 200
    assert (found.breaks_s, found.cut_s) == ([100], 90_000 - 1100)
    width = found.edges_s[1] - found.edges_s[0]
    assert sum(rates.sum() for rates in found.rates.values()) * width == pytest.approx(506)
    assert found.total[:40] == pytest.approx(4.0)
    for kind, svg in {**pace_plots(found), **stage_plots({"denoise": 5.0, "decode <&>": 0.0})}.items():
        assert kind in ("wide", "narrow")
        assert svg.startswith("<svg ")
        assert "#0" not in svg.replace('"#0', ""), "a stand-in colour was left"


def test_a_clock_that_was_set_back_costs_no_image() -> None:
    spending = Spending()
    spending.add(epoch(90_060, 90_020), 5)
    found = pace(spending)
    assert found is not None
    assert found.work_s >= 0
    assert found.total.sum() * found.edges_s[1] == pytest.approx(5)
    assert spending.busy_s(0) == 0


def test_captures_and_memory_are_summed() -> None:
    one = Captured("64x64, batch 8", "graph", 2.0, 0.5, 10_000_000)
    spending = Spending()
    spending.add(epoch(0.5, 1, stage_s={"denoise": 1.0}, captures=(one,), peak_bytes=5, device_bytes=10), 1)
    spending.add(epoch(1, 2, stage_s={"denoise": 2.0}, captures=(one, one), peak_bytes=7, device_bytes=10), 1)
    (found,) = spending.captures.values()
    assert (found.count, found.seconds, found.compile_s, found.held_bytes) == (3, 6.0, 1.5, 10_000_000)
    assert spending.memory == {"GPU $1$": (7, 10)}
    assert spending.stage_s == {"denoise": 3.0}


def test_spent_is_counted_from_the_last_receipt() -> None:
    one, two = Captured("a", "graph", 1.0, 0.0, 1), Captured("b", "graph", 1.0, 0.0, 1)
    before = Spent({"denoise": 1.0}, (one,), 5, 10)
    now = Spent({"denoise": 3.5, "text": 1.0}, (one, two), 8, 10)
    assert now.since(before) == Spent({"denoise": 2.5, "text": 1.0}, (two,), 8, 10)


def test_thumbnails_are_small() -> None:
    noise = np.random.default_rng(1).integers(0, 256, (1024, 2048, 3), dtype=np.uint8)
    small = thumbnail(noise)
    assert len(small) < 120_000
    flat = thumbnail(np.full((8, 8, 3), 90, np.uint8))
    assert len(flat) < 400
    with Image.open(io.BytesIO(base64.b64decode(small.split(",")[1]))) as image:
        assert image.size == (THUMBNAIL, THUMBNAIL // 2)


@pytest.mark.parametrize(
    ("number", "text"), [(0.00312, "0.00312"), (7, "7"), (12.345, "12.3"), (99.96, "100"), (191234.5, "191,234")]
)
def test_rates_are_written_without_exponents(number: float, text: str) -> None:
    assert tables.rate(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (99, "99 s"), (100, "2 min"), (7100, "118 min"), (11_100, "3 h 05 min")]
)
def test_times_are_written_in_units_that_fit(seconds: float, text: str) -> None:
    assert tables.lasting(seconds) == text
