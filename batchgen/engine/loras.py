"""LoRA (Hu et al. 2021): the job's sets of low-rank changes, put into a pipeline's own weights and taken out again.

A set is read by diffusers and fused by peft, and the sums are copied into the tensors that the pipeline has anyway.
Modules, shapes and addresses stay, so a set costs nothing per step, and captured graphs and compiled code, which read
those tensors, stay valid for any set. Weights come back from a copy in host memory, bit for bit: to subtract what was
added would leave its rounding behind.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from diffusers.utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    get_peft_kwargs,
    recurse_remove_peft_layers,
)
from safetensors import SafetensorError
from torch import Tensor, nn

from batchgen.engine.devices import quiet_libraries
from batchgen.errors import UsageError
from batchgen.models.lora_files import LoraPart
from batchgen.models.unchanged import Unchanged
from batchgen.wording import first_line, listed

_FACTOR = re.compile(r"[._](lora([._]|_linear_layer\.)|lokr_|alpha$|dora_scale$).*")
"""What follows a layer's name in the names of a LoRA file's tensors, as diffusers spells them."""
_WRONG = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError, SafetensorError)
"""What diffusers and peft raise for a file that they cannot use."""
_SHOWN = 3


class Loras:
    """The sets of one loaded pipeline, none of them in it at first."""

    def __init__(self, pipeline: Any, sets: Mapping[str, tuple[LoraPart, ...]], model: str) -> None:
        """All sets are tried at once, so that one of another model is refused before the first image. Raises UsageError
        for a set that does not fit, and where peft is missing."""
        self._pipeline, self._sets, self._model = pipeline, sets, model
        self.now = ""
        """The set that is in the weights."""
        self._kept: dict[nn.Parameter, Tensor] = {}
        """The weights that sets change, as the model has them, in host memory."""
        self._changed: list[nn.Parameter] = []
        self._of_texts: set[str] = set()
        self._files = Unchanged(part.path for parts in sets.values() for part in parts)
        if sets:
            _check_packages(pipeline, model)
        for name in sets:
            self.use(name)
        self.use("")

    def of_texts(self, name: str) -> str:
        """The set as far as texts are encoded by it: "" where it leaves the text encoders as they are."""
        return name if name in self._of_texts else ""

    def use(self, name: str) -> None:
        """Put a set in the place of the one that is in the weights; "" is none. What is queued on the device before
        still reads the weights as they were. Where one cannot be put there, such as for want of memory, none is. Raises
        UsageError for a file that is another one by now."""
        if name == self.now:
            return
        with torch.inference_mode(False), torch.no_grad(), quiet_libraries(logging.CRITICAL), warnings.catch_warnings():
            # peft warns of what a set of several files is: several adapters. diffusers logs what it raises as well.
            warnings.simplefilter("ignore")
            self._take_out()
            try:
                if name:
                    self._put(name)
            except BaseException:
                self._take_out()
                raise
        self.now = name

    def _take_out(self) -> None:
        for parameter in self._changed:
            parameter.copy_(self._kept[parameter])
        self._changed, self.now = [], ""

    def _put(self, name: str) -> None:
        components = self._components()
        self._files.check()
        try:
            for number, part in enumerate(self._sets[name]):
                with self._reading(name, part):
                    self._add(part, f"part{number}")
            for key, component in components.items():
                layers = _adapted(component)
                if layers and key.startswith("text_encoder"):
                    self._of_texts.add(name)
                for layer in layers:
                    self._fuse(layer, self._sets[name])
        finally:
            for component in components.values():
                recurse_remove_peft_layers(component)
                component.__dict__.pop("peft_config", None)
                component.__dict__["_hf_peft_config_loaded"] = False

    def _add(self, part: LoraPart, adapter: str) -> None:
        """Wrap the layers that a file changes. Raises UsageError for a file of which something does not fit."""
        pipeline, components = self._pipeline, self._components()
        unet = getattr(pipeline, "unet", None)
        told = {} if unet is None else {"unet_config": unet.config}
        tensors, *others = pipeline.lora_state_dict(
            str(part.path.parent),
            weight_name=part.path.name,
            local_files_only=True,
            return_alphas=True,
            return_lora_metadata=True,
            **told,
        )
        alphas, metadata = others if len(others) > 1 else (None, *others)
        strangers = sorted({key for key in tensors if key.partition(".")[0] not in components})
        for prefix, component in components.items():
            own = {key: one for key, one in tensors.items() if key.startswith(f"{prefix}.")}
            if not own:
                continue
            if hasattr(component, "load_lora_adapter"):
                loading: Any = component
                loading.load_lora_adapter(
                    own, prefix=prefix, network_alphas=alphas, metadata=metadata, adapter_name=adapter
                )
            else:
                told_of = _within(alphas or {}, prefix), _within(metadata or {}, prefix)
                _add_to_text_encoder(component, _within(own, prefix), *told_of, adapter)
            layers = {_FACTOR.sub("", key) for key in own}
            found = {
                f"{prefix}.{at}" for at, one in component.named_modules() if adapter in getattr(one, "scaling", ())
            }
            if len(found) != len(layers):
                strangers += sorted(layers - found) or sorted(layers)
        if strangers:
            raise UsageError(f"it changes {listed(strangers[:_SHOWN], len(strangers))}, which this model does not have")

    def _fuse(self, layer: Any, parts: tuple[LoraPart, ...]) -> None:
        """Add what the parts make of one layer to its own weights, where they lie."""
        weights = list(layer.get_base_layer().parameters(recurse=False))
        places = [weight.data for weight in weights]
        for weight in weights:
            if weight not in self._kept:
                self._kept[weight] = weight.detach().to("cpu", copy=True)
        self._changed += weights
        adapters = [f"part{number}" for number in range(len(parts))]
        for adapter, part in zip(adapters, parts, strict=True):
            if adapter in layer.scaling:
                layer.set_scale(adapter, part.scale)
        try:
            layer.merge(adapter_names=adapters)
        finally:
            for weight, place in zip(weights, places, strict=True):
                if weight.data_ptr() != place.data_ptr():
                    place.copy_(weight)
                    weight.data = place

    def _components(self) -> dict[str, nn.Module]:
        """The pipeline's networks that LoRAs may change, by name."""
        found = {name: getattr(self._pipeline, name, None) for name in self._pipeline._lora_loadable_modules}
        return {name: one for name, one in found.items() if one is not None}

    @contextmanager
    def _reading(self, name: str, part: LoraPart) -> Iterator[None]:
        try:
            yield
        except (*_WRONG, UsageError) as error:
            raise UsageError(
                f"model.loras: set {name!r}: {part.path} does not fit model {self._model!r}: {first_line(error)}; give "
                "a LoRA that was made for this kind of model"
            ) from error


