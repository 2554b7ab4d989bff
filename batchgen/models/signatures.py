"""What diffusers' pipelines take, read off their source: importing them would take torch, and seconds."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchgen.errors import UsageError

REQUIRED = object()
"""In a default's place: the parameter has none."""
_NEEDED = ("prompt", "width", "height", "num_inference_steps", "generator", "output_type")
_OTHERS = (
    *("control_image", "image_embeds", "mask", "mask_image", "ref_image", "strength", "controlnet_conditioning_scale"),
    *("control_video", "frame_rate", "frames", "num_frames", "video", "video_length"),
)
"""Parameters of pipelines that make something else than images, or of something else than text."""


@functools.cache
def parameters(pipeline: str) -> Mapping[str, Any] | None:
    """The parameters of a pipeline class's call and their defaults (REQUIRED, or None for one that is no literal); None
    for a class that is not there or has no call of its own. Raises UsageError without diffusers."""
    for path in _files():
        text = path.read_text(encoding="utf-8")
        if re.search(rf"^class {re.escape(pipeline)}\b", text, re.MULTILINE):
            calls = [one for one in _class(text, pipeline).body if getattr(one, "name", "") == "__call__"]
            return _read(calls[0]) if calls and isinstance(calls[0], ast.FunctionDef) else None
    return None


def refusal(pipeline: str) -> str:
    """Why a pipeline class cannot make images of text alone here; "" if it can."""
    taken = parameters(pipeline)
    if taken is None:
        return "which is no pipeline of the installed diffusers"
    missing = [name for name in _NEEDED if name not in taken]
    if missing:
        return f"whose call takes no {' and no '.join(missing)}"
    others = [name for name in taken if name in _OTHERS or (taken[name] is REQUIRED and name != "prompt")]
    if "image" in taken and pipeline not in _from_text():
        others.append("image")
    return f"whose call takes {', '.join(others)}: it makes no images of text alone" if others else ""


@functools.cache
def takes_loras(pipeline: str) -> bool:
    """Whether a pipeline class has diffusers' loader of LoRAs."""
    begins = re.compile(rf"^class {re.escape(pipeline)}\((.*?)\):", re.MULTILINE | re.DOTALL)
    found = (begins.search(path.read_text(encoding="utf-8")) for path in _files())
    return any("LoraLoaderMixin" in one[1] for one in found if one)


@functools.cache
def scheduler_keys(scheduler: str) -> Mapping[str, ast.expr | None]:
    """The keys of a scheduler class's configuration and their annotations; none for a class that is not there. Raises
    UsageError without diffusers."""
    for path in (_place() / "schedulers").rglob("scheduling_*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search(rf"^class {re.escape(scheduler)}\b", text, re.MULTILINE):
            made = [one for one in _class(text, scheduler).body if getattr(one, "name", "") == "__init__"]
            if made and isinstance(made[0], ast.FunctionDef):
                return {one.arg: one.annotation for one in made[0].args.args[1:]}
    return {}


def fits(value: str | float | bool, annotation: ast.expr | None) -> bool:
    """Whether an annotation of numbers, texts and literals allows a value; any is allowed where there is none."""
    if annotation is None:
        return True
    kinds, literals = set[str](), list[Any]()
    _gather(annotation, kinds, literals)
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, str):
        return "str" in kinds or value in literals
    # diffusers calls some numbers without a default "bool | None".
    return ("int" in kinds and isinstance(value, int)) or "float" in kinds or {"bool", "None"} <= kinds


def _gather(annotation: ast.expr, kinds: set[str], literals: list[Any]) -> None:
    """The names of a union and the values of its literals; what lists and mappings hold is none of them."""
    if isinstance(annotation, ast.BinOp):
        _gather(annotation.left, kinds, literals)
        _gather(annotation.right, kinds, literals)
    elif isinstance(annotation, ast.Name | ast.Constant):
        kinds.add(ast.unparse(annotation))
    elif isinstance(annotation, ast.Subscript):
        name, inner = ast.unparse(annotation.value), annotation.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if name == "Literal":
            literals += map(_literal, parts)
        elif name in ("Optional", "Union"):
            for part in parts:
                _gather(part, kinds, literals)


@functools.cache
def _from_text() -> frozenset[str]:
    """The classes that diffusers itself lists as making images of text."""
    text = (_place() / "pipelines" / "auto_pipeline.py").read_text(encoding="utf-8")
    listed = re.search(r"^AUTO_TEXT2IMAGE_PIPELINES_MAPPING = .*?^\)", text, re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r"\w+Pipeline\b", listed[0] if listed else ""))


def is_part(library: str) -> bool:
    """Whether a component's library, as model_index.json names it, is diffusers, transformers or one of diffusers' own
    pipelines: code that comes with a model is never run."""
    is_name = re.fullmatch(r"\w+", library) is not None
    return library in ("diffusers", "transformers") or (is_name and (_place() / "pipelines" / library).is_dir())


def _files() -> Iterator[Path]:
    return (_place() / "pipelines").rglob("pipeline_*.py")


def _place() -> Path:
    found = find_spec("diffusers")
    if found is None or found.origin is None:
        raise UsageError(
            "what this model's pipeline takes is read from diffusers, which is not installed here; install it, or plan "
            "where it is"
        )
    return Path(found.origin).parent


def _class(text: str, name: str) -> ast.ClassDef:
    return next(one for one in ast.parse(text).body if isinstance(one, ast.ClassDef) and one.name == name)


def _read(call: ast.FunctionDef) -> Mapping[str, Any]:
    told = call.args
    names = [one.arg for one in told.args]
    defaults = [REQUIRED] * (len(names) - len(told.defaults)) + list(map(_literal, told.defaults))
    keywords = {
        one.arg: REQUIRED if default is None else _literal(default)
        for one, default in zip(told.kwonlyargs, told.kw_defaults, strict=True)
    }
    return dict(list(zip(names, defaults, strict=True))[1:]) | keywords


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
