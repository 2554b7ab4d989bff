"""`engine.safety_checker`: what is flagged is what diffusers' pipeline flags, whatever shares its batch, and fails."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchgen.engine import safety
from batchgen.engine.engine import Engine
from batchgen.engine.safety import Safety
from batchgen.errors import UsageError
from batchgen.generator import Pending
from batchgen.making import Maker
from batchgen.models import hub
from batchgen.models.folder import facts_of, find_model, identity
from batchgen.models.safety import SafetyChecker
from batchgen.records import UNSAFE, Batch, Failure, Image, Outcome, Row
from batchgen.stopping import Stop
from tests import checkers, runs, tiny
from tests.checkers import ROWS


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))


def generate(engine: Engine, rows: Sequence[Row], size: int | None = None) -> list[Outcome]:
    return engine.submit(tiny.batch(rows, engine.facts, size), tiny.never)()


def flags(outcomes: Sequence[Outcome]) -> list[bool]:
    return [isinstance(one, Failure) and one.error == UNSAFE for one in outcomes]


@functools.cache
def pipeline(dtype: str = "float32") -> Any:
    return tiny.reference_pipeline(checkers.folder(), checks_safety=True, torch_dtype=getattr(torch, dtype))


def wanted(rows: Sequence[Row], dtype: str = "float32") -> list[bool]:
    """What diffusers' pipeline says of these rows, made in one call."""
    pipe = pipeline(dtype)
    pipe.scheduler = tiny.diffusers.DDIMScheduler.from_config(pipe.own_scheduler.config, clip_sample=False)
    found: list[bool] = pipe(
        prompt=[row.prompt for row in rows],
        width=rows[0].width,
        height=rows[0].height,
        num_inference_steps=rows[0].steps,
        guidance_scale=rows[0].guidance_scale,
        generator=[torch.Generator("cpu").manual_seed(row.seed) for row in rows],
        output_type="np",
    ).nsfw_content_detected
    return found


class TestParity:
    def test_each_row_alone_and_all_in_one_batch_in_both_orders(self) -> None:
        alone = [wanted([row])[0] for row in ROWS]
        assert alone == [i in checkers.UNSAFE for i in range(len(ROWS))]
        for rows, expected in ((ROWS, alone), (ROWS[::-1], alone[::-1])):
            assert wanted(rows) == flags(generate(checkers.engine(), rows)) == expected
        assert [flags(generate(checkers.engine(), [row]))[0] for row in ROWS] == alone

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_half_precision(self, dtype: str) -> None:
        """Without the row that is flagged by five thousandths."""
        engine = Engine(tiny.job(checkers.folder(), "engine.safety_checker=true", f"model.dtype={dtype}"))
        rows = [ROWS[i] for i in (0, 1, 2, 3, 5)]
        assert engine.model.checker is not None
        assert engine.model.checker._network.dtype == getattr(torch, dtype)
        assert flags(generate(engine, rows)) == wanted(rows, dtype) == [False, True, False, False, True]

    @pytest.mark.parametrize(("width", "height"), [(64, 64), (40, 200), (333, 65), (32, 32)])
    def test_pictures_are_prepared_as_by_diffusers(self, width: int, height: int) -> None:
        pictures = checkers.noise(3, width, height)
        images = [PIL.Image.fromarray(one) for one in pictures]
        extracted = pipeline().feature_extractor(images, return_tensors="pt").pixel_values
        assert torch.equal(checkers.checker().prepare(pictures), extracted)

    @pytest.mark.parametrize("seed", range(3))
    def test_findings_on_both_sides_of_every_threshold(self, seed: int) -> None:
        """Thresholds in the middle of what is found, special care or not."""
        network, pictures = checkers.network(seed), checkers.noise(96)
        checker = SafetyChecker(network, checkers.processor())
        inputs = checker.prepare(pictures)
        with torch.no_grad():
            cosines = checker.cosines(inputs)
            middle = cosines.quantile(0.9, dim=0)
            network.special_care_embeds_weights.copy_(middle[:3])
            network.concept_embeds_weights.copy_(middle[3:] + 0.004)
            checker = SafetyChecker(network, checkers.processor())
            _, expected = network(clip_input=inputs, images=[np.zeros(1)] * len(pictures))
        findings = [checker.judge(one) for one in cosines.numpy()]
        assert [finding is not None for finding in findings] == expected
        assert 0 < sum(expected) < len(expected)
        assert len({finding.is_strict for finding in findings if finding}) == 2
        for number, one in enumerate(cosines.double().numpy()):
            is_strict = (np.round(one[:3] - middle[:3].numpy(), 3) > 0).any()
            scores = one[3:] - middle[3:].numpy() - 0.004 + 0.01 * is_strict
            for concept, score in (findings[number].concepts if findings[number] else {}).items():  # type: ignore[union-attr]
                assert score == pytest.approx(scores[concept], abs=6e-4)


