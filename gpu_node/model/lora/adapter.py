"""Read LoRA adapters (arXiv:2106.09685) in PEFT's format, check them against the model, and compute their digests."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.checkpoint.json_object import read_object
from penstock.gpu_node.model.checkpoint.stored_tensors import StoredTensor, read_safetensors
from penstock.gpu_node.model.checkpoint.tensors import rows_by_part
from penstock.gpu_node.model.protocol import LowRank, MatrixName

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."
_KINDS = {"bfloat16", "float16", "float32"}
_UNSUPPORTED = (
    *("use_dora", "use_qalora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters"),
    *("rank_pattern", "alpha_pattern", "layer_replication", "fan_in_fan_out", "alora_invocation_tokens"),
    *("arrow_config", "megatron_config"),
)
"""Config fields that change what an adapter computes; an adapter that sets one is refused."""
_PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base model's weights unchanged."""


@dataclass(frozen=True, slots=True)
class _Pair:
    part: int
    down: StoredTensor
    up: StoredTensor
    row_order: NDArray[np.int32] | None
    """The order of the rows of `up`, if the checkpoint's order differs from the runners'."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class LoraAdapter:
    """The tensors of an adapter, held in memory so that later changes of its file do not matter."""

    name: str
    digest: str
    """A digest of its config and weights: adapters with equal digests give the same tokens."""
    rank: int
    _factor: float
    _pairs: Mapping[tuple[int, MatrixName], tuple[_Pair, ...]]

    def low_ranks(self, layer: int, matrix: MatrixName) -> tuple[LowRank, ...]:
        """Return the low-rank terms added to a layer's matrix, one per adapted part; () if there are none."""
        return tuple(self._low_rank(pair) for pair in self._pairs.get((layer, matrix), ()))

    def _low_rank(self, pair: _Pair) -> LowRank:
        up = pair.up.to_float32() if pair.row_order is None else pair.up.to_float32()[pair.row_order]
        return LowRank(pair.part, pair.down.to_float32(), up * np.float32(self._factor))


def digest_of(folder: Path) -> str:
    """Return 32 hex digits over an adapter's config and all bytes of its weights.

    Raises ConfigError for a missing file.
    """
    digest = hashlib.blake2b(json.dumps(read_object(folder / CONFIG_FILE), sort_keys=True).encode(), digest_size=16)
    with _weights_of(folder).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_adapter(folder: Path, name: str, digest: str, spec: ModelSpec, max_rank: int) -> LoraAdapter:
    """Read an adapter of the model that `spec` describes; `digest` comes from `digest_of`.

    Raises ConfigError that names a missing file or tensor, an unsupported setting, or a tensor for another model.
    """
    config, weights = read_object(folder / CONFIG_FILE), _weights_of(folder)
    rank, factor = _rank_and_factor(config)
    if rank > max_rank:
        raise ConfigError(f"{CONFIG_FILE}: r is {rank}, more than max_lora_rank {max_rank}")
    # Read into memory: a write to a mapped file would change the tensors, and truncation would crash the process.
    stored = dict(read_safetensors(weights, np.frombuffer(weights.read_bytes(), np.uint8)))
    pairs: dict[tuple[int, MatrixName], tuple[_Pair, ...]] = {}
    for layer in range(spec.num_layers):
        for matrix in spec.adapted_matrices:
            found = tuple(_pairs_of(stored, spec, layer, matrix, rank))
            if found:
                pairs[layer, matrix] = found
    if stored:
        raise ConfigError(f"{WEIGHTS_FILE} has {next(iter(stored))}, which matches no layer matrix of this model")
    if not pairs:
        raise ConfigError(f"{WEIGHTS_FILE} has no tensors")
    return LoraAdapter(name, digest, rank, factor, pairs)


def _pairs_of(
    stored: dict[str, StoredTensor], spec: ModelSpec, layer: int, matrix: MatrixName, rank: int
) -> Iterator[_Pair]:
    """Yield the tensor pairs for a matrix and remove them from `stored`."""
    is_fused = matrix == "qkv" and len(spec.names.qkv) == 1
    order = np.concatenate(rows_by_part(spec)) if is_fused else None
    for part, (name, rows) in enumerate(spec.parts_of(matrix)):
        base = _PREFIX + name.format(layer=layer)
        down_name, up_name = f"{base}.lora_A.weight", f"{base}.lora_B.weight"
        if down_name in stored or up_name in stored:
            down = _take(stored, down_name, (rank, spec.columns_of(matrix)))
            yield _Pair(part, down, _take(stored, up_name, (rows, rank)), order)


def _take(stored: dict[str, StoredTensor], name: str, shape: tuple[int, int]) -> StoredTensor:
    tensor = stored.pop(name, None)
    if tensor is None:
        raise ConfigError(f"{WEIGHTS_FILE} has no {name}")
    if tensor.shape != shape:
        raise ConfigError(f"{name} has shape {list(tensor.shape)}, but model and config need {list(shape)}")
    if tensor.kind not in _KINDS:
        raise ConfigError(f"{name} is stored as {tensor.kind}; supported: {', '.join(sorted(_KINDS))}")
    return tensor


def _rank_and_factor(config: Mapping[str, Any]) -> tuple[int, float]:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{CONFIG_FILE}: peft_type {kind!r} is not supported, only LORA")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise ConfigError(f"{CONFIG_FILE}: {name} is not supported")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{CONFIG_FILE}: bias {config['bias']!r} is not supported, only none")
    if config.get("init_lora_weights") not in _PLAIN_INITS:
        start = config["init_lora_weights"]
        raise ConfigError(f"{CONFIG_FILE}: init_lora_weights {start!r} is not supported, it changes the base model too")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"{CONFIG_FILE}: r is {rank!r} but must be a whole number of at least 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ConfigError(f"{CONFIG_FILE}: lora_alpha is {alpha!r} but must be a number")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _weights_of(folder: Path) -> Path:
    path = folder / WEIGHTS_FILE
    if path.is_file():
        return path
    if (folder / _PICKLE_FILE).is_file():
        raise ConfigError(f"{folder} has only {_PICKLE_FILE}, a pickle, which can run code; use {WEIGHTS_FILE}")
    raise ConfigError(f"there is no {path}")
