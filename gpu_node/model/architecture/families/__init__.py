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


# Of one user, or of our own code and files.
@cache
def families() -> dict[str, Family]:
    """Return every family of this folder by architecture name. A new file adds a family without registration."""
    found = (import_module(f"{__name__}.{module.name}").FAMILIES for module in iter_modules(__path__))
    return {family.architecture: family for alike in found for family in alike}


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json. Raises ConfigError that lists the supported architectures."""
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else "none"
    # A model that was saved without its head, as those for embeddings are, names itself `…Model`.
    family = families().get(architecture) or families().get(re.sub("Model$", "ForCausalLM", architecture))
    if family is None:
        # A checkpoint with an auto_map ships its own Python code for the model.
        own_code = "; code that a checkpoint brings (trust_remote_code) is never run" if config.get("auto_map") else ""
        supported = ", ".join(families())
        raise ConfigError(f"architecture {architecture} is not supported; supported: {supported}{own_code}")
    return family


def text_config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a model's text model, with what the whole model says of it.

    Raises ConfigError for an unsupported architecture, and for a `text_config` that is no object.
    """
    inner = config.get("text_config")
    if not family_of(config).has_text_config or not inner:
        return dict(config)
    if not isinstance(inner, dict):
        raise ConfigError(f"text_config is {str(inner)[:80]!r} but must be an object")
    own = ("architectures", "tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", "eos_token_id")
    return {**inner, **{name: config[name] for name in own if config.get(name) is not None}}
