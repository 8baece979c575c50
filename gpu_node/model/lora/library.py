"""The LoRA adapters that a node can serve: those named at start, and those in a shared folder, by subfolder name.

They are read in PEFT's format (arXiv:2106.09685) and checked against the model. A digest of their content names them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from penstock.contract.adapters import NAME_PATTERN, AdapterRef
from penstock.contract.errors import ConfigError, NotFoundError, RequestError
from penstock.gpu_node.model.architecture.limits import ADAPTER_LIMITS, MAX_HEADER_BYTES, check_adapter
from penstock.gpu_node.model.architecture.recurrent import DeltaRule
from penstock.gpu_node.model.architecture.spec import LayerSpec, ModelSpec
from penstock.gpu_node.model.checkpoint.json_object import read_object
from penstock.gpu_node.model.checkpoint.row_orders import (
    gate_orders,
    halves_orders,
    input_order,
    rows_by_part,
    value_order,
)
from penstock.gpu_node.model.checkpoint.source import ADAPTER_CONFIG
from penstock.gpu_node.model.checkpoint.stored_kinds import StoredTensor
from penstock.gpu_node.model.checkpoint.stored_tensors import TEXT_BASES, read_safetensors
from penstock.gpu_node.model.checkpoint.usable_file import require_usable
from penstock.gpu_node.model.protocol import LowRank, MatrixName
from penstock.runtime.reading import reading

CONFIG_FILE = ADAPTER_CONFIG
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."
_ADAPTER_NAME = re.compile(r"\.lora_([AB])\.[^.]+\.weight$")
_KINDS = {"bfloat16", "float16", "float32"}
_MAX_NUMBER_BYTES = 4
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
    column_order: NDArray[np.int32] | None
    """The same of the columns of `down`."""


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
        down = pair.down.to_float32() if pair.column_order is None else pair.down.to_float32()[:, pair.column_order]
        return LowRank(pair.part, down, up * np.float32(self._factor))


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
    # PEFT says so of the base model's matrices. Those of the adapter are as always.
    rank, factor = _rank_and_factor({**config, "fan_in_fan_out": False} if spec.transposed else config)
    if rank > max_rank:
        raise ConfigError(f"{CONFIG_FILE}: r is {rank}, more than max_lora_rank {max_rank}")
    _check_size(weights, spec, rank)
    # Read into memory: a write to a mapped file would change the tensors, and truncation would crash the process.
    read = read_safetensors(weights, np.frombuffer(weights.read_bytes(), np.uint8))
    # PEFT's module names an adapter; a file that was saved without PEFT's own function keeps that name.
    stored = {_ADAPTER_NAME.sub(r".lora_\1.weight", key): tensor for key, tensor in read}
    pairs: dict[tuple[int, MatrixName], tuple[_Pair, ...]] = {}
    for layer in range(spec.num_layers):
        for matrix in spec.layers[layer].adapted_matrices:
            found = tuple(_pairs_of(stored, spec, layer, matrix, rank))
            if found:
                pairs[layer, matrix] = found
    if stored:
        raise ConfigError(_unmatched(next(iter(stored)), spec))
    if not pairs:
        raise ConfigError(f"{WEIGHTS_FILE} has no tensors")
    return LoraAdapter(name, digest, rank, factor, pairs)


def _check_size(weights: Path, spec: ModelSpec, rank: int) -> None:
    """Refuse a file larger than an adapter of all matrices in float32, because it is hashed and read into memory."""
    numbers = sum(
        rank * (rows + spec.columns_of(layer, matrix))
        for layer in spec.layers
        for matrix in layer.adapted_matrices
        for _, rows in spec.parts_of(layer, matrix)
    )
    most, found = MAX_HEADER_BYTES + numbers * _MAX_NUMBER_BYTES, weights.stat().st_size
    if found > most:
        raise ConfigError(
            f"{weights} has {found:,} bytes; an adapter of rank {rank} for this model has at most {most:,}"
        )


def _unmatched(name: str, spec: ModelSpec) -> str:
    """Return why a tensor of an adapter cannot be used."""
    tables = (spec.embedding, spec.head, "lora_embedding_", "embed_tokens.", "lm_head.")
    if any(table in name for table in tables):
        remedy = "merge the adapter into the base model, with merge_and_unload of PEFT, and serve the result"
        return f"{WEIGHTS_FILE} has {name}: adapters of the embedding or of the head are not supported; {remedy}"
    for what, own in _routers_and_gates(spec):
        if f".{own.rpartition('}.')[2]}.lora_" in name:
            remedy = "train the adapter without it, or serve the merged model"
            return f"{WEIGHTS_FILE} has {name}: adapters of {what} are not supported; {remedy}"
    return f"{WEIGHTS_FILE} has {name}, which matches no layer matrix of this model"


def _routers_and_gates(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield the small matrices that no adapter changes: what each is, and its name."""
    for experts in (mlp.experts for mlp in spec.mlps if mlp.experts is not None):
        yield "the router of experts", experts.router
        if experts.shared is not None and experts.shared.gate is not None:
            yield "the gate of shared experts", experts.shared.gate
    yield from (("the gates of heads", one.head_gate) for one in spec.attentions if one.head_gate is not None)


