"""A described model to a native runner, where this machine and the model allow one."""

from __future__ import annotations

import logging
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.cache import cache_folder
from penstock.gpu_node.model.checkpoint import Checkpoint, StoredTensor
from penstock.gpu_node.model.description import Description, cache_sizes
from penstock.gpu_node.model.native.formats import format_of, rows_of
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.positions import rope_angles
from penstock.gpu_node.model.protocol import RunnerOptions
from penstock.gpu_node.model.source import Progress
from penstock.gpu_node.model.spec import ModelSpec
from penstock.gpu_node.model.tensors import DecoderTensors, StoredNorm
from penstock.kernels.cpu.build import BuildError, library_path
from penstock.kernels.cpu.library import Format, KvFormat, NativeModel, NativeSpec, Place, Slot, Vector
from penstock.kernels.cpu.probe import Isa, best_isa, cores_to_stay_on, cpu_flags, usable_cores

_log = logging.getLogger(__name__)

PAGE_TOKENS = 16
MAX_HEAD_DIM = 256
_KV_FORMATS = {"auto": KvFormat.BF16, "bfloat16": KvFormat.BF16, "int8": KvFormat.INT8}


class NativeUnavailableError(Exception):
    """The native kernels do not run here, or not this model; says why."""


def load_native(described: Description, options: RunnerOptions, progress: Progress) -> tuple[NativeRunner, str]:
    """The runner, and a name for its arithmetic.

    Raises NativeUnavailableError, and ConfigError for a checkpoint that is missing, cut short or not what it says.
    """
    _check(described, options)
    isa = best_isa(cpu_flags())
    if isa is None:
        raise NativeUnavailableError("the CPU has neither AVX-512 with BF16 and VNNI nor AVX2")
    try:
        library = library_path(isa, cache_folder() / "native", lambda done: progress("compile", done))
    except BuildError as error:
        raise NativeUnavailableError(str(error)) from error
    spec, kv_format = described.spec, _KV_FORMATS[options.kv_cache_dtype]
    sizes = cache_sizes(described, options, _kv_token_bytes(spec, kv_format))
    threads = options.num_threads or usable_cores()
    native_spec = _native_spec(described, options, sizes.num_blocks, kv_format)
    cores = cores_to_stay_on(threads)
    model = NativeModel(library, native_spec, threads, cores)
    formats = _Packer(model, described, options.quantization, progress).pack()
    arithmetic = _arithmetic(isa, formats, kv_format, turned=bool(native_spec.turned))
    facts = arithmetic, sizes.num_device_blocks, threads, sizes.num_host_blocks
    _log.info("native runner %s kv_blocks=%d threads=%d swap_blocks=%d", *facts)
    return NativeRunner(model, sizes, vocab_size=spec.vocab_size, core=cores[0] if cores else None), arithmetic


def _check(described: Description, options: RunnerOptions) -> None:
    spec = described.spec
    if options.dtype not in ("auto", "bfloat16"):
        raise NativeUnavailableError(f"they compute in bfloat16, not {options.dtype}")
    if options.dtype == "auto" and described.source.gguf is None and described.stored_dtype == "float32":
        raise NativeUnavailableError("the checkpoint is float32; dtype bfloat16 would round it")
    if options.kv_cache_dtype not in _KV_FORMATS:
        raise NativeUnavailableError(f"they keep keys and values in bfloat16 or int8, not {options.kv_cache_dtype}")
    if options.block_size % PAGE_TOKENS:
        raise NativeUnavailableError(f"they want a block_size that is a multiple of {PAGE_TOKENS}")
    if spec.head_dim % PAGE_TOKENS or spec.head_dim > MAX_HEAD_DIM:
        raise NativeUnavailableError(f"head_dim {spec.head_dim} is no multiple of {PAGE_TOKENS} up to {MAX_HEAD_DIM}")
    missing = [name for name, is_there in _features_missing(spec).items() if is_there]
    if missing:
        raise NativeUnavailableError(f"they have no {', no '.join(missing)}")


def _features_missing(spec: ModelSpec) -> dict[str, bool]:
    """What the kernels cannot compute, and whether the model has it."""
    return {
        "layer norms": spec.norm == "layer",
        "MLP without a gate": not spec.is_gated,
        f"activation {spec.activation}": spec.activation != "silu",
        "biases": spec.qkv_bias or spec.out_bias or spec.mlp_bias,
        "norms of heads": spec.names.q_norm is not None,
        "ALiBi": spec.rope is None,
        "heads that rotate in part": spec.rope is not None and spec.rope.dim != spec.head_dim,
        "sliding windows": any(spec.windows),
        "parallel attention and MLP": spec.parallel_residual,
    }


def _kv_token_bytes(spec: ModelSpec, kv_format: KvFormat) -> int:
    """Of all layers; int8 keeps a float32 scale for each key and value."""
    head_bytes = 2 * spec.head_dim if kv_format is KvFormat.BF16 else spec.head_dim + 4
    return 2 * spec.num_layers * spec.num_kv_heads * head_bytes