class TestRows:
    def test_neighbours_are_untouched(self) -> None:
        """Their pixels are those of an engine without checker, in batches of any size and with padding."""
        plain = checkers.images(tiny.engine("sd1"), ROWS)
        outcomes = generate(checkers.engine(), ROWS)
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, Image):
                assert np.array_equal(outcome.pixels, plain[i])
        assert flags(generate(checkers.engine(), ROWS[:5], 8)) == flags(outcomes)[:5]

    def test_the_finding_says_which_concept_and_how_far(self) -> None:
        outcomes = generate(checkers.engine(), ROWS)
        told = {i: one.message for i, one in enumerate(outcomes) if isinstance(one, Failure)}
        assert told.keys() == set(checkers.UNSAFE)
        for number, (i, message) in enumerate(told.items()):
            assert message.startswith("the safety checker flags the image: its score exceeds the threshold of concept ")
            assert f"concept {number} by 0." in message
            assert ("special care" in message) == (i in checkers.SPECIAL)

    @pytest.mark.parametrize("place", range(safety.CHUNK))
    def test_a_finding_does_not_depend_on_neighbours(self, place: int) -> None:
        """The same bits alone, at every place of a chunk, and whatever else is there."""
        made, pictures = Safety(checkers.checker(), torch.device("cpu")), checkers.noise(7)
        with torch.inference_mode():
            (alone,) = made._cosines(pictures[:1])
            among = [*pictures[1 : 1 + place], pictures[0], *pictures[1 + place :]]
            assert np.array_equal(made._cosines(among)[place], alone)
            assert np.array_equal(made._cosines(among[: place + 1])[place], alone)
            assert not np.array_equal(made._cosines(among)[place + 1], alone)
            assert made._cosines([]) == []

    def test_what_is_no_picture_keeps_its_own_fault(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine(tiny.job(checkers.folder(), "engine.safety_checker=true"))
        right = engine.model.decode

        def wrong(decoder: Any, latents: torch.Tensor) -> torch.Tensor:
            images = right(decoder, latents).clone()
            images[0, 0, 5, 5] = torch.nan
            return images

        monkeypatch.setattr(engine.model, "decode", wrong)
        outcomes = generate(engine, ROWS[:4])
        assert [one.error if isinstance(one, Failure) else "" for one in outcomes] == ["NotFinite", UNSAFE, "", ""]

    def test_an_image_that_is_not_judged_is_not_let_through(self) -> None:
        network = checkers.network()
        network.visual_projection.weight.data.fill_(torch.nan)
        made = Safety(SafetyChecker(network, checkers.processor()), torch.device("cpu"))
        with torch.inference_mode():
            (fault,) = made.check(checkers.noise(1))
        assert fault is safety.UNDECIDED

    def test_memory_that_runs_out_frees_the_graphs_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine(tiny.job(checkers.folder(), "engine.safety_checker=true", "engine.mode=graph"))
        tried: list[int] = []
        right = checkers.checker().cosines

        def scarce(prepared: torch.Tensor) -> torch.Tensor:
            tried.append(engine._pool.num_graphs)
            if engine._pool.num_graphs:
                raise torch.OutOfMemoryError("no")
            return right(prepared)

        monkeypatch.setattr(engine.model.checker, "cosines", scarce)
        assert flags(generate(engine, ROWS)) == [i in checkers.UNSAFE for i in range(len(ROWS))]
        assert tried == [2, 0, 0]

    def test_a_flagged_row_is_not_made_again(self) -> None:
        """The others of its batch that failed are."""
        engine, submitted = checkers.engine(), list[int]()

        class Counting:
            versions = engine.versions
            prepare = engine.prepare
            measurements = engine.measurements

            def submit(self, batch: Batch, should_drop: Callable[[], bool]) -> Pending:
                submitted.append(len(batch.rows))
                pending = engine.submit(batch, should_drop)
                return lambda: [
                    Failure(one.row, "NotFinite", "") if one.row == ROWS[0] and len(batch.rows) > 1 else one
                    for one in pending()
                ]

        maker = Maker(Counting(), Stop(), 25.0, print)
        outcomes = maker.start(tiny.batch(ROWS, engine.facts))()
        assert flags(outcomes) == [i in checkers.UNSAFE for i in range(len(ROWS))]
        assert submitted == [len(ROWS), 1]
        assert [one.retries for one in outcomes] == [1, 0, 0, 0, 0, 0]


def without_checker(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"safety_checker": [None, None]}))


