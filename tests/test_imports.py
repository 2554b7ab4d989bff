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
        "models/aura.py",
        "models/dit.py",
        "models/family.py",
        "models/flow.py",
        "models/flux.py",
        "models/flux2.py",
        "models/hunyuan.py",
        "models/kolors.py",
        "models/latent.py",
        "models/loaders.py",
        "models/loading.py",
        "models/lumina2.py",
        "models/pixart.py",
        "models/sana.py",
    ),
    *("models/sd.py", "models/sd3.py", "models/sdxl.py", "models/unet.py"),
    *("models/chroma.py", "models/cogview4.py", "models/qwen_image.py", "models/varying.py"),
    "models/z_image.py",
    *("models/safety.py", "models/tokens.py", "models/transfer.py"),
    *("bench/baselines.py", "bench/building.py", "bench/evaluations.py", "bench/images.py", "bench/modes.py"),
    *("bench/ours.py", "bench/surroundings.py", "bench/traces.py", "bench/watch.py"),
)
"""The only places that may import torch, diffusers or transformers."""
LAYERS = [
    line.split()
    for line in """
    errors version wording streams slurm.environment timeleft schedule ranges doctor.torch_probe pace records infotext
    jobs.files slots cores letters models.lengths models.hashes models.transfer names models.demo.vocabulary models.demo
    reporting.sample spill engine.graphs engine.norms engine.activations stopping bench.workload bench.figures chunks
    slurm.programs doctor.findings fields filesystem owners gpus cost models.safety models.facts columns sources.base
    template models.demo.scenes models.demo.sprites models.demo.words models.signatures engine.attention engine.checking
    progress targets bench.architectures bench.traces bench.surroundings models.checkpoints models.reading
    slurm.task refilling manifest_files disk metadata carried models.demo.captions models.demo.drawing models.demo.judge
    models.demo.networks pictures models.unet_facts models.flow_facts models.family identity ledger costs sizes
    sources.cells engine.meter doctor.machine weights
    job models.demo.training manifest known plan_index glance selection reporting.spending init_images models.latent
    formats card axes engine.crossing engine.samplers modes sources.hub sources.jsonlines sources.tables heart
    differences models.dit_facts models.lora_files
    options generator codec jobs.origins strengths encoders slurm.script memory models.layouts models.demo.autoencoder
    models.demo.denoiser models.flow parts expansion engine.compiling balance reporting.plots models.dit
    models.pattern checks limits planner sharing engine.devices writer engine.denoise making models.generic
    bench.building models.demo.train models.varying engine.forecasts product models.replacing
    identified duplicates rejections engine.room engine.relay models.hub models.contents engine.tuning importer
    models.unchanged models.packages models.unet engine.compiled_network
    engine.loras models.fitting engine.decode engine.steps models.loading models.completeness models.footprint
    engine.safety models.folder models.sd models.sdxl models.sd3 models.flux models.flux2 models.qwen_image
    models.z_image engine.residence models.aura models.hunyuan models.lumina2 models.pixart models.sana models.kolors
    models.tokens models.chroma models.cogview4 engine.prompts doctor.model bench.baselines models.fetching
    survey models.loaders
    engine.engine
    truncation drafts notes engine.whole bench.evaluations bench.watch
    plans report bench.modes planned
    plan_reader saying
    rundir reporting.plan_counts prefetch importing jobs.commands bench.plan
    marker publish starts presence doctor.work slurm.submit
    mending appending watching epoch bench.victims
    sweeping reporting.rows worker bench.siege
    finalize verify reporting.cards
    repairing sheet reporting.findings runner bench.aftermath
    reporting.tables launched bench.long bench.ours bench.soak slurm.commands console doctor.commands
    reporting.page children bench.images
    reporting.writing launcher
    bench.killing reporting.commands
    bench.workers
    bench.commands
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
