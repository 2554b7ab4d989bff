"""Trains the demo model: `python -m batchgen.models.demo.train OUT --minutes 9`.

Writes the pipeline (`OUT/model`), the loss curve (`OUT/training.json`), pictures (`OUT/samples.png`) and what the judge
says of held-out scenes (`OUT/report.json`). `--resume EARLIER` goes on from another OUT, with the optimiser fresh and a
learning rate that rises and falls once more: every stretch ends with a model that can be used.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import diffusers
import numpy as np
import torch
import transformers
from PIL import Image

from batchgen.models.demo.autoencoder import train_autoencoder
from batchgen.models.demo.captions import all_texts, plain
from batchgen.models.demo.denoiser import train_denoiser
from batchgen.models.demo.drawing import draw
from batchgen.models.demo.judge import judge, report
from batchgen.models.demo.networks import build, open_pipeline, save_pipeline
from batchgen.models.demo.scenes import Scene, held_out_scenes
from batchgen.models.demo.training import Data, Pace, Record, Settings, load_settings, smoke
from batchgen.records import Pixels

_JUDGED = ((64, 64, 2.0), (64, 64, 4.0), (64, 64, 7.5), (96, 64, 4.0), (64, 96, 4.0), (96, 96, 4.0), (128, 128, 4.0))
"""Width, height and guidance scale."""


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--minutes", type=float, default=9.0, show_default=True, help="Of the whole command.")
@click.option("--resume", type=click.Path(exists=True, path_type=Path), help="The OUT of an earlier stretch.")
@click.option("--smoke", "is_smoke", is_flag=True, help="A few steps of every stage, to see that all of it runs.")
@click.option("--batch-pixels", type=click.IntRange(min=64 * 64), help="In place of the settings'.")
def main(out: Path, minutes: float, resume: Path | None, is_smoke: bool, batch_pixels: int | None) -> None:
    """Train the demo model, or train it on."""
    settings = smoke(load_settings()) if is_smoke else load_settings()
    if batch_pixels:
        settings = replace(settings, batch_pixels=batch_pixels)
    if 60 * minutes <= settings.reserve_s:
        raise click.UsageError(
            f"--minutes {minutes:g} leaves no time to train: {settings.reserve_s:g} s of it are kept for the end"
        )
    if resume and not ((resume / "training.json").exists() and (resume / "model").is_dir()):
        raise click.UsageError(f"--resume {resume}: an earlier OUT holds training.json and model/, and this does not")
    train(settings, out, minutes, resume)


def train(settings: Settings, out: Path, minutes: float, resume: Path | None = None) -> None:
    """One stretch of training, all stages."""
    end = time.monotonic() + 60 * minutes - settings.reserve_s
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    earlier = json.loads((resume / "training.json").read_text())["stretches"] if resume else []
    seed = settings.seed + len(earlier)
    torch.manual_seed(seed)
    pipeline = open_pipeline(resume / "model") if resume else build(all_texts(), seed)
    pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    out.mkdir(parents=True, exist_ok=True)
    record = Record(out / "training.json", earlier, _facts(settings, minutes, device))
    data = Data(settings, pipeline.tokenizer, device, seed)
    print(f"{settings.scenes:,} scenes ready, {end - time.monotonic():.0f} s left for training", flush=True)

    share = settings.autoencoder.resumed_share if resume else settings.autoencoder.share
    pace = Pace(share * (end - time.monotonic()), settings.max_steps)
    train_autoencoder(pipeline.vae, data, settings, pace, record, resumed=resume is not None)

    def save() -> None:
        save_pipeline(pipeline, out / "model")
        _sheet(_held_out_pictures(pipeline, settings, settings.num_shown, (64, 64, 4.0))).save(out / "samples.png")

    pace = Pace(end - time.monotonic(), settings.max_steps)
    train_denoiser(pipeline, data, settings, pace, record, save, resumed=resume is not None)
    save()
    found = _judge(pipeline, settings)
    (out / "report.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps([{**one, "mistakes": len(one["mistakes"])} for one in found]), flush=True)


def _facts(settings: Settings, minutes: float, device: torch.device) -> dict[str, Any]:
    is_gpu = device.type == "cuda"
    return {
        "minutes": minutes,
        "settings": asdict(settings),
        "device": torch.cuda.get_device_name(device) if is_gpu else platform.machine(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }


def _judge(pipeline: Any, settings: Settings) -> list[dict[str, Any]]:
    """Reports of drawings that went through the autoencoder, then of pictures by size and guidance; fewer pictures of
    the later sizes."""
    found = [{"what": "reconstructions"} | report(judge(*one) for one in _reconstructions(pipeline, settings))]
    for number, (width, height, guidance) in enumerate(_JUDGED):
        count = settings.num_judged if number < 3 else max(settings.num_judged // 4, 1)
        made = _held_out_pictures(pipeline, settings, count, (width, height, guidance))
        verdicts = [judge(picture, scene) for scene, picture in made]
        facts = {"what": "pictures", "width": width, "height": height, "guidance": guidance}
        found.append(facts | {"steps": settings.judged_steps} | report(verdicts))
    return found


@torch.no_grad()
def _reconstructions(pipeline: Any, settings: Settings) -> list[tuple[Pixels, Scene]]:
    """Drawings of held-out scenes, encoded and decoded: what the denoiser cannot surpass."""
    scenes = held_out_scenes(np.random.default_rng(1), settings.num_judged)
    drawings = torch.from_numpy(np.stack(draw(scenes, 64, 64, seed=0))).to(pipeline.device).movedim(-1, 1)
    made = pipeline.vae.decode(pipeline.vae.encode(drawings / 127.5 - 1).latent_dist.mean).sample
    pixels = ((made.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).movedim(1, -1).cpu().numpy()
    return [(one, scenes[number]) for number, one in enumerate(pixels)]


def _held_out_pictures(
    pipeline: Any, settings: Settings, number: int, how: tuple[int, int, float]
) -> list[tuple[Scene, Pixels]]:
    scenes = held_out_scenes(np.random.default_rng(1), number)
    asked = [scenes[one] for one in range(number)]
    made = _pictures(pipeline, [plain(one) for one in asked], settings.judged_steps, how)
    return list(zip(asked, made, strict=True))


def _pictures(pipeline: Any, prompts: list[str], steps: int, how: tuple[int, int, float]) -> list[Pixels]:
    """What diffusers' own pipeline makes of prompts, with this width, height and guidance scale."""
    found: list[Pixels] = []
    for start in range(0, len(prompts), 128):
        made = pipeline(
            prompts[start : start + 128],
            width=how[0],
            height=how[1],
            guidance_scale=how[2],
            num_inference_steps=steps,
            generator=torch.Generator("cpu").manual_seed(start),
            output_type="np",
        ).images
        found.extend((made * 255).round().astype(np.uint8))
    return found


def _sheet(made: list[tuple[Scene, Pixels]]) -> Image.Image:
    """The pictures in rows of eight, without words."""
    height, width = made[0][1].shape[:2]
    sheet = Image.new("RGB", (8 * width, -(-len(made) // 8) * height))
    for number, (_, picture) in enumerate(made):
        sheet.paste(Image.fromarray(picture), (number % 8 * width, number // 8 * height))
    return sheet


if __name__ == "__main__":
    main()
