"""Model families: each file has `FAMILIES` that are alike; `family_of` finds the family that a config names.

Other packages may bring families, by entry points of the group `penstock.families`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.spec import Family
from penstock.gpu_node.model.architecture.transformers_class import (
    architecture_of,
    computing_class,
    is_known,
    near_names,
    text_kind_of,
)

log = logging.getLogger(__package__)

GROUP = "penstock.families"
"""The group of entry points of other packages. Each names a `Family`, or several in a tuple."""


_TEXT_MODELS = {
    "gemma2": "Gemma2ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""The families of text models inside of other models (LLaVA, InternVL, SmolVLM …), by their `model_type`."""


# Of one user, or of our own code and files.
@cache
def families() -> dict[str, Family]:
    """Return every family by architecture name: those of this folder, and those of other packages.

    A new file in this folder adds a family without registration. A package that cannot be loaded is named in the log.
    """
    found = (import_module(f"{__name__}.{module.name}").FAMILIES for module in iter_modules(__path__))
    known: dict[str, Family] = {family.architecture: family for alike in found for family in alike}
    for point in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        for family in _families_of(point):
            if other := known.get(family.architecture):
                facts = {"architecture": family.architecture, "package": family.origin}
                log.warning("a package brings a family that is there already", extra=facts | {"used": other.origin})
            else:
                known[family.architecture] = family
    return known


def _families_of(point: EntryPoint) -> Iterator[Family]:
    """Yield the families of an entry point; none if it cannot be loaded."""
    origin = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
    try:
        loaded = point.load()
        brought = (loaded,) if isinstance(loaded, Family) else tuple(loaded)
        if others := [one for one in brought if not isinstance(one, Family)]:
            raise TypeError(f"{point.value} has a {type(others[0]).__name__}, not a Family")
    except Exception as error:
        # The package may do anything. Models of other families are not its business.
        facts = {"package": origin, "entry_point": point.name, "reason": f"{type(error).__name__}: {error}"}
        log.warning("a package's model families cannot be loaded", extra=facts)
        return
    for family in brought:
        yield replace(family, origin=origin)


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json. Raises ConfigError that lists the supported architectures."""
    family = _family_or_none(config)
    if family is None:
        architecture = architecture_of(config)
        # A checkpoint with an auto_map ships its own Python code for the model.
        own_code = "; code that a checkpoint brings (trust_remote_code) is never run" if config.get("auto_map") else ""
        supported = ", ".join(families())
        raise ConfigError(
            f"architecture {architecture} is not supported; supported: {supported}{near_names(config)}{own_code}"
        )
    return family


def needs_transformers(config: Mapping[str, Any]) -> bool:
    """Return whether transformers' own class must compute a model, because no family is its."""
    return _family_or_none(config) is None and is_known(computing_class(config))


def _family_or_none(config: Mapping[str, Any]) -> Family | None:
    architecture = architecture_of(config)
    # A model that was saved without its head, as those for embeddings are, names itself `…Model`.
    found = families().get(architecture) or families().get(re.sub("Model$", "ForCausalLM", architecture))
    if found is None and (inner := families().get(_TEXT_MODELS.get(text_kind_of(config) or "", ""))) is not None:
        found = replace(inner, has_text_config=True)
    inner_config = config.get("text_config") if found is not None and found.has_text_config else None
    is_for = found is None or found.is_for(inner_config if isinstance(inner_config, dict) else config)
    return found if is_for else None


def text_config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a model's text model, with what the whole model says of it.

    A model that neither a family nor a class of transformers computes keeps its config. Raises ConfigError for a
    `text_config` that is no object.
    """
    family, inner = _family_or_none(config), config.get("text_config")
    is_part = family.has_text_config if family is not None else computing_class(config) != architecture_of(config)
    if not inner or not is_part:
        return dict(config)
    if not isinstance(inner, dict):
        raise ConfigError(f"text_config is {str(inner)[:80]!r} but must be an object")
    own = ("architectures", "tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", "eos_token_id")
    return {**inner, **{name: config[name] for name in own if config.get(name) is not None}}