def _pairs_of(
    stored: dict[str, StoredTensor], spec: ModelSpec, layer: int, matrix: MatrixName, rank: int
) -> Iterator[_Pair]:
    """Yield the tensor pairs for a matrix and remove them from `stored`."""
    kind, columns = spec.layers[layer], None
    rows_of_parts = dict(enumerate(_row_orders(kind, matrix)))
    if matrix == "out" and isinstance(kind.recurrence, DeltaRule) and kind.recurrence.tiles_values:
        columns = value_order(kind.recurrence)
    found: dict[str, _Pair] = {}
    for part, (name, rows) in enumerate(spec.parts_of(kind, matrix)):
        if name in found:
            # Values from the projection of keys.
            yield replace(found[name], part=part)
            continue
        full = name.format(layer=layer)
        # An adapter of a model without its head, as those for embeddings are, lacks the first part of names. That of a
        # model for images has a further part.
        rest = full.partition(".")[2]
        known = (f"{_PREFIX}{one}.lora_A.weight" for one in (full, rest, *(f"{base}.{rest}" for base in TEXT_BASES)))
        down_name = next((one for one in known if one in stored), f"{_PREFIX}{full}.lora_A.weight")
        up_name = down_name.replace(".lora_A.", ".lora_B.")
        if down_name in stored or up_name in stored:
            down = _take(stored, down_name, (rank, spec.columns_of(kind, matrix)))
            found[name] = _Pair(part, down, _take(stored, up_name, (rows, rank)), rows_of_parts.get(part), columns)
            yield found[name]


def _row_orders(kind: LayerSpec, matrix: MatrixName) -> tuple[NDArray[np.int32], ...]:
    """Return the order of the rows of each part of a matrix in the base model; () if it is that of the adapter."""
    attention, mixer = kind.attention, kind.recurrence
    if matrix == "gates" and isinstance(mixer, DeltaRule):
        return gate_orders(mixer)
    if matrix == "qkv" and attention is not None and attention.is_fused:
        return (np.concatenate(rows_by_part(attention)),)
    if matrix == "qkv" and attention is not None and attention.interleaved:
        return halves_orders(attention)
    if matrix == "qkv" and isinstance(mixer, DeltaRule) and mixer.is_fused:
        return (input_order(mixer),)
    if matrix == "qkv" and isinstance(mixer, DeltaRule) and mixer.tiles_values:
        keys, values = np.arange(2 * mixer.keys, dtype=np.int32), value_order(mixer)
        return np.concatenate((keys, 2 * mixer.keys + values)), values
    return ()


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
            raise ConfigError(f"{CONFIG_FILE}: {name} is not supported; it is {str(config[name])[:200]}")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{CONFIG_FILE}: bias {config['bias']!r} is not supported, only none")
    if config.get("init_lora_weights") not in _PLAIN_INITS:
        start = config["init_lora_weights"]
        raise ConfigError(f"{CONFIG_FILE}: init_lora_weights {start!r} is not supported, it changes the base model too")
    check_adapter(config, CONFIG_FILE)
    rank, alpha = int(config["r"]), config["lora_alpha"]
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _weights_of(folder: Path) -> Path:
    path = folder / WEIGHTS_FILE
    if path.is_file() or path.is_symlink():
        require_usable(path)
        return path
    if (folder / _PICKLE_FILE).is_file():
        raise ConfigError(f"{folder} has only {_PICKLE_FILE}, a pickle, which can run code; use {WEIGHTS_FILE}")
    raise ConfigError(f"there is no {path}")


log = logging.getLogger(__package__)


_MAX_KEPT = 8
"""The number of most recently read adapters that stay in memory without a user."""
_Stamp = tuple[tuple[int, int], ...]
"""Size and modification time of an adapter's files; while it is unchanged, the digest is not recomputed."""


