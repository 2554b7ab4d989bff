"""What the README and its pages promise that can be held here; `.ci/run` runs its two commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import DatasetCard

from batchgen.cli import cli
from batchgen.cost import load_profile
from batchgen.job import load_job
from batchgen.models import facts
from tests import runs
from tests.documents import ALL, PAGES, README
from tests.hub import serving


def block(language: str, page: str = README) -> str:
    """The one block of a language that is no recipe."""
    (text,) = re.findall(rf"(?<!-->)\n```{language}\n(.+?)```", page, re.DOTALL)
    return str(text)


def figures(name: str) -> Any:
    """What a bench wrote."""
    return json.loads((runs.ROOT / "tests" / "figures" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["run", "test"])
def test_command_is_one_line(name: str) -> None:
    found = re.findall(rf"<!-- command: {name} -->\n```bash\n(.+)\n```\n<!-- end -->", README)
    assert len(found) == 1


def test_the_chain_of_all_commands_and_the_python_code_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command on what the one before made; then the Python code, which finds the run done."""
    (chain,) = re.findall(r"<!-- chain -->\n```bash\n(.+?)```", README, re.DOTALL)
    first, *commands = chain.splitlines()
    monkeypatch.chdir(tmp_path)
    subprocess.run(["bash", "-euo", "pipefail", "-c", first], check=True)
    ended = [runs.batchgen(*shlex.split(line.removeprefix("batchgen "))) for line in commands]
    assert [one.code for one in ended] == [0] * len(commands), ended
    assert {line.split()[1] for line in commands} == cli.commands.keys() - {"bench", "prefetch"}
    assert len(runs.check_images(tmp_path / "out")) == 2
    code = subprocess.run(
        [sys.executable, "-c", block("python")],
        env={"PYTHONPATH": str(runs.ROOT), "PATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    closing_line = "2 rows = 2 done + 0 failed + 0 rejected + 0 outstanding"
    assert code.stdout.splitlines() == ["2 images ()", f"{closing_line} 0"], code.stderr
    assert ended[-1].closing_line == closing_line


RECIPES = re.findall(r"<!-- recipe: (\w+) -->\n```python\n(.+?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(4))
def test_recipes_read_a_run_with_the_libraries_themselves(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    seeds, widths, texts = [2**64 - 1, 2**53 + 1, 5], [64, 72, 80], ["prompt 0", "prompt 1", "prompt 2"]
    columns = {"id": ["a", "b", "c"], "prompt": texts, "seed": pa.array(seeds, pa.uint64()), "width": widths}
    source = runs.manifest(tmp_path / "m.parquet", columns | {"height": [64] * 3})
    output, code = RECIPES[number]
    assert runs.run(source, Path("out"), "--format", output).code == 0
    found: dict[str, Any] = {}
    exec(code, found)
    if "rows" in found:
        pairs = [(one["image"].size, one["prompt"]) for one in found["rows"]]
    elif "images" in found:
        pairs = [(found["images"][n][0].size, found["images"][n][1]["prompt"]) for n in range(len(found["images"]))]
    elif "pairs" in found:
        pairs = found["pairs"]
    else:
        ((_, count, most),) = found["counts"].fetchall()
        assert (count, most) == (3, 2**64 - 1)
        assert found["table"]["seed"].tolist() == seeds
        assert len(found["long"]) == 0
        return
    assert sorted(pairs) == [((width, 64), text) for width, text in zip(widths, texts, strict=True)]


def test_every_recipe_is_tried() -> None:
    assert len(RECIPES) == 4 == README.count("<!-- recipe:")


UPLOAD = """
import os, shutil, sys
from datasets import load_dataset
for name in {formats}:
    os.chdir(name)
    exec(sys.argv[1])
    for streaming in (False, True):
        rows = list(load_dataset("me/foxes", split="train", streaming=streaming))
        print(name, sorted((row.get("json") or row)["prompt"] for row in rows))
    os.chdir("..")
    os.replace("hub", f"uploaded-{{name}}")
    os.mkdir("hub")
"""


def test_a_run_of_any_format_is_uploaded_with_its_card_and_opens_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe,) = re.findall(r"<!-- upload -->\n```python\n(.+?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub").mkdir()
    source = runs.manifest(tmp_path / "m.parquet", {"prompt": ["a", "b"], "width": [64, 72], "height": [64, 64]})
    for name in runs.FORMATS:
        (tmp_path / name).mkdir()
        assert runs.run(source, Path(name, "out"), "--format", name).code == 0
    with serving(tmp_path / "hub", "me/foxes", kind="dataset") as hub:
        ended = subprocess.run(
            [sys.executable, "-c", UPLOAD.format(formats=runs.FORMATS), recipe],
            env={**os.environ, **hub.environment(tmp_path / "home"), "HF_TOKEN": "hf_of_nobody"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    wanted = [f"{name} ['a', 'b']" for name in runs.FORMATS for _ in range(2)]
    assert ended.stdout.splitlines() == wanted, ended.stderr
    for name in runs.FORMATS:
        ours, uploaded = tmp_path / name / "out", tmp_path / f"uploaded-{name}"
        files = {str(one.relative_to(uploaded)) for one in uploaded.rglob("*") if one.is_file()}
        assert files == {"README.md", "_SUCCESS", "metadata.parquet", "failures.parquet"} | {
            str(one.relative_to(ours)) for one in (ours / "data").rglob("*") if one.is_file()
        }
        card = DatasetCard.load(uploaded / "README.md")
        assert card.data.license == "cc0-1.0"
        assert card.data.to_dict().items() >= DatasetCard.load(ours / "README.md").data.to_dict().items()
        assert card.text.startswith("# out\n\n2 images made by batchgen")


def test_the_expansion_does_what_its_section_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGES["manifests/README.md"]
    (one_line,) = re.findall(r"<!-- one line -->\n```bash\n(.+?)\n```", README)
    (commands,) = re.findall(r"<!-- expansion -->\n```bash\n(.+?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for line in (one_line.replace("foxes.parquet", "few.parquet"), *commands.splitlines()):
        if line.startswith("batchgen"):
            ended = runs.batchgen(*shlex.split(line.removeprefix("batchgen ")))
            assert ended.code == 0, ended.err
        else:
            subprocess.run(["bash", "-euc", line], check=True)
    few, foxes, grid = (pq.read_table(f"{name}.parquet") for name in ("few", "foxes", "grid"))
    assert (few.num_rows, foxes.num_rows, grid.num_rows) == (2 * 2 * 2, 3 * 2 * 2 * 2, 2 * 2 * 3 * 3)
    assert foxes["prompt"][0].as_py() == "a red fox, oil painting"
    (named,) = re.findall(r"such as `(cat-07_\S+)`:", page)
    assert named in grid["id"].to_pylist()
    assert grid["prompt"][0].as_py() == "a cat on a sofa, film photo"


def test_job_file_loads(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(block("toml"), encoding="utf-8")
    job = load_job(tmp_path / "job.toml")
    assert (job.output.format, job.columns["prompt"]) == ("webdataset", "caption")


def test_job_with_loras_loads(tmp_path: Path) -> None:
    (text,) = re.findall(r"<!-- loras -->\n```toml\n(.+?)```", PAGES["jobs/README.md"], re.DOTALL)
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    job = load_job(tmp_path / "job.toml")
    assert job.model.vae
    assert job.sampling.lora in job.model.loras or job.sampling.lora is None


def test_profile_loads(tmp_path: Path) -> None:
    shown = block("json", PAGES["jobs/README.md"])
    (tmp_path / "profile.json").write_text(shown, encoding="utf-8")
    assert len(load_profile(tmp_path / "profile.json").measurements) == len(json.loads(shown)["measurements"])


def test_samplers_are_named() -> None:
    (named,) = re.findall(r"\nSamplers: (.+?)\n\n", README, re.DOTALL)
    known = set(re.findall(r"`(\w+)`", named)) - {"SCHEDULERS"}
    assert known - set(facts.SCHEDULERS) == facts.SAMPLERS.keys()
    assert f"all {len(facts.SCHEDULERS)})" in named


def test_every_path_that_is_named_exists() -> None:
    named = set(re.findall(r"\b(?:manifests|jobs|batchgen)/[\w./]*\w", ALL.replace("~/.cache/batchgen", "")))
    assert len(named) >= 3
    assert [path for path in named if not (runs.ROOT / path).exists()] == []


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_to_a_page_leads_there(name: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", PAGES[name])
    for path, anchor in links:
        page = (runs.ROOT / name).parent / path if path else runs.ROOT / name
        assert page.exists(), path
        assert not anchor or anchor in anchors(page), f"{path}#{anchor}"


def test_reliability_is_what_the_figures_say() -> None:
    soaked = figures("soak")
    record = json.loads((runs.ROOT / "tests/simulation/searches.json").read_text())
    by_signal = {name: sum(places.values()) for name, places in soaked["kills_by_signal"].items()}
    at_steps = sum(places["step"] for places in soaked["kills_by_signal"].values())
    assert (soaked["rows_lost"], soaked["rows_doubled"], soaked["rows_differing"], soaked["problems"]) == (0, 0, 0, [])
    faults = sum(sum(one["troubles"].values()) for one in record["searches"])
    schedules = sum(one["schedules"] for one in record["searches"])
    for text in (
        f"| {faults:,} in {schedules:,} schedules | {soaked['kills']:,} kills in {soaked['run_directories']} run dir",
        f"SIGKILL ({by_signal['SIGKILL']}), SIGTERM ({by_signal['SIGTERM']}), SIGSTOP for longer than others wait "
        f"({by_signal['SIGSTOP']}); {at_steps} of them at a step",
        f"| rows lost | 0 | 0 of {soaked['rows']:,} |",
        f"| | {soaked['most_rows_uncommitted']} rows, within",
        f"| {len(record['planted'])} | 1 |",
    ):
        assert text in README, text


def test_speed_is_what_the_figures_say() -> None:
    names = ("sd15", "sdxl")
    both = [figures(f"images-{name}") for name in names]
    ours = [one["batchgen"] for one in both]
    peers = [{peer["name"]: peer for peer in one["baselines"]} for one in both]
    idle, used = [one["idle"]["idle_share"] for one in both], [one["compute"]["utilisation"] for one in both]
    assert [(one["images"], one["failed"]) for one in ours] == [(1000, 0), (200, 0)]
    assert [one["modes"] for one in ours] == [{"compiled+graph": 1000}, {"compiled+graph": 200}]
    assert {peer["batch_size"] for one in peers for name, peer in one.items() if name != "loop"} == {32}
    assert [one["best"]["calls"] for one in peers] == [one["compiled"]["calls"] for one in peers] == [6, 1]
    for row in (
        [f"{one['steady_images_per_s']:.2f}" for one in ours],
        [f"{one['cold_images_per_s']:.2f}" for one in ours],
        [f"{one['best']['images_per_s']:.2f}" for one in peers],
        [f"{one['compiled']['images_per_s']:.2f}" for one in peers],
        [f"{peers[0]['loop']['images_per_s']:.2f}", ""],
    ):
        assert f" | {row[0]} | {row[1]}".rstrip() in README, row
    text = " ".join(README.split())
    assert "warming up took {:.0f} s".format(ours[0]["warm_up_s"]) in text
    assert f"idles {100 * idle[0]:.1f} % and {100 * idle[1]:.1f} % of the steady time" in text
    assert f"does {100 * used[0]:.0f} % and {100 * used[1]:.0f} % of what it does in a large matrix product" in text


def test_speed_of_other_work_is_what_the_figures_say() -> None:
    one, mixed, sd3 = (figures(f"images-{name}") for name in ("sd15-one", "sd15-mixed", "sd3"))
    peers = {peer["name"]: peer["images_per_s"] for found in (one, mixed, sd3) for peer in found["baselines"]}
    for found, peer in ((one, "loop"), (mixed, "exact"), (mixed, "sized"), (sd3, "best"), (sd3, "compiled")):
        ours = found["batchgen"]["steady_images_per_s"]
        assert re.search(rf"\| {ours:.2f} \| {peers[peer]:.2f}[^|]* \| {ours / peers[peer]:.2f} times \|", README)
    assert mixed["batchgen"]["padded_rows_share"] == 0
    assert f"for {mixed['batchgen']['idle_row_steps_share']:.1%} of the steps".replace("%", " %") in README


def test_memory_of_many_buckets_is_what_the_figures_say() -> None:
    found = figures("captured-sd15")
    assert len(found["held"]) == 40
    assert found["over_largest_bytes"] == 0
    assert f"the largest size alone, {found['held'][0]['reserved_bytes'] / 1e9:.1f} GB" in " ".join(README.split())


def test_the_demo_model_is_as_good_as_its_figures_say() -> None:
    found = figures("demo")
    shares = [round(100 * found[name]["share"]) for name in ("background", "shapes", "common_emoji")]
    assert found["pictures"] == 1000
    assert (shares[0] >= 97, shares[1] >= 90, shares[2] >= 85) == (True, True, True)
    text = "background right in {} %, shapes in {} % and the 300 commonest emoji in {} %".format(*shares)
    assert text in " ".join(README.split())


def test_speed_of_two_gpus_is_what_the_figures_say() -> None:
    sd15, sdxl = (figures(f"workers-{name}") for name in ("sd15", "sdxl"))
    assert (sd15["has_same_pixels"], sdxl["has_same_pixels"], sd15["loss"]["has_same_pixels"]) == (True, True, True)
    assert sd15["loss"]["images"] == sd15["workload"]["rows"]
    assert f"make {sd15['speedup']:.2f} times (SD1.5, 600 images" in README
    assert f"and {sdxl['speedup']:.2f} times (SDXL, {sdxl['workload']['rows']} images" in README
    assert f"by SIGKILL after {sd15['loss']['killed_after']} images" in " ".join(README.split())


def test_a_long_run_is_as_flat_as_its_figures_say() -> None:
    found = figures("long")
    memory = found["most_own_bytes"] / found["own_bytes"] - 1
    first, last = found["first_rows_s"], found["last_rows_s"]
    assert found["rows"] == 200_000
    assert (memory <= 0.05, last >= 0.9 * first, found["restart_s"] < 5) == (True, True, True)
    text = " ".join(README.split())
    assert f"grows by {memory:.1%} after".replace("%", " %") in text
    assert f"{last:.0f} rows a second in the last tenth and {first:.0f} in the first" in text
    assert f"claim after {found['restart_s']:.1f} s" in text