def _native_spec(described: Description, options: RunnerOptions, num_blocks: int, kv_format: KvFormat) -> NativeSpec:
    spec = described.spec
    return NativeSpec(
        num_layers=spec.num_layers,
        hidden=spec.hidden_size,
        intermediate=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab=spec.vocab_size,
        max_position=described.max_model_len,
        norm_eps=spec.norm_eps,
        block_size=options.block_size,
        num_blocks=num_blocks,
        kv_format=kv_format,
        turned=_is_turned(options.quantization),
    )


def _is_turned(quantization: str) -> bool:
    """One scale for a whole row does not do for channels with outliers; groups do without."""
    return quantization == "int8"


def _arithmetic(isa: Isa, formats: set[Format], kv_format: KvFormat, *, turned: bool) -> str:
    weights = "+".join(weights.name.lower() for weights in sorted(formats))
    return f"native-{isa}-{weights}{'-turned' if turned else ''}-kv-{kv_format.name.lower()}"


_Gains: TypeAlias = NDArray[np.float32] | None


class _Packer:
    """Reads a checkpoint's tensors and lays them out for the kernels."""

    def __init__(self, model: NativeModel, described: Description, quantization: str, progress: Progress) -> None:
        self._model = model
        self._spec = described.spec
        self._max_model_len = described.max_model_len
        self._tensors = DecoderTensors(Checkpoint.open(described.source), described.spec)
        self._quantization = quantization
        self._turned = _is_turned(quantization)
        self._progress = progress
        self._formats: set[Format] = set()

    def pack(self) -> set[Format]:
        """All of it; the formats that were used."""
        spec, tensors = self._spec, self._tensors
        for layer in range(spec.num_layers):
            self._pack_layer(layer)
            self._progress("load", (layer + 1) / (spec.num_layers + 1))
        gains = self._set_norm(Vector.FINAL_NORM, 0, tensors.final_norm())
        self._fuse(Slot.HEAD, 0, (tensors.head(),), gains)
        # Only as long as the norm does not go into the head are tied ones the same.
        if not spec.tied_head or gains is not None:
            self._fuse(Slot.EMBEDDING, 0, (tensors.embedding(),))
        if spec.rope is not None:
            cos, sin = rope_angles(spec.rope, self._max_model_len)
            self._model.set_vector(Vector.COS, 0, cos)
            self._model.set_vector(Vector.SIN, 0, sin)
        self._progress("load", 1.0)
        return self._formats

    def _pack_layer(self, layer: int) -> None:
        tensors = self._tensors
        gains = self._set_norm(Vector.ATTENTION_NORM, layer, tensors.attention_norm(layer))
        self._fuse(Slot.QKV, layer, tensors.qkv(layer).weights, gains)
        self._fuse(Slot.OUT, layer, tensors.out(layer).weights)
        mlp_norm = tensors.mlp_norm(layer)
        gains = None if mlp_norm is None else self._set_norm(Vector.MLP_NORM, layer, mlp_norm)
        gate, up = tensors.mlp_in(layer).weights
        self._interleave(Slot.GATE_UP, layer, gate, up, gains)
        self._fuse(Slot.DOWN, layer, tensors.mlp_out(layer).weights)

    def _fuse(self, slot: Slot, layer: int, parts: tuple[StoredTensor, ...], gains: _Gains = None) -> None:
        """One matrix with the parts' rows one after the other."""
        self._allocate(slot, layer, parts, sum(part.shape[0] for part in parts))
        first = 0
        for part in parts:
            source, data, order = rows_of(part)
            self._model.fill(slot, layer, source, data, first=first, row_order=order, gains=gains)
            first += part.shape[0]

    def _interleave(self, slot: Slot, layer: int, one: StoredTensor, other: StoredTensor, gains: _Gains) -> None:
        """One matrix in which the parts' rows alternate by halves of a panel."""
        self._allocate(slot, layer, (one, other), 2 * one.shape[0])
        for place, part in ((Place.FIRST_HALF, one), (Place.SECOND_HALF, other)):
            source, data, order = rows_of(part)
            self._model.fill(slot, layer, source, data, place=place, row_order=order, gains=gains)

    def _allocate(self, slot: Slot, layer: int, parts: tuple[StoredTensor, ...], rows: int) -> None:
        # Rows of a turned embedding are read one at a time, and an error in one stays in the sum of all layers.
        precise = self._turned and slot is Slot.EMBEDDING
        weights = Format.BF16 if precise else format_of(parts, self._quantization)
        if not precise:
            self._formats.add(weights)
        self._model.allocate(slot, layer, weights, rows, parts[0].shape[1])

    def _set_norm(self, vector: Vector, layer: int, norm: StoredNorm) -> _Gains:
        """Give a norm its weights; a turned model's go into the matrix behind it, for which they come back."""
        gains = norm.weight.to_float32()
        self._model.set_vector(vector, layer, np.ones_like(gains) if self._turned else gains)
        return gains if self._turned else None
