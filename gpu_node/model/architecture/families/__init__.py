"""Model families: each file has `FAMILIES` that are alike; `family_of` finds the family that a config names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.spec import Family
from penstock.gpu_node.model.architecture.transformers_class import architecture_of, is_known, near_names


# Of one user, or of our own code and files.
@cache
def families() -> dict[str, Family]:
    """Return every family of this folder by architecture name. A new file adds a family without registration."""
    found = (import_module(f"{__name__}.{module.name}").FAMILIES for module in iter_modules(__path__))
    return {family.architecture: family for alike in found for family in alike}


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
    return _family_or_none(config) is None and is_known(architecture_of(config))


def _family_or_none(config: Mapping[str, Any]) -> Family | None:
    architecture = architecture_of(config)
    # A model that was saved without its head, as those for embeddings are, names itself `…Model`.
    return families().get(architecture) or families().get(re.sub("Model$", "ForCausalLM", architecture))


def text_config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a model's text model, with what the whole model says of it.

    A model without a family keeps its config. Raises ConfigError for a `text_config` that is no object.
    """
    family, inner = _family_or_none(config), config.get("text_config")
    if family is None or not family.has_text_config or not inner:
        return dict(config)
    if not isinstance(inner, dict):
        raise ConfigError(f"text_config is {str(inner)[:80]!r} but must be an object")
    own = ("architectures", "tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", "eos_token_id")
    return {**inner, **{name: config[name] for name in own if config.get(name) is not None}}
