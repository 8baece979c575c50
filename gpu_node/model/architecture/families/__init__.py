"""One file per family of models, each with its `FAMILY`; `family_of` finds the one that a checkpoint's config names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.spec import Family


@cache
def families() -> dict[str, Family]:
    """Every family of this folder, by its architecture's name: a new file is all that a new one takes."""
    found = (import_module(f"{__name__}.{module.name}").FAMILY for module in iter_modules(__path__))
    return {family.architecture: family for family in found}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ConfigError naming what is asked for and what is supported."""
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else "none"
    family = families().get(architecture)
    if family is None:
        # Where there is an auto_map, the checkpoint brings Python code that computes it.
        own_code = "; code that a checkpoint brings (trust_remote_code) is never run" if config.get("auto_map") else ""
        supported = ", ".join(families())
        raise ConfigError(f"architecture {architecture} is not supported; supported: {supported}{own_code}")
    return family
