"""The network of a pipeline that is run by its own call: compiled once for all shapes, and held against eager code
wherever a shape is new."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from batchgen.engine.checking import check
from batchgen.engine.compiling import MAX_FORMS
from batchgen.engine.devices import is_alive, is_memory
from batchgen.generator import Context
from batchgen.wording import first_line


class CompiledNetwork:
    """A network whose forward calls run compiled code, until that does not work: then it is eager again."""

    def __init__(self, network: nn.Module, device: torch.device, dtype: torch.dtype, context: Context) -> None:
        self.mode = "compiled"
        self._network, self._device, self._dtype, self._context = network, device, dtype, context
        self._eager = network.forward
        self._compiled = torch.compile(network.forward, dynamic=True)
        self._checked: set[tuple[torch.Size, ...]] = set()
        """Shapes of arguments of calls that were held against eager ones."""
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_FORMS)
        # Else a network that is compiled anew again and again would run eagerly in the end, and be called compiled.
        torch._dynamo.config.fail_on_recompile_limit_hit = True

        @functools.wraps(self._eager)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(args, kwargs)

        # The module stays the pipeline's own, so that whatever is put into its weights is seen.
        network.forward = forward

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shapes = tuple(one.shape for one in _tensors((args, kwargs)))
        wanted = None if shapes in self._checked else self._eager(*args, **kwargs)
        try:
            made = self._run(args, kwargs)
            if wanted is not None:
                for mine, its in zip(_tensors(made), _tensors(wanted), strict=True):
                    check(mine, its, "compiled", self._dtype)
                self._checked.add(shapes)
        except Exception as error:  # whatever torch.compile raises: the network can do without it
            if is_memory(error) or not is_alive(self._device):
                raise
            self._context.say(
                f"the compiled network does not work here ({type(error).__name__}: {first_line(error)}); it runs eager"
            )
            self.mode = "eager"
            self._network.forward = self._eager
            return self._eager(*args, **kwargs) if wanted is None else wanted
        return made

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._checked:
            return self._compiled(*args, **kwargs)
        with self._context.preparing(f"compiling {type(self._network).__name__} for every shape", is_long=True):
            return self._compiled(*args, **kwargs)


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors among a call's arguments or results, however they are nested."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors(tuple(values.values()))
    elif isinstance(values, list | tuple):
        for one in values:
            yield from _tensors(one)
