"""One file per way in which checkpoints are quantised, each with its `METHOD`; `reader_of` finds a config's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.files import ReadScaled
from penstock.gpu_node.model.checkpoint.methods.parts import Method


@cache
def methods() -> dict[str, Method]:
    """Every method of this folder, by the name that configs have for it: a new file is all that a new one takes."""
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    found = (module.METHOD for module in modules if hasattr(module, "METHOD"))
    return {method.name: method for method in found}


def reader_of(config: Mapping[str, Any]) -> ReadScaled | None:
    """What reads the matrices that a config.json says are quantised; None where it says none are.

    Raises ConfigError naming a method, or a setting of one, that is not read.
    """
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return None
    try:
        name = settings.get("quant_method")
        if name not in methods():
            raise ConfigError(f"quant_method {name} of config.json is not read; read: {', '.join(methods())}")
        return methods()[name].reader_of(settings)
    except KeyError as error:
        raise ConfigError(f"quantization_config of config.json has no {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"quantization_config of config.json makes no sense: {error}") from error
