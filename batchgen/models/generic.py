"""The generic family: any other text-to-image pipeline of diffusers, run by its own call. Needs no torch.

Its facts come from the call's signature and from the folder's configuration files. Rows are made one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from batchgen.models import signatures
from batchgen.models.facts import OWN_UPDATE, Config, Facts, SamplerFacts
from batchgen.models.layouts import Component, Layout

_SIDE = 1024
"""Pixels, where neither the call nor the network says."""
_CONFIGS = {
    "tokenizer": "tokenizer_config.json",
    "scheduler": "scheduler_config.json",
    "processor": "preprocessor_config.json",
    "feature_extractor": "preprocessor_config.json",
    "image_processor": "preprocessor_config.json",
}
"""By the beginnings of components' names; all others are networks."""
TEXTS = (".json", ".txt", ".model", ".jinja")
"""Endings of what lies beside weights: configurations, vocabularies, templates."""
_STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}


def layout(index: Config) -> Layout:
    """The folder of a pipeline whose model_index.json is given."""
    pipeline = str(index["_class_name"])
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
    components = {name: _component(name, *entry) for name, entry in entries.items() if entry != [None, None]}
    network = next((name for name in ("transformer", "unet") if name in components), "")
    return Layout(components, lambda configs, length: facts(pipeline, configs, network), network)


def _component(name: str, library: str, cls: str) -> Component:
    config = next((file for start, file in _CONFIGS.items() if name.startswith(start)), "config.json")
    stem = _STEMS.get(library, "model") if config == "config.json" else None
    return Component(library, (cls,), config, stem)


def texts(path: Path, components: Iterable[str]) -> list[str]:
    """All files of these components but weights: configurations, vocabularies, templates."""
    found = (file for name in components for file in (path / name).iterdir() if file.suffix in TEXTS)
    return sorted(f"{file.parent.name}/{file.name}" for file in found if ".index." not in file.name)


def patterns(index: Config, variant: str | None, there: Collection[str]) -> Iterator[str]:
    """The file names to fetch of a pipeline whose model_index.json is given, of those that are there."""
    for name, component in layout(index).components.items():
        yield from (f"{name}/*{suffix}" for suffix in TEXTS)
        if component.weights:
            yield from weights(name, component.weights, variant, there)


def weights(component: str, stem: str, variant: str | None, there: Collection[str]) -> list[str]:
    """The patterns of a component's weights: of the variant, unless what is there has none of it."""
    for dotted in (f".{variant}", "") if variant else ("",):
        single, shards = f"{component}/{stem}{dotted}.safetensors", f"{component}/{stem}{dotted}-*-of-*.safetensors"
        found = [single, shards, f"{component}/{stem}.safetensors.index{dotted}.json"]
        if not there or any(fnmatch(file, pattern) for file in there for pattern in found):
            break
    return found


def facts(pipeline: str, configs: Mapping[str, Config], network: str) -> Facts:
    """What planning must know of a pipeline class, from its signature and its components' configurations."""
    taken = signatures.parameters(pipeline)
    assert taken is not None, "a folder is checked before"
    scheduler, scale = configs.get("scheduler", {}), vae_scale(configs.get("vae", {}))
    sampler = str(scheduler.get("_class_name", "own"))
    side = configs.get(network, {}).get("sample_size")
    default = side * scale if isinstance(side, int) else _SIDE
    has_true_cfg = "true_cfg_scale" in taken
    is_distilled = configs.get(network, {}).get("guidance_embeds", False)
    # Beside true_cfg_scale, guidance_scale is an input of the network, if it has one.
    takes_guidance = "guidance_scale" in taken and (is_distilled or not has_true_cfg)
    guides = "negative_prompt" in taken and (has_true_cfg or takes_guidance)
    return Facts(
        family="generic",
        size_multiple=max(8, scale),
        min_size=max(8, scale),
        width=_number(taken["width"], default),
        height=_number(taken["height"], default),
        steps=_number(taken["num_inference_steps"], 50),
        guidance_scale=float(taken.get("guidance_scale") or 0.0) if takes_guidance else 0.0,
        sampler=sampler,
        text_length=0,
        samplers={sampler: SamplerFacts(sampler, form=OWN_UPDATE)},
        guided_above=1.0 if guides else None,
        guiding="true_cfg_scale" if has_true_cfg else "guidance_scale",
        needs_negative=has_true_cfg,
        true_cfg_scale=float(taken["true_cfg_scale"] or 1.0) if has_true_cfg else None,
        takes_guidance_scale=takes_guidance,
        half_dtype="bfloat16",
        max_steps=scheduler.get("num_train_timesteps", 1000),
        is_captured=False,
    )


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


def vae_scale(vae: Config) -> int:
    """Pixels along a side of each latent, by the keys that diffusers' autoencoders have."""
    if "encoder_block_out_channels" in vae:
        return int(2 ** (len(vae["encoder_block_out_channels"]) - 1))
    if "temperal_downsample" in vae:
        return int(2 ** len(vae["temperal_downsample"]))
    return int(2 ** (len(vae.get("block_out_channels", (0,) * 4)) - 1))