def edited(name: str, **values: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


WEIGHTS = "safety_checker/model.safetensors"
CHECKER_FILES = {"safety_checker/config.json", WEIGHTS, "feature_extractor/preprocessor_config.json"}
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (without_checker, r"comes without safety checker: .*\[None, None\]; leave engine.safety_checker out"),
    "none named": (edited("model_index.json", safety_checker=None), "comes without safety checker"),
    "pickles": (
        lambda f: (f / WEIGHTS).rename(f / "safety_checker/pytorch_model.bin"),
        "safety_checker has only pytorch_model.bin, pickles, which can run code",
    ),
    "no folder": (lambda f: shutil.rmtree(f / "safety_checker"), "lacks safety_checker/config.json"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "safety_checker lacks model.safetensors"),
    "another variant": (
        lambda f: (f / WEIGHTS).rename(f / "safety_checker/model.fp16.safetensors"),
        'set model.variant = "fp16"',
    ),
    "no extractor": (
        lambda f: shutil.rmtree(f / "feature_extractor"),
        "lacks feature_extractor/preprocessor_config.json",
    ),
    "no extractor named": (
        edited("model_index.json", feature_extractor=[None, None]),
        r"gives feature_extractor as \[None, None\]; allowed is transformers's CLIPImageProcessorPil or CLIPImagePro",
    ),
    "own code": (
        edited("model_index.json", safety_checker=["my_checker", "Checker"]),
        "allowed is stable_diffusion's StableDiffusionSafetyChecker; code that comes with a model is never run",
    ),
}