def _add_to_text_encoder(
    encoder: nn.Module,
    tensors: Mapping[str, Tensor],
    alphas: Mapping[str, float],
    metadata: Mapping[str, Any],
    adapter: str,
) -> None:
    """As diffusers' own, but for transformers' loader, whose demands on peft's version change with every release."""
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

    made = convert_state_dict_to_peft(convert_state_dict_to_diffusers(dict(tensors)))
    if not hasattr(encoder, "text_model"):
        made = {key.removeprefix("text_model."): one for key, one in made.items()}
        alphas = {key.removeprefix("text_model."): one for key, one in alphas.items()}
    ranks = {key: one.shape[1] for key, one in made.items() if "lora_B" in key and one.ndim > 1}
    options = metadata or get_peft_kwargs(ranks, network_alpha_dict=alphas, peft_state_dict=made, is_unet=False)
    config = LoraConfig(**options)
    inject_adapter_in_model(config, encoder, adapter)
    set_peft_model_state_dict(encoder, made, adapter)


def _within(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(f"{prefix}."): one for key, one in values.items() if key.startswith(f"{prefix}.")}


def _adapted(component: nn.Module) -> list[Any]:
    """The layers that adapters wrap."""
    return [one for one in component.modules() if hasattr(one, "get_base_layer") and hasattr(one, "scaling")]


def _check_packages(pipeline: Any, model: str) -> None:
    if find_spec("peft") is None:
        raise UsageError("model.loras needs the package peft, which is not installed; install batchgen[lora]")
    if not hasattr(pipeline, "_lora_loadable_modules"):
        raise UsageError(
            f"model.loras has no effect on model {model!r}: {type(pipeline).__name__} takes no LoRAs; leave it out"
        )