class AdapterLibrary:
    """Finds adapters by name and reads them; thread-safe."""

    def __init__(self, spec: ModelSpec, named: Mapping[str, Path], folder: Path | None, max_rank: int) -> None:
        """Read all adapters of `named`. Raises ConfigError if one is unusable or `folder` is not a folder."""
        if spec.foreign_adapters and (named or folder is not None):
            raise ConfigError(f"adapters do not fit this file: {spec.foreign_adapters}", param="lora")
        self._spec = spec
        self._named = dict(named)
        self._folder = folder
        self._max_rank = max_rank
        self._digests: dict[Path, tuple[_Stamp, str]] = {}
        # Keyed by id: digest of an adapter, which the operator chose.
        self._read: WeakValueDictionary[str, LoraAdapter] = WeakValueDictionary()
        self._kept: deque[LoraAdapter] = deque(maxlen=_MAX_KEPT)
        self._reported: dict[Path, str] = {}
        self._lock = threading.Lock()
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"lora_dir {folder} is not a folder")
        for name, path in self._named.items():
            try:
                with reading(path / WEIGHTS_FILE, str(path)):
                    self._adapter(name, path)
            except ConfigError as error:
                raise ConfigError(f"lora {name}: {error.message}") from error

    def digests(self) -> dict[str, str]:
        """Return the current digest of each usable adapter by name."""
        found = {}
        with self._lock:
            for name, path in self._folders():
                try:
                    with reading(path / CONFIG_FILE, name):
                        found[name] = self._digest(path)
                except ConfigError as error:
                    self._report_unusable(path, str(error))
        return found

    def find(self, wanted: AdapterRef) -> LoraAdapter:
        """Return the adapter with a name and, if given, a digest.

        Raises NotFoundError for an unknown name, and RequestError for an adapter that is unusable or has changed.
        """
        # Try without the lock first, because another thread may hold it while it reads a large adapter.
        if (known := self._read.get(wanted.digest)) is not None:
            return known
        with self._lock:
            folders = dict(self._folders())
            if wanted.name not in folders:
                names = ", ".join(sorted(folders)) or "none"
                message = f"adapter {wanted.name!r} is unknown; known adapters: {names}"
                raise NotFoundError(message, code="adapter_not_found", param="adapter")
            try:
                with reading(folders[wanted.name] / WEIGHTS_FILE, wanted.name):
                    adapter = self._adapter(wanted.name, folders[wanted.name])
            except ConfigError as error:
                message = f"adapter {wanted.name!r} cannot be used: {error}"
                raise RequestError(message, code="adapter_unusable", param="adapter") from error
        if wanted.digest not in ("", adapter.digest):
            message = f"adapter {wanted.name!r} has changed since the job was submitted"
            raise RequestError(message, code="adapter_changed", param="adapter")
        return adapter

    def _adapter(self, name: str, folder: Path) -> LoraAdapter:
        digest = self._digest(folder)
        if (known := self._read.get(digest)) is not None:
            return known
        adapter = read_adapter(folder, name, digest, self._spec, self._max_rank)
        if self._digest(folder) != digest:
            raise ConfigError("the adapter's files changed while they were read")
        self._read[digest] = adapter
        self._kept.append(adapter)
        return adapter

    def _digest(self, folder: Path) -> str:
        files = ((folder / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE) if (folder / name).is_file())
        stamp = tuple((file.st_size, file.st_mtime_ns) for file in files)
        known = self._digests.get(folder)
        if known is None or known[0] != stamp:
            _check_size(_weights_of(folder), self._spec, int(ADAPTER_LIMITS["r"].high))
            known = self._digests[folder] = stamp, digest_of(folder)
        return known[1]

    def _report_unusable(self, folder: Path, why: str) -> None:
        """Log an unusable adapter once per reason. It may be incomplete because it is still being copied."""
        if self._reported.get(folder) != why:
            self._reported[folder] = why
            log.warning("an adapter is left out", extra={"folder": str(folder), "reason": why})

    def _folders(self) -> Iterator[tuple[str, Path]]:
        """Yield the name and folder of each adapter; named adapters take precedence over the shared folder."""
        yield from self._named.items()
        try:
            paths = [] if self._folder is None else sorted(self._folder.iterdir())
        except OSError:
            paths = []  # the folder may be unmounted for a moment
        for path in paths:
            is_adapter_name = path.name not in self._named and re.fullmatch(NAME_PATTERN, path.name)
            if is_adapter_name and self._has_config(path):
                yield path.name, path

    def _has_config(self, folder: Path) -> bool:
        """Return whether a folder holds an adapter. This process may not be allowed to enter it."""
        try:
            return (folder / CONFIG_FILE).is_file()
        except OSError as error:
            self._report_unusable(folder, str(error))
            return False