class TestFolders:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(checkers.folder(), tmp_path / "model"))

    @pytest.mark.parametrize("wrong", WRONG)
    def test_those_that_are_refused(self, folder: Path, wrong: str) -> None:
        """Only with the checker on: without it, nothing of it is read."""
        damage, message = WRONG[wrong]
        damage(folder)
        job = tiny.job(folder, "engine.safety_checker=true")
        with pytest.raises(UsageError, match=message) as error:
            facts_of(job.model, has_checker=True)
        assert "\n" not in str(error.value)
        with pytest.raises(UsageError, match=message):
            Engine(job)
        assert find_model(job.model).files == find_model(tiny.job(tiny.folder("sd1")).model).files

    @pytest.mark.parametrize("model", ["demo", "pattern", "sdxl", "sd1"])
    @pytest.mark.parametrize("command", ["plan", "run"])
    def test_models_without_one_are_refused_before_anything_is_made(
        self, tmp_path: Path, model: str, command: str
    ) -> None:
        source = runs.prompts(tmp_path / "m.parquet", 1)
        path = tiny.folder(model) if model.startswith("sd") else model
        place = ("-o", tmp_path / "out") if command == "run" else ()
        ended = runs.batchgen(command, source, *place, "--model", path, "--set", "engine.safety_checker=true")
        assert ended.code == 2
        reason = {"sdxl": "is of family 'StableDiffusionXLPipeline', which has no", "sd1": "comes without"}
        assert f"{reason.get(model, f'model {model!r} has no')} safety checker" in ended.err
        assert ended.err.strip().endswith("whose model_index.json has a safety_checker and a feature_extractor")
        assert not (tmp_path / "out").exists()

    def test_two_that_do_not_fit_each_other(self, folder: Path) -> None:
        checkers.processor(24).save_pretrained(folder / "feature_extractor")
        with pytest.raises(UsageError, match=r"of shape \(3, 24, 24\), and its safety_checker reads \(3, 32, 32\)"):
            Engine(tiny.job(folder, "engine.safety_checker=true"))

    def test_weights_that_do_not_fill_it(self, folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        del tensors["concept_embeds_weights"]
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(UsageError, match=r"safety_checker lack 1 of the network's tensors.*concept_embeds_weights"):
            Engine(tiny.job(folder, "engine.safety_checker=true"))

    def test_checkpoints_as_they_were_saved_years_ago(self, folder: Path) -> None:
        """Tensors and configuration under the names that Stable Diffusion 1.4 and 1.5 have."""
        tensors = {
            f"vision_model.vision_model.{name.split('vision_model.')[-1]}" if "vision_model." in name else name: one
            for name, one in load_file(folder / WEIGHTS).items()
        }
        tensors["vision_model.vision_model.embeddings.position_ids"] = torch.arange(17)[None]
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        edited("model_index.json", feature_extractor=["transformers", "CLIPFeatureExtractor"])(folder)
        file = folder / "feature_extractor" / "preprocessor_config.json"
        kept = {name: value for name, value in json.loads(file.read_text()).items() if not name.endswith("type")}
        old = {"feature_extractor_type": "CLIPFeatureExtractor", "size": checkers.SIDE, "crop_size": checkers.SIDE}
        file.write_text(json.dumps(kept | old))
        engine = Engine(tiny.job(folder, "engine.safety_checker=true"))
        assert flags(generate(engine, ROWS)) == [i in checkers.UNSAFE for i in range(len(ROWS))]

    def test_its_files_are_part_of_the_models_identity_only_where_it_is_on(self, folder: Path) -> None:
        model = tiny.job(folder).model
        off, on = identity(model), identity(model, has_checker=True)
        assert on.keys() - off.keys() == CHECKER_FILES
        assert off == {name: on[name] for name in off}

    @pytest.mark.parametrize("variant", [None, "fp16"])
    def test_what_is_fetched_from_the_hub_is_what_is_read(self, tmp_path: Path, variant: str | None) -> None:
        pipeline().save_pretrained(tmp_path, variant=variant)
        model = tiny.job(tmp_path, *([f"model.variant={variant}"] if variant else [])).model
        files = find_model(model, has_checker=True).files
        with_it, without = (list(hub.file_patterns(variant, has_checker=one)) for one in (True, False))
        matched = [[any(fnmatch.fnmatch(file, one) for one in some) for file in files] for some in (with_it, without)]
        assert all(matched[0])
        assert [file.split("/")[0] in ("safety_checker", "feature_extractor") for file in files] == [
            not one for one in matched[1]
        ]

    def test_what_is_said_to_fetch_it(self) -> None:
        model = tiny.job("someone/some-model", "model.variant=fp16").model
        command = hub.prefetch_command(model, has_checker=True)
        assert (
            command == "batchgen prefetch someone/some-model --set model.variant=fp16 --set engine.safety_checker=true"
        )


class TestRuns:
    ON = ("--set", "engine.safety_checker=true", "--set", "engine.device=cpu")

    def manifest(self, tmp_path: Path) -> Path:
        columns = {name: [getattr(row, name) for row in ROWS] for name in ("prompt", "seed", "steps", "sampler")}
        ids = [f"row-{i}" for i in range(len(ROWS))]
        return runs.manifest(tmp_path / "m.parquet", {"id": ids, **columns, "guidance_scale": [5.0] * len(ROWS)})

    def test_flagged_rows_fail_and_the_others_are_made(self, tmp_path: Path) -> None:
        source, unsafe = self.manifest(tmp_path), {f"row-{i}" for i in checkers.UNSAFE}
        ended = runs.run(source, tmp_path / "on", *self.ON, model=checkers.folder())
        assert (ended.code, ended.closing_line.startswith("6 rows = 3 done + 3 failed")) == (3, True), ended
        lines = runs.check_images(tmp_path / "on", is_pattern=False)
        assert {line["id"] for line in lines} == {f"row-{i}" for i in range(len(ROWS))} - unsafe
        failures = runs.pq.read_table(tmp_path / "on" / "failures.parquet").to_pylist()
        assert {line["id"]: line["error"] for line in failures} == dict.fromkeys(unsafe, UNSAFE)
        assert all("exceeds the threshold of concept " in line["message"] for line in failures)
        assert runs.run(source, tmp_path / "off", *self.ON[2:], model=checkers.folder()).code == 0
        pixels = runs.pixels(tmp_path / "off")
        assert len(pixels) == len(ROWS)
        assert runs.pixels(tmp_path / "on").items() < pixels.items()

    def test_retry_tries_them_again_to_the_same_end(self, tmp_path: Path) -> None:
        source, out = self.manifest(tmp_path), tmp_path / "out"
        first = runs.run(source, out, *self.ON, model=checkers.folder())
        pixels = runs.pixels(out)
        retried = runs.batchgen("retry", out)
        assert (retried.code, retried.closing_line) == (first.code, first.closing_line), retried
        assert runs.pixels(out) == pixels
        assert runs.batchgen("verify", out).code == 0

    def test_another_checker_is_another_run(self, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(checkers.folder(), tmp_path / "model"))
        source, out = runs.prompts(tmp_path / "m.parquet", 1, steps=1), tmp_path / "out"
        assert runs.run(source, out, *self.ON, model=folder).code in (0, 3)
        off = runs.run(source, out, *self.ON[2:], model=folder)
        assert off.code == 2
        assert "engine.safety_checker: true there, false now" in off.err
        tensors = load_file(folder / WEIGHTS)
        save_file({**tensors, "concept_embeds_weights": tensors["concept_embeds_weights"] - 0.01}, folder / WEIGHTS)
        other = runs.run(source, out, *self.ON, model=folder)
        assert other.code == 2
        assert f"model.file:{WEIGHTS}: " in other.err


def test_the_rows_of_these_tests_differ() -> None:
    assert len({dataclasses.replace(row, index=0, id="") for row in ROWS}) == len(ROWS)
