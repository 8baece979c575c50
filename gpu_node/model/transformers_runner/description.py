"""A model before its weights are read: its config, checked, and what its module is seen to need on the meta device."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.limits import check_all_numbers, check_positions
from penstock.gpu_node.model.architecture.transformers_class import transformers_class
from penstock.gpu_node.model.checkpoint.source import ModelSource
from penstock.gpu_node.model.transformers_runner.attention import (
    IMPLEMENTATION,
    OWN_ATTENTION,
    UnsupportedModuleError,
    register,
)
from penstock.gpu_node.model.transformers_runner.observed import Observed, head_of, observe
from penstock.runtime.reading import reason_of

log = logging.getLogger(__package__)

LACKS = "LoRA adapters, ranks, speculative decoding, quantization, GPUs"
"""What this runner does not have, in words for a log."""
_MAX_MODULES = 200_000
"""Modules of a model. A config may ask for layers in fields that no limit knows."""
_EXPERTS = "batched_mm"
"""The only implementation of experts that runs on the meta device."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "max_target_positions")
_GROWING_ROPES = ("dynamic", "longrope")
"""RoPE scalings whose rotations depend in transformers on the longest text of a step."""


@dataclass(frozen=True, slots=True)
class ModuleDescription:
    """A model that transformers' own class computes."""

    source: ModelSource
    architecture: str
    module_class: Any
    config: Any
    """Its config, as transformers has it."""
    stored_dtype: str
    max_model_len: int
    num_weights: int
    """Numbers in its parameters, each counted once."""
    observed: Observed | None
    """None: its module does not run on the meta device, so it is observed when it is loaded."""
    attention: str
    """The attention implementation that its module is built with."""
    vocab_size: int
    hidden_size: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of the states of a sequence in float32; 0 without recurrent layers, or if they are not known yet."""
        return 0 if self.observed is None else self.observed.state_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token in float32; 0 if they are not known yet."""
        return 0 if self.observed is None else 4 * self.observed.channels

    def check_sizes(self) -> None:
        """Do nothing: sizes were checked, and tensors are compared with the module when they are loaded."""


def describe_module(source: ModelSource, config: Mapping[str, Any], max_model_len: int | None) -> ModuleDescription:
    """Check a config.json, build its module on the meta device, and observe it there.

    config: without fields that are null. Raises ConfigError that names the field, or what this runner does not support.
    """
    path = source.folder / "config.json"
    check_all_numbers(config, path)
    module_class = transformers_class(config)
    architecture = module_class.__name__
    if config.get("quantization_config") or config.get("compression_config"):
        raise _unsupported(architecture, "its checkpoint is quantized")
    register()
    with as_refusals(path, architecture):
        made = module_class.config_class.from_dict(with_floats(config))
        length = _length(made, config, max_model_len, path)
        module, observed, attention = _built(module_class, made, length)
        head: Any = head_of(module).weight
    return ModuleDescription(
        source=source,
        architecture=architecture,
        module_class=module_class,
        config=made,
        stored_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        max_model_len=length,
        num_weights=sum(one.numel() for one in module.parameters()),
        observed=observed,
        attention=attention,
        vocab_size=head.shape[0] if observed is None else observed.vocab_size,
        hidden_size=head.shape[1] if observed is None else observed.hidden_size,
    )


def with_floats(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the numbers that JSON does not have, which transformers writes as objects."""

    def read(value: Any) -> Any:
        if isinstance(value, dict):
            return float(value["__float__"]) if set(value) == {"__float__"} else {k: read(v) for k, v in value.items()}
        return [read(one) for one in value] if isinstance(value, list) else value

    return {name: read(value) for name, value in config.items()}


def _unsupported(architecture: str, reason: str) -> ConfigError:
    return ConfigError(f"runner transformers does not support {architecture}: {reason}")


@contextmanager
def as_refusals(path: Path, architecture: str) -> Iterator[None]:
    """Translate what transformers raises of a config to ConfigError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UnsupportedModuleError as error:
        raise _unsupported(architecture, error.message) from error
    except (ConfigError, MemoryError):
        raise
    except ImportError as error:
        raise _unsupported(architecture, f"it needs a package: {reason_of(error)}") from error
    except Exception as error:
        raise ConfigError(f"{path}: transformers rejects it: {reason_of(error)}") from error


def _length(made: Any, config: Mapping[str, Any], wanted: int | None, path: Path) -> int:
    """Return the tokens that a model can attend to. Raises ConfigError."""
    text = made.get_text_config()
    stated = (getattr(text, name, None) for name in _LENGTHS)
    # Some configs say -1 for no limit.
    found = next((value for value in stated if isinstance(value, int) and value > 0), None)
    if found is None and wanted is None:
        raise ConfigError(f"{path} does not say how many tokens the model attends to; set max_model_len")
    if found is not None and wanted is not None and wanted > found:
        raise ConfigError(f"max_model_len {wanted} is more than the model's own limit of {found} tokens")
    length = wanted or found or 0
    # Each position has so many numbers at most, whatever the module makes of them.
    check_positions(found or length, _head_dim(config), has_own=False)
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *(one for one in ropes.values() if isinstance(one, dict))):
        if rope.get("rope_type") in _GROWING_ROPES:
            original = rope.get("original_max_position_embeddings") or found or 0
            if length > original:
                reason = f"rotations of rope_type {rope['rope_type']} depend on the length of a text"
                raise ConfigError(f"{reason}; max_model_len {original} or less avoids that", param="max_model_len")
    return length


def _head_dim(config: Mapping[str, Any]) -> int:
    """Return the channels of a head that a config.json states, or else 1."""
    inner = config.get("text_config")
    stated = inner if isinstance(inner, dict) else config
    dim, hidden, heads = (stated.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(dim, int) and dim > 0:
        return dim
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else 1


def on_meta(module_class: Any, config: Any, **implementations: str) -> nn.Module:
    """Build a module whose tensors take no memory."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > _MAX_MODULES:
            raise ConfigError(f"the config asks for more than {_MAX_MODULES:,} modules")

    counting = register_module_module_registration_hook(counted)
    try:
        with torch.device("meta"):
            module: nn.Module = module_class._from_config(config, dtype=torch.float32, **implementations)
    finally:
        counting.remove()
        config._experts_implementation = None
    return module.eval()


def _built(module_class: Any, made: Any, length: int) -> tuple[nn.Module, Observed | None, str]:
    """Return a module on the meta device, what is seen of it, and the attention implementation that it has."""
    problem: UnsupportedModuleError | None = None
    if module_class._can_set_attn_implementation():
        try:
            module = on_meta(module_class, made, attn_implementation=IMPLEMENTATION, experts_implementation=_EXPERTS)
            return module, _observed(module, length), IMPLEMENTATION
        except UnsupportedModuleError as error:
            problem = error
        except KeyError as error:
            # Some classes look for their attention in a table of their own.
            if IMPLEMENTATION not in error.args:
                raise
    module = on_meta(module_class, made, attn_implementation=OWN_ATTENTION, experts_implementation=_EXPERTS)
    try:
        return module, _observed(module, length), OWN_ATTENTION
    except UnsupportedModuleError as error:
        raise problem or error from error


def _observed(module: nn.Module, length: int) -> Observed | None:
    try:
        return observe(module, length, torch.device("meta"))
    except ConfigError:
        raise
    except Exception as error:
        # Some modules decide by values, which the meta device does not have.
        log.debug("the module does not run on the meta device", extra={"reason": reason_of(error)})
        return None
