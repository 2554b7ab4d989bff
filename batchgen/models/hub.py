"""Models of the Hugging Face hub: fetched by one command, and from then on read from the hub's local cache alone."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path

from batchgen.errors import UsageError
from batchgen.models import generic
from batchgen.models.checkpoints import components_in
from batchgen.models.layouts import FAMILIES
from batchgen.weights import Model
from batchgen.wording import first_line

_HUB_TIMEOUT_S = 5.0


def cached(model: Model, *, has_checker: bool = False, single: Model | None = None) -> Path:
    """The folder of a hub id in the local cache, which may be without weights if it is the configuration of a single
    file; the network is not asked. Raises UsageError if it is not there."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _found(model.path, model.revision, model.variant, single is None)
    except Exception as error:  # which ones there are differs between the hub package's versions
        # Where nothing is cached the package tells programmers to pass an argument.
        why = "" if isinstance(error, LocalEntryNotFoundError) else f" ({first_line(error)})"
        raise UsageError(
            f"model {model.path!r} is neither a local folder nor whole in the hub's cache {constants.HF_HUB_CACHE}"
            f"{why}; fetch it once, where there is a network: "
            f"{prefetch_command(single or model, has_checker=has_checker)}"
        ) from None


@functools.cache
def _found(path: str, revision: str | None, variant: str | None, has_weights: bool) -> Path:
    """Asked once per process, so that what is planned, fingerprinted and loaded is one commit."""
    only = None if has_weights else frozenset[str]()
    return _snapshot(Model(path=path, revision=revision), file_patterns(variant, only=only), is_local=True)


def fetch(model: Model, *, has_checker: bool = False, checkpoint: Path | None = None) -> str:
    """Fetch what is missing of a hub id, only the files that a run reads: no weights that a single file has. A note if
    the hub could not be asked and the local cache has it already. Raises UsageError if there is nothing to be had."""
    there, reason = _listing(model)
    if reason:
        try:
            _snapshot(model, file_patterns(model.variant), is_local=True)
        except Exception:
            raise UsageError(
                f"model {model.path!r} cannot be fetched, the hub gave: {reason}; check the name, the network and, for "
                "a model that asks for consent, the token (hf auth login)"
            ) from None
        return f"the hub gave: {reason}; what its cache holds is left as it is"
    try:
        only = None if checkpoint is None else frozenset[str]()
        place = _snapshot(model, file_patterns(model.variant, has_checker=has_checker, there=there, only=only))
        index = json.loads((place / "model_index.json").read_bytes())
        layout = FAMILIES.get(index.get("_class_name"))
        if layout is None:
            _snapshot(model, generic.patterns(index, model.variant, there))
        elif checkpoint is not None:
            only = frozenset(layout.components) - components_in(checkpoint, layout.single, layout.components)
            _snapshot(model, file_patterns(model.variant, has_checker=has_checker, there=there, only=only))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"model {model.path!r} could not be fetched as a whole: {first_line(error)}; the same command goes on"
        ) from None
    _found.cache_clear()
    return ""


def prefetch_command(model: Model, *, has_checker: bool = False) -> str:
    """What a person types to fetch a model."""
    keys = {f"model.{name}": getattr(model, name) for name in ("config", "revision", "variant")}
    keys["engine.safety_checker"] = "true" if has_checker else None
    return shlex.join(["batchgen", "prefetch", model.path, *_settings({k: v for k, v in keys.items() if v})])


def _settings(keys: dict[str, str]) -> Iterable[str]:
    for key, value in keys.items():
        yield from ("--set", f"{key}={value}")


def _snapshot(model: Model, patterns: Iterable[str], *, is_local: bool = False) -> Path:
    """The model's folder in the cache, once it holds the files of these patterns."""
    from huggingface_hub import snapshot_download

    # By the revision's name, not its commit: the name is what the cache is asked for later.
    place = snapshot_download(
        model.path, revision=model.revision, allow_patterns=list(patterns), local_files_only=is_local
    )
    return Path(place)


def _listing(model: Model) -> tuple[frozenset[str], str]:
    """The files that the hub has of a model, and why it does not give it, "" if it does."""
    from huggingface_hub import HfApi

    try:
        found = HfApi().model_info(model.path, revision=model.revision, timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # the hub package's HTTP client, and so its errors, differ between its versions
        return frozenset(), first_line(error)
    return frozenset(one.rfilename for one in found.siblings or ()), ""


def file_patterns(
    variant: str | None,
    *,
    has_checker: bool = False,
    there: Collection[str] = (),
    only: Collection[str] | None = None,
) -> Iterable[str]:
    """The file names to fetch, of whichever family: configuration, tokenizers, and one set of safetensors weights, of
    all components or only of some. A component that is not `there` in the variant is taken without."""
    yield "model_index.json"
    layouts = FAMILIES.values()
    components = [one.components for one in layouts] + ([one.checker for one in layouts] if has_checker else [])
    for name, component in {name: one for some in components for name, one in some.items()}.items():
        yield f"{name}/{component.config}"
        if component.is_tokenizer:
            yield from (f"{name}/*{suffix}" for suffix in generic.TEXTS)
        if component.weights and (only is None or name in only):
            yield from generic.weights(name, component.weights, variant, there)
