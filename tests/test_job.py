"""Job files and --set: every key, and one sentence for each mistake."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from batchgen import job as job_module
from batchgen.errors import UsageError
from batchgen.job import Job, load_job
from batchgen.jobs.origins import toml

VALUES: dict[str, Any] = {
    "model.path": "a folder/of mine",
    "model.revision": "main",
    "model.variant": "fp16",
    "model.dtype": "bfloat16",
    "model.vae_dtype": "float32",
    "model.config": "owner/name",
    "model.vae": "a vae/of mine",
    "model.scheduler": "LCMScheduler",
    "model.scheduler_options": {"timestep_spacing": "trailing", "steps_offset": 1},
    "model.loras": {"a b": [{"path": "p.safetensors", "weight_name": None, "revision": "main", "scale": 0.5}]},
    "sampling.lora": "a b",
    "sampling.width": 768,
    "sampling.height": 512,
    "sampling.steps": 30,
    "sampling.guidance_scale": 3.5,
    "sampling.true_cfg_scale": 4.0,
    "sampling.strength": 0.5,
    "sampling.negative_prompt": "blurry, \"bad\"",
    "sampling.sampler": "heun",
    "sampling.seed": 2**64 - 1,
    "sampling.num_images": 4,
    "plan.batch_sizes": [1, 3, 8],
    "plan.max_batch": 16,
    "plan.shard_images": 100,
    "plan.profile": "profile.json",
    "plan.size_policy": "round",
    "plan.on_bad_row": "skip",
    "plan.image_folder": "my pictures",
    "plan.on_truncate": "error",
    "engine.mode": "graph",
    "engine.attention": "cudnn",
    "engine.text_encoder": "offload",
    "engine.max_memory": "24GB",
    "engine.vae_tiling": True,
    "engine.safety_checker": True,
    "engine.device": "cuda:1",
    "engine.decode_batch": 2,
    "output.format": "webdataset",
    "output.image": "webp",
    "output.quality": 80,
    "output.embed": False,
    "output.encoders": 3,
    "output.png_info": True,
    "run.grace_s": 12.5,
    "run.commit_every_s": 60,
    "run.stale_after_s": 0.5,
    "run.max_deaths": 1,
    "slurm.partition": "gpu",
    "slurm.account": "project",
    "slurm.time": "1-12:30",
    "slurm.gres": "gpu:h200:1",
    "slurm.constraint": "nvme&h200",
    "slurm.cpus": 8,
    "slurm.memory": "64G",
    "slurm.nodes": 2,
    "slurm.tasks": 100,
    "slurm.throttle": 10,
    "slurm.modules": ["cuda/12.8"],
    "slurm.setup": ["source venv/bin/activate"],
    "slurm.container": "apptainer exec --nv image.sif",
    "slurm.program": "batchgen",
    "slurm.launcher": "shell",
    "slurm.warn_s": 60,
    "slurm.wait": True,
    "slurm.requeue": True,
    "slurm.cache": "/scratch/me/cache",
    "slurm.options": ["--qos=long"],
    "slurm.finish_partition": "cpu",
    "slurm.finish_time": "02:00:00",
    "slurm.finish_options": ["--mem=4G"],
}  # fmt: skip
"""One value of every key that is not its default."""
NAMED = ("path", "config", "revision", "variant", "vae", "scheduler")


def keys() -> Iterator[str]:
    for table, field in Job.model_fields.items():
        if table != "columns":
            assert isinstance(field.annotation, type)
            assert issubclass(field.annotation, BaseModel)
            yield from (f"{table}.{key}" for key in field.annotation.model_fields)


def value_at(job: Job, name: str) -> Any:
    table, key = name.split(".")
    return job.model_dump(mode="json")[table][key]


def test_every_key_is_tried() -> None:
    assert set(VALUES) == set(keys())


@pytest.mark.parametrize("name", VALUES)
def test_every_key_is_set_by_file_and_by_option_alike(name: str, tmp_path: Path) -> None:
    table, key = name.split(".")
    wanted = VALUES[name]
    path = tmp_path / "job.toml"
    path.write_text(f"[{table}]\n{key} = {toml(VALUES[name])}\n", encoding="utf-8")
    assert value_at(load_job(path), name) == wanted != value_at(load_job(), name)
    assert load_job(None, [f"{name}={toml(VALUES[name])}"]) == load_job(path)
    if isinstance(VALUES[name], str):
        assert load_job(None, [f"{name}={VALUES[name]}"]) == load_job(path)
    assert load_job(path, [f"{name}={toml(VALUES[name])}", "columns.prompt=caption"]).columns == {"prompt": "caption"}


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ('columns."my prompt"=text', ("columns", "my prompt")),
        ("columns.'a.b'=text", ("columns", "a.b")),
        ("columns.my prompt=text", ("columns", "my prompt")),
        ("columns.größe=text", ("columns", "größe")),
        ('model.loras."my set"=text', ("model", "loras", "my set")),
        ("model.scheduler_options.timestep_spacing=text", ("model", "scheduler_options", "timestep_spacing")),
    ],
)
def test_keys_are_dotted_and_quoted_as_in_a_job_file(override: str, place: tuple[str, ...]) -> None:
    tables: dict[str, Any] = {}
    job_module._lay_over(tables, override)
    for key in place:
        assert list(tables) == [key]
        tables = tables[key]
    assert tables == "text"


def test_a_key_of_an_inner_table_leaves_the_others_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[model.scheduler_options]\ntimestep_spacing = 'trailing'\n", encoding="utf-8")
    options = load_job(path, ["model.scheduler_options.rescale_betas_zero_snr=true"]).model.scheduler_options
    assert options == {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True}


def refusal(path: Path | None = None, *overrides: str) -> str:
    with pytest.raises(UsageError) as refused:
        load_job(path, overrides)
    assert refused.value.exit_code == 2
    return str(refused.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sampling.stesp=3", "--set: there is no key 'sampling.stesp'; did you mean 'steps'?"),
        ("samplign.steps=3", "--set: there is no key 'samplign'; did you mean 'sampling'?"),
        ("zzz.steps=3", "known here: model, sampling, columns, plan, engine, output, run, slurm"),
        ("run.zzz=3", "known here: grace_s, commit_every_s, stale_after_s, max_deaths"),
        ("model.path.x=3", "model.path = {'x': 3} is not usable: Input should be a valid string"),
        ("steps=3", "--set 'steps=3' is not of the form table.key=value"),
        ("sampling.steps", "is not of the form table.key=value"),
        ("sampling..steps=3", "there is no key 'sampling..steps'"),
        (".steps=3", "there is no key ''"),
        ("sampling.steps=x", "sampling.steps = 'x' is not usable: Input should be a valid integer"),
        ("sampling.steps=3.0", "sampling.steps = 3.0 is not usable"),
        ("sampling.steps=true", "sampling.steps = True is not usable"),
        ("sampling.steps=0", "sampling.steps = 0 is not usable: Input should be greater than or equal to 1"),
        ("sampling.guidance_scale=nan", "sampling.guidance_scale = nan is not usable: Input should be a finite number"),
        ("sampling.guidance_scale=inf", "is not usable: Input should be a finite number"),
        ("sampling.seed=-1", "sampling.seed = -1 is not usable: Input should be greater than or equal to 0"),
        (f"sampling.seed={2**64}", "is not usable: Input should be less than 18446744073709551616"),
        ("sampling.seed=" + "9" * 5000, "is not usable"),
        (
            "model.dtype=float8",
            "'float8' is not usable: Input should be 'float32', 'float16' or 'bfloat16'",
        ),
        ("model.path=7", "model.path = 7 is not usable: Input should be a valid string"),
        ("output.quality=101", "output.quality = 101 is not usable: Input should be less than or equal to 100"),
        ("output.embed=1", "output.embed = 1 is not usable: Input should be a valid boolean"),
        ("plan.batch_sizes=[]", "plan.batch_sizes = [] is not usable"),
        ("plan.batch_sizes=[1, 0]", "plan.batch_sizes.1 = 0 is not usable"),
        ("plan.batch_sizes=[1, true]", "plan.batch_sizes.1 = True is not usable"),
        ("plan.batch_sizes=['1']", "plan.batch_sizes.0 = '1' is not usable"),
        ("plan.batch_sizes=8", "plan.batch_sizes = 8 is not usable"),
        (
            f"plan.batch_sizes=[{2**70}]",
            f"plan.batch_sizes.0 = {2**70} is not usable: Input should be less than or equal",
        ),
        (f"plan.max_batch={2**70}", "Input should be less than or equal to 4096"),
        (f"plan.shard_images={2**70}", f"Input should be less than or equal to {2**20}"),
        (f"sampling.guidance_scale={10**400}", "0000... is not usable: Input should be a valid number"),
        ("plan.batch_sizes=" + "[" * 100_000, "[[... is not usable"),
        ("run.stale_after_s=1e300", "Input should be less than or equal to 1000000000"),
        ("sampling.steps=20\nwidth=64", r"sampling.steps = '20\nwidth=64' is not usable"),
        (
            "model.dtype=",
            "model.dtype = '' is not usable: Input should be 'float32', 'float16' or 'bfloat16'; "
            "a key cannot be unset here, leave it out for its default",
        ),
        ("columns.prompt=5", "columns.prompt = 5 is not usable: Input should be a valid string"),
        ("run.grace_s=0", "run.grace_s = 0 is not usable: Input should be greater than 0"),
        ("model.loras=5", "model.loras = 5 is not usable: it must be a table, { key = value }"),
        ("model.loras={x = []}", "model.loras.x = [] is not usable: it must have an entry at least"),
        ("model.loras={x = {path = 'a'}}", "model.loras.x = {'path': 'a'} is not usable: it must be a list, [ … ]"),
        ("model.loras={x = ['a']}", "model.loras.x.0 = 'a' is not usable: it must be a table, { key = value }"),
        ("model.loras={x = [{scale = 1.0}]}", "{'scale': 1.0} lacks the key 'model.loras.x.0.path'"),
        ("model.loras={x = [{path = 'a', scale = nan}]}", "model.loras.x.0.scale = nan is not usable: Input should be"),
        ("model.loras={x = [{path = 'a', wight = 1.0}]}", "there is no key 'model.loras.x.0.wight'; did you mean"),
        ("model.loras={'' = [{path = 'a'}]}", "in model.loras, the name '' is not usable: it must be one line"),
        ("model.scheduler_options={a = nan}", "a = nan is not usable: it must be a text, a finite number, true or"),
        ("model.scheduler_options={a = [1]}", "a = [1] is not usable: it must be a text, a finite number, true or"),
        ("engine.max_memory=24", "max_memory = 24 is not usable: a size is a number and a unit"),
        *((f"model.{key}=", f"model.{key} = '' is not usable: it must not be empty; a key") for key in NAMED),
    ],
)
def test_a_wrong_option_is_told_in_a_sentence(override: str, sentence: str) -> None:
    said = refusal(None, override)
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert len(said) < 300


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[model\npath = 1", "is not TOML: "),
        (b"[model]\npath = 'a'\npath = 'b'", "is not TOML: "),
        (b"\xff\xfe[model]", "is not UTF-8 (byte 0xff at offset 0); save it as UTF-8"),
        (b"[model]\npath = '\xe9'", "is not UTF-8 (byte 0xe9 at offset 16)"),
        (b"a = " + b"[" * 100_000, "its brackets are nested too deeply"),
        (b"seed = " + b"9" * 5000, "is not TOML: "),
        (b"[sampling]\nsteps = 'x'\nwidht = 3\n", "sampling.steps = 'x' is not usable"),
        (b"[sampling]\nsteps = 'x'\nwidht = 3\n", "there is no key 'sampling.widht'; did you mean 'width'?"),
        (b"model = 'demo'", "model = 'demo' is not usable"),
        (b"[[model]]\npath = 'a'", "is not usable"),
        (b"stepps = 3", "there is no key 'stepps'"),
    ],
)
def test_a_wrong_file_is_named_and_told_in_a_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    message = refusal(path)
    assert sentence in message
    assert all(str(path) in line for line in message.splitlines())


def test_a_byte_order_mark_is_none_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbf[sampling]\nsteps = 7")
    assert load_job(tmp_path / "job.toml").sampling.steps == 7


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "none.toml cannot be read: " in refusal(tmp_path / "none.toml")
    assert "cannot be read: " in refusal(tmp_path)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(list(VALUES)))
def test_any_value_is_taken_or_refused_in_a_sentence(text: str, name: str) -> None:
    try:
        job = load_job(None, [f"{name}={text}"])
    except UsageError:
        return
    assert isinstance(value_at(job, name), type(VALUES[name]) | float)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_any_option_is_taken_or_refused_in_a_sentence(override: str) -> None:
    try:
        load_job(None, [override])
    except UsageError as error:
        assert override.partition("=")[0].strip().partition(".")[0] in str(error) or repr(override) in str(error)  # noqa: PT017


def test_the_example_of_all_keys_has_every_key_with_its_default(tmp_path: Path) -> None:
    """What stands in it is the default; what is commented out has none, and is a value that loads."""
    text = (Path(__file__).parent.parent / "jobs" / "all.toml").read_text(encoding="utf-8")
    given, unset = tomllib.loads(text), tomllib.loads(re.sub(r"(?m)^# (?=\w+ = )", "", text))
    assert {f"{table}.{key}" for table in unset for key in unset[table]} == {*keys(), "columns.prompt"}
    path = tmp_path / "all.toml"
    path.write_text(text, encoding="utf-8")
    assert load_job(path) == load_job()
    path.write_text(re.sub(r"(?m)^# (?=\w+ = )", "", text), encoding="utf-8")
    job = load_job(path)
    for name in keys():
        table, key = name.split(".")
        is_default = value_at(job, name) == value_at(load_job(), name)
        assert is_default == (key in given[table]), name
        assert is_default or value_at(load_job(), name) is None, name


@pytest.mark.parametrize(
    ("text", "time"),
    [("30", "30"), ("04:00:00", "04:00:00"), ("1-12", "1-12"), ("90:00", "90:00"), ("1-00:30:00", "1-00:30:00")],
)
def test_times_of_slurm_need_no_quotes(text: str, time: str) -> None:
    assert load_job(None, [f"slurm.time={text}"]).slurm.time == time


@pytest.mark.parametrize("text", ["4h", "-1", "4:0", "04:00:00.5", "1.5", "UNLIMITED; true"])
def test_times_that_slurm_does_not_know(text: str) -> None:
    with pytest.raises(UsageError, match=r"slurm\.time"):
        load_job(None, [f"slurm.time={text}"])


@pytest.mark.parametrize("key", ["partition", "container", "finish_partition"])
@pytest.mark.parametrize("value", ["", "  ", "a\nb", "a\u0000b", "a\u2028b"])
def test_what_a_script_holds_is_one_line(key: str, value: str) -> None:
    with pytest.raises(UsageError, match="one line of printable characters"):
        load_job(None, [f"slurm.{key}={json.dumps(value)}"])
    with pytest.raises(UsageError, match="one line of printable characters"):
        load_job(None, [f"slurm.setup=[{json.dumps(value)}]"])


def test_later_options_win_and_options_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[sampling]\nsteps = 5\nwidth = 64\n")
    job = load_job(path, ["sampling.steps=6", "sampling.steps=7"])
    assert (job.sampling.steps, job.sampling.width) == (7, 64)


def test_a_job_does_not_change() -> None:
    job = load_job()
    with pytest.raises(ValueError, match="frozen"):
        job.sampling.steps = 3  # type: ignore[misc]
