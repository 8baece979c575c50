"""Load the weights of a checkpoint into a module of transformers, and check that none is missing."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.transformers_class import is_whole
from penstock.gpu_node.model.checkpoint.mapped_file import MappedFile
from penstock.gpu_node.model.checkpoint.source import ModelSource
from penstock.gpu_node.model.checkpoint.stored_tensors import TEXT_BASES, TEXT_HEADS, read_safetensors, weight_files
from penstock.runtime.reading import reason_of

log = logging.getLogger(__package__)

_MAX_NAMES = 10
"""Names of tensors in a message."""
_MAX_MISSING = 1 << 28
"""Numbers in tensors that may be missing when a checkpoint is loaded, to name them exactly."""


def stored_module(
    module_class: Any,
    config: Any,
    source: ModelSource,
    *,
    architecture: str,
    num_weights: int,
    dtype: torch.dtype,
    unused: tuple[str, ...] = (),
    **implementations: str,
) -> nn.Module:
    """Return a module with the weights of a checkpoint. Raises ConfigError if tensors are missing.

    num_weights: the numbers in the module's parameters; unused: beginnings of the names of tensors that may be missing,
    because what they compute is not used.
    """
    folder = source.folder
    stored = {
        name: tensor.shape
        for path in weight_files(source)
        for name, tensor in read_safetensors(path, MappedFile(path).content)
    }
    missing = num_weights - sum(map(_count, stored.values()))
    if missing > _MAX_MISSING:
        raise ConfigError(f"{folder}: the config describes {missing:,} numbers more than the checkpoint has")
    # Its progress bar would be one line of a log.
    of_transformers: Any = transformers_logging
    of_transformers.disable_progress_bar()
    verbosity = of_transformers.get_verbosity()
    # What is missing or surplus is said below.
    of_transformers.set_verbosity_error()
    try:
        module, found = module_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            key_mapping=None if is_whole(module_class.__name__) else _renamed(stored, module_class, config),
            **implementations,
        )
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(f"{folder}: transformers cannot load the checkpoint: {reason_of(error)}") from error
    finally:
        of_transformers.set_verbosity(verbosity)
    if absent := sorted(name for name in found["missing_keys"] if not unused or not name.startswith(unused)):
        raise ConfigError(f"{folder}: the checkpoint has no tensors {_listed(absent)}, which {architecture} needs")
    if unlike := sorted(str(one[0]) for one in found.get("mismatched_keys") or ()):
        raise ConfigError(f"{folder}: the shapes of tensors {_listed(unlike)} are not those that the config says")
    if surplus := sorted(found["unexpected_keys"]):
        log.warning("the checkpoint has tensors that the model does not use", extra={"tensors": _listed(surplus)})
    loaded: nn.Module = module.eval()
    return loaded


def _renamed(names: Iterable[str], module_class: Any, config: Any) -> dict[str, str] | None:
    """Return how tensors of a text model inside of another model are renamed, by patterns; None for others."""
    if not (found := _bases_of(names)):
        return None
    with torch.device("meta"):
        own = _bases_of(name for name, _ in module_class._from_config(config).named_parameters())
    if own:
        # A class that is a model for images itself, such as Fuyu, knows the names of its checkpoints.
        return None
    heads = {rf"^{re.escape(head)}\.": "lm_head." for head in TEXT_HEADS}
    return {rf"^{re.escape(base)}\.": "model." for base in TEXT_BASES if base in found} | heads


def _bases_of(names: Iterable[str]) -> set[str]:
    """Return the places of text models inside of other models, by the names of tensors."""
    return {base for name in names for base in TEXT_BASES if name.startswith(f"{base}.")}


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
