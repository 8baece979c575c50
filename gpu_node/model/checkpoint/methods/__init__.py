"""One file per quantization method of checkpoints, each with a `METHOD`; `reader_of` finds that of a config."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.json_object import read_object
from penstock.gpu_node.model.checkpoint.methods.parts import Method
from penstock.gpu_node.model.checkpoint.stored_kinds import ReadScaled

MODELOPT_FILE = "hf_quant_config.json"
"""Where older versions of ModelOpt, and many published models, say how a checkpoint is quantized."""


# Of one user, or of our own code and files.
@cache
def methods() -> dict[str, Method]:
    """Return every method of this folder by its `quant_method`. A new file adds a method without registration."""
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    found = (module.METHOD for module in modules if hasattr(module, "METHOD"))
    return {method.name: method for method in found}


def with_modelopt_file(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a config with what ModelOpt says in a file of its own, unless config.json states a quantization."""
    path = folder / MODELOPT_FILE
    if config.get("quantization_config") or not path.is_file():
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **read_object(path)}}


def reader_of(config: Mapping[str, Any]) -> ReadScaled | None:
    """Return the reader of a quantized checkpoint's matrices; None if config.json states no quantization.

    Raises ConfigError that names an unsupported method or setting.
    """
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return None
    try:
        name = settings.get("quant_method")
        if name not in methods():
            raise ConfigError(f"quant_method {name} of config.json is not supported; supported: {', '.join(methods())}")
        return methods()[name].reader_of(settings)
    except KeyError as error:
        raise ConfigError(f"quantization_config of config.json has no {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"quantization_config of config.json is invalid: {error}") from error
