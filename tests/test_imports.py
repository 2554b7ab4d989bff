"""What a login node must not need, and the one direction of imports."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import batchgen
from tests import runs
from tests.slurm.fakes import Fakes

PACKAGE = Path(batchgen.__file__).parent
HEAVY = ("torch", "diffusers", "transformers", "datasets")
WITH_TORCH = (
    *(
        "engine/",
        "models/demo/",
        "models/family.py",
        "models/flow.py",
        "models/flux.py",
        "models/flux2.py",
        "models/latent.py",
        "models/loading.py",
    ),
    *("models/sd.py", "models/sd3.py", "models/sdxl.py", "models/unet.py"),
    *("models/safety.py", "models/tokens.py", "models/transfer.py"),
    *("bench/baselines.py", "bench/building.py", "bench/evaluations.py", "bench/images.py", "bench/modes.py"),
    *("bench/ours.py", "bench/surroundings.py", "bench/traces.py", "bench/watch.py"),
)
"""The only places that may import torch, diffusers or transformers."""
LAYERS = [
    line.split()
    for line in """
    errors version wording streams slurm.environment timeleft schedule ranges doctor.torch_probe pace
    records slurm.programs infotext jobs.files doctor.findings
    weights
    job filesystem owners slots slurm.task options cores gpus
    cost models.safety refilling
    generator manifest_files models.facts models.hashes models.transfer disk columns names codec metadata carried
    sources.base template
    models.demo.vocabulary models.demo.scenes models.demo.captions models.demo.sprites models.demo.drawing
    models.demo.judge models.demo models.demo.words models.demo.networks models.demo.training models.demo.autoencoder
    models.demo.denoiser models.demo.train
    models.reading models.signatures models.lora_files models.flow_facts models.layouts
    models.replacing models.generic models.hub models.family models.pattern
    models.folder models.fetching jobs.origins identity ledger manifest costs known plan_index glance
    selection reporting.sample reporting.spending
    models.tokens models.latent models.loading models.unet models.sd models.sdxl models.flow models.sd3 models.flux
    models.flux2 checks identified planner spill encoders formats parts card sources.cells axes expansion
    engine.attention engine.chunks engine.crossing engine.devices engine.graphs engine.norms engine.samplers rejections
    survey writer modes sources.hub sources.jsonlines
    engine.checking engine.compiling engine.denoise engine.forecasts engine.meter engine.room
    engine.loras
    product engine.prompts engine.tuning sources.tables heart engine.relay engine.decode truncation drafts plans
    plan_reader engine.safety engine.steps notes
    engine.engine engine.whole balance differences progress stopping importer
    rundir making
    marker publish report starts presence reporting.plots reporting.plan_counts
    mending appending sweeping doctor.machine doctor.model watching
    epoch finalize verify
    repairing sheet reporting.rows
    reporting.cards
    reporting.findings
    reporting.tables
    reporting.page
    reporting.writing
    worker saying slurm.script doctor.work
    runner slurm.submit bench.workload bench.figures
    launched
    children
    launcher
    bench.plan bench.long bench.architectures bench.building bench.evaluations bench.traces bench.watch
    bench.surroundings bench.killing
    bench.ours bench.baselines bench.modes
    bench.images bench.victims bench.workers
    bench.siege bench.aftermath
    bench.soak
    bench.commands slurm.commands reporting.commands console prefetch importing jobs.commands doctor.commands
    cli
    """.strip().splitlines()
]
"""A module imports from its own layer and those above it in this list, never from one below, nor in a circle."""
UNLAYERED = {"", "bench", "models", "doctor", "engine", "jobs", "reporting", "slurm", "sources", "__main__"}
"""The API, which is the command line's equal, and empty packages."""
MOST_LINES = 350
LATE = {"generator": {"models.pattern", "engine.whole"}}
"""What opens a model imports it by name when it is asked for."""


def modules() -> dict[str, Path]:
    return {
        str(path.relative_to(PACKAGE).with_suffix("")).replace("/", ".").removesuffix("__init__").rstrip("."): path
        for path in PACKAGE.rglob("*.py")
    }


def imported(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in the file, but for types only."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize(
    "command",
    ["--help", "import", "plan", "submit", "status", "verify", "finalize", "sheet", "report", "job", "doctor"],
)
def test_commands_that_need_no_torch(tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Fakes(tmp_path / "bin", monkeypatch)
    source, csv = runs.prompts(tmp_path / "m.parquet", 3), tmp_path / "m.csv"
    csv.write_text("prompt\na fox\n", encoding="utf-8")
    assert runs.run(source, tmp_path / "out").code == 0
    own = {
        "--help": [],
        "plan": [source],
        "submit": [source, "-o", tmp_path / "new"],
        "job": ["show"],
        "doctor": ["pattern"],
        "import": [csv, "-o", tmp_path / "imported.parquet"],
    }
    target = map(str, own.get(command, [tmp_path / "out"]))
    code = (
        "import atexit, sys\n"
        f"sys.argv = {['batchgen', command, *target]!r}\n"
        f"atexit.register(lambda: print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules]))\n"
        "from batchgen.cli import main\nmain()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "HEAVY []"


def test_only_engine_models_and_bench_import_torch() -> None:
    for name, path in modules().items():
        place = str(path.relative_to(PACKAGE))
        heavy = {one.split(".")[0] for one in imported(path)} & {"torch", "diffusers", "transformers"}
        assert not heavy or place.startswith(WITH_TORCH), f"{name} imports {heavy}"


def test_imports_go_one_way() -> None:
    layer = {name: depth for depth, names in enumerate(LAYERS) for name in names}
    known = modules()
    assert sorted(layer) == sorted(known.keys() - UNLAYERED)
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        targets = {one.removeprefix("batchgen.") for one in imported(path)} & layer.keys() - {name}
        if name in layer:
            graph[name] = targets - LATE.get(name, set())
            for one in graph[name]:
                assert layer[one] <= layer[name], f"{name} imports {one}, which stands below it"
    graphlib.TopologicalSorter(graph).prepare()


def test_modules_are_short() -> None:
    """Long ones do two jobs."""
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
