"""Read tensors of safetensors and GGUF files under Hugging Face's names, memory-mapped and without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.limits import MAX_DIM, MAX_HEADER_BYTES, MAX_TENSOR_DIMS, MAX_TENSORS
from penstock.gpu_node.model.checkpoint.dummy import RandomWeights
from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile, GgufTensor
from penstock.gpu_node.model.checkpoint.gguf_names import EXPERT, GgufNames
from penstock.gpu_node.model.checkpoint.mapped_file import MappedFile
from penstock.gpu_node.model.checkpoint.scaled_matrix import ScaledTensor
from penstock.gpu_node.model.checkpoint.source import ModelSource
from penstock.gpu_node.model.checkpoint.weight_files import INDEX, gguf_parts, safetensors_files, weight_map
from penstock.runtime.reading import reading, reason_of

_SAFETENSORS_KINDS = {
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "F32": ("float32", 4),
    "F8_E4M3": ("f8_e4m3", 1),
    "I8": ("i8", 1),
    "I32": ("i32", 4),
    "I64": ("i64", 8),
}
"""The supported safetensors dtypes, with the bytes per number."""
_FLOAT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_GGML_KINDS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_BASES = ("model", "gpt_neox", "transformer", "backbone")
"""What names of a decoder's tensors begin with in a checkpoint of the decoder and its head."""
_STACK_DIMS = 3
_FUSED: Mapping[str, tuple[tuple[str, int | None], ...]] = {
    "gate_proj.weight": (("experts.gate_up_proj", 0), ("input_linear.weight", 0)),
    "up_proj.weight": (("experts.gate_up_proj", 1), ("input_linear.weight", 1), ("experts.up_proj", None)),
    "down_proj.weight": (("experts.down_proj", None), ("output_linear.weight", None)),
}
"""Tensors of all experts, by the last parts of an expert's own names; 0 and 1 are halves of its rows."""
_SCALED_PARTS = (
    *("qweight", "qzeros", "scales", "g_idx", "weight", "weight_packed", "weight_shape", "weight_scale"),
    *("weight_scale_inv", "weight_zero_point", "weight_g_idx"),
)
"""The last parts of the names of tensors that make up a quantized matrix."""
_SIZES = (
    "compare config.json, or a GGUF file's metadata: vocab_size, hidden_size, intermediate_size, num_hidden_layers, "
    "num_attention_heads, num_key_value_heads (num_kv_heads), head_dim, num_experts, attention_bias, mlp_bias, "
    "tie_word_embeddings, quantization_config, of Falcon new_decoder_architecture, parallel_attn and multi_query"
)
"""The fields of which the names and shapes of tensors are made, for a reader of an error."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the representation of its file."""

    name: str
    kind: str
    """`bfloat16`, `float16`, `float32`, or a ggml format such as `q4_0`."""
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    """[rows, bytes per row], read-only, mapped from the file; a vector is one row."""
    row_order: NDArray[np.int32] | None = None
    """Row i of Hugging Face's layout is stored as row `row_order[i]`; None: rows are in order."""
    skipped: int = 0
    """Columns of the first block of each row that do not belong to the tensor, because it was cut inside a block."""

    def take_rows(self, rows: NDArray[np.int32], *shape: int) -> StoredTensor:
        """Return a tensor of the given rows; for a vector, of the given elements."""
        if len(self.shape) == 1:
            values = self.to_float32()[rows]
            return StoredTensor(self.name, "float32", shape, values.view(np.uint8).reshape(1, -1))
        order = rows if self.row_order is None else self.row_order[rows]
        return replace(self, shape=shape, row_order=order)

    def span(self, start: int, end: int) -> StoredTensor:
        """Return a tensor of a matrix's rows from `start` to `end` (exclusive)."""
        shape = end - start, self.shape[1]
        if self.row_order is None:
            return replace(self, shape=shape, data=self.data[start:end])
        return replace(self, shape=shape, row_order=self.row_order[start:end])

    def columns(self, start: int, end: int) -> StoredTensor:
        """Return a tensor of a matrix's columns from `start` to `end` (exclusive)."""
        size, num_bytes = _block_of(self.kind)
        first, skipped = divmod(start + self.skipped, size)
        last = -(-(end + self.skipped) // size)
        data = self.data[:, first * num_bytes : last * num_bytes]
        return replace(self, shape=(self.shape[0], end - start), data=data, skipped=skipped)

    @property
    def is_in_whole_blocks(self) -> bool:
        """Whether each row of a matrix begins and ends with a block."""
        return not self.skipped and self.shape[1] % _block_of(self.kind)[0] == 0

    @property
    def rows(self) -> NDArray[np.uint8]:
        """`data` in Hugging Face's row order; a copy if the stored order differs."""
        return self.data if self.row_order is None else self.data[self.row_order]

    def to_float32(self) -> NDArray[np.float32]:
        """Return a copy of the values, in `shape` and in Hugging Face's row order."""
        values = _decoded(self, self.rows)
        if values.size > prod(self.shape):
            values = values[:, self.skipped : self.skipped + self.shape[1]]
        return values.reshape(self.shape)


Stored: TypeAlias = StoredTensor | ScaledTensor
FindStored: TypeAlias = Callable[[str], StoredTensor | None]
ReadScaled: TypeAlias = Callable[[str, FindStored], ScaledTensor | None]
"""Reads the matrix of a name, without `.weight`, from its quantized tensors; returns None if it is not quantized."""


class Checkpoint:
    """The tensors of a model, found by name."""

    _random: RandomWeights | None = None
    """Makes the tensors of a model without weight files."""

    def __init__(
        self, find: FindStored, files: Mapping[Path, MappedFile], read_scaled: ReadScaled | None = None
    ) -> None:
        """files: the weight files; read_scaled: reads quantized matrices."""
        self._find = find
        self._files = dict(files)
        self._read_scaled = read_scaled

    @classmethod
    def open(
        cls, source: ModelSource, read_scaled: ReadScaled | None = None, gguf: GgufFile | None = None
    ) -> Checkpoint:
        """Map a model's weight files. Raises ConfigError for files that are missing, truncated or invalid.

        read_scaled: reads the quantized matrices of a quantized checkpoint. gguf: the source's GGUF file, if open.
        """
        if source.is_dummy:
            (made := cls(lambda _: None, {}))._random = RandomWeights()
            return made
        if source.gguf is not None:
            gguf = gguf or GgufFile(source.gguf)
            return cls(_GgufTensors(gguf).find, dict(zip(gguf.paths, gguf.parts, strict=True)))
        files = {path: MappedFile(path) for path in weight_files(source)}
        return cls(_finder_of(_tensors_of(source.folder, files)), files, read_scaled)

    def get(self, name: str, *shape: int) -> Stored:
        """Return a tensor by name. Its data is read lazily from the mapped file, unless it is quantized.

        Raises ConfigError if the tensor is missing, has another shape than the config says, or an unsupported dtype.
        """
        tensor: Stored | None = None
        try:
            tensor = self._scaled(name) or self._find(name)
            if tensor is None and self._random is not None:
                tensor = StoredTensor(name, "bfloat16", shape, _rows(self._random.tensor(name, shape), shape))
            if tensor is None:
                raise ConfigError(f"the checkpoint has no tensor {name}; {_SIZES}")
            if tensor.shape != shape:
                found = f"tensor {name} has shape {list(tensor.shape)}, the config says {list(shape)}"
                raise ConfigError(f"{found}; {_SIZES}")
            if isinstance(tensor, StoredTensor):
                _check_kind(tensor)
        except MemoryError:
            raise  # `load_found` names the settings that take memory.
        except BaseException:
            with reading(self._file_of(tensor)):
                raise
        return tensor

    def _file_of(self, tensor: Stored | None) -> Path:
        """Return the file that has a tensor; for one that is missing the index, or else the first file."""
        if isinstance(tensor, StoredTensor):
            for path, file in self._files.items():
                if np.may_share_memory(file.content, tensor.data):
                    return path
        first = next(iter(self._files), Path())
        index = first.with_name(INDEX)
        return index if len(self._files) > 1 and index.is_file() else first

    def fault_in(self, is_enough: Callable[[], bool]) -> None:
        """Map the pages of all weight files, until `is_enough`."""
        for file in self._files.values():
            file.page_faults.take(is_enough)

    def release(self) -> None:
        """Release the file pages that were read; a later access reads them from the file again."""
        for file in self._files.values():
            file.release()

    def _scaled(self, name: str) -> ScaledTensor | None:
        matrix = name.removesuffix(".weight")
        if self._read_scaled is None or matrix == name:
            return None
        try:
            tensor = self._read_scaled(matrix, self._find)
            is_whole = tensor is None or tensor.is_whole
        except (ValueError, TypeError, IndexError, ArithmeticError) as error:
            parts = {part: self._find(f"{matrix}.{part}") for part in _SCALED_PARTS}
            shapes = ", ".join(f"{part} {list(one.shape)}" for part, one in parts.items() if one is not None)
            raise ConfigError(f"the tensors of {matrix} do not fit together ({shapes}): {error}") from error
        if tensor is not None and not is_whole:
            found = list(tensor.scales.shape)
            raise ConfigError(f"tensor {name} {list(tensor.shape)} has scales {found} of {tensor.group} columns each")
        return tensor


def weight_files(source: ModelSource) -> list[Path]:
    """Return a model's weight files. Raises ConfigError if files are missing or the weights are pickled."""
    if source.is_dummy:
        return []
    return safetensors_files(source.folder) if source.gguf is None else gguf_parts(source.gguf)


def _tensors_of(folder: Path, files: Mapping[Path, MappedFile]) -> dict[str, StoredTensor]:
    """Return the tensors of safetensors files by name: each from the file that the folder's index names, if any does.

    Raises ConfigError if two files have the same tensor, because one of them is old.
    """
    tensors: dict[str, StoredTensor] = {}
    owners, found_in = weight_map(folder), dict[str, str]()
    for path, file in files.items():
        for name, tensor in read_safetensors(path, file.content):
            if owners.get(name, path.name) != path.name:
                continue
            if name in tensors:
                raise ConfigError(f"{folder}: tensor {name} is in both {found_in[name]} and {path.name}; remove one")
            tensors[name], found_in[name] = tensor, path.name
    return tensors


def _finder_of(tensors: Mapping[str, StoredTensor]) -> FindStored:
    """Return a function that finds tensors by name. A model saved without its head lacks the first part of names.

    Nemotron's published files have another first part than its class in transformers.
    """

    def stored(name: str) -> StoredTensor | None:
        first, _, rest = name.partition(".")
        known = (name, rest, f"backbone.{rest}") if first in _BASES else (name,)
        return next((found for one in known if (found := tensors.get(one)) is not None), None)

    def find(name: str) -> StoredTensor | None:
        return stored(name) or _one_of_experts(name, stored)

    return find


def _one_of_experts(name: str, stored: FindStored) -> StoredTensor | None:
    """Return an expert's matrix from a tensor that has those of all experts, gates and up projections together."""
    expert = EXPERT.search(name)
    if expert is None or (fused := _FUSED.get(name[expert.end() :])) is None:
        return None
    found = ((stored(f"{name[: expert.start()]}.{stacked}"), part) for stacked, part in fused)
    stack, part = next(((one, part) for one, part in found if one is not None), (None, None))
    matrix = None if stack is None else _one_of_stack(stack, int(expert[1]))
    if matrix is None or part is None:
        return matrix
    half = matrix.shape[0] // 2
    return matrix.span(part * half, (part + 1) * half)


def read_safetensors(path: Path, content: NDArray[np.uint8]) -> Iterable[tuple[str, StoredTensor]]:
    """Return the tensors of a safetensors file by name. Raises ConfigError for a truncated or invalid file."""
    header_bytes = int.from_bytes(content[:8].tobytes(), "little")
    if 8 + header_bytes > len(content):
        raise ConfigError(f"{path} is cut short or not a safetensors file")
    if header_bytes > MAX_HEADER_BYTES:
        raise ConfigError(f"{path} has a header of {header_bytes:,} bytes; at most {MAX_HEADER_BYTES:,} are read")
    try:
        header: dict[str, dict[str, Any]] = json.loads(content[8 : 8 + header_bytes].tobytes())
        header.pop("__metadata__", None)
        if len(header) > MAX_TENSORS:
            raise ConfigError(f"the header has {len(header):,} tensors; at most {MAX_TENSORS:,} are read")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} has no valid safetensors header: {error}") from error
    tensors, name = [], ""
    try:
        for name, entry in header.items():
            tensors.append((name, _safetensor(name, entry, content[8 + header_bytes :])))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error
    except (ValueError, LookupError, TypeError) as error:
        reason = reason_of(error)
        raise ConfigError(f"{path} has no valid safetensors header: tensor {name[:200]}: {reason}") from error
    return tensors


def _safetensor(name: str, entry: Mapping[str, Any], data: NDArray[np.uint8]) -> StoredTensor:
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    # Python takes 4.0 and True for numbers that equal whole numbers.
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ConfigError(f"tensor {name} has a shape or offsets that are not whole numbers of at least 0")
    if len(shape) > MAX_TENSOR_DIMS or max(shape, default=0) > MAX_DIM:
        raise ConfigError(f"tensor {name} has more than {MAX_TENSOR_DIMS} sizes, or one above {MAX_DIM:,}")
    # The prefix keeps unknown dtypes from being taken for ggml formats, whose row lengths differ.
    kind, item_bytes = _SAFETENSORS_KINDS.get(entry["dtype"], (f"safetensors {entry['dtype']}", None))
    if not 0 <= start <= end <= len(data):
        raise ConfigError(f"the file is cut short: tensor {name} ends past the end of the file")
    if item_bytes is not None and end - start != prod(shape) * item_bytes:
        raise ConfigError(f"tensor {name} has {end - start} bytes, which do not match its shape {list(shape)}")
    return StoredTensor(name, kind, shape, _rows(data[start:end], shape))


def _rows(data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return data.reshape(prod(shape[:-1]), -1) if data.size else data.reshape(0, 0)


class _GgufTensors:
    """Finds the tensors of a GGUF file by Hugging Face's names, in Hugging Face's row order."""

    def __init__(self, file: GgufFile) -> None:
        self._bytes_of, self._paths = file.bytes_of, file.paths
        self._header = file.header
        try:
            self._names = GgufNames(self._header)
        except ConfigError as error:
            raise ConfigError(f"cannot read {file.path}: {error.message}") from error

    def find(self, name: str) -> StoredTensor | None:
        gguf_name, expert = self._names.name_of(name), EXPERT.search(name)
        tensor: GgufTensor | None = self._header.tensors.get(gguf_name or "")
        if tensor is None or gguf_name is None:
            return None
        kind, shape = _GGML_KINDS.get(tensor.ggml_type, tensor.ggml_type), tensor.shape
        stored = StoredTensor(name, kind, self._names.shape_of(gguf_name, shape), _rows(self._bytes_of(tensor), shape))
        if expert is not None:
            return _one_of_stack(stored, int(expert[1]))
        try:
            order = self._names.row_order_of(name, shape[0])
        except ConfigError as error:
            raise ConfigError(f"cannot read {self._paths[tensor.part]}: {gguf_name}: {error.message}") from error
        return stored if order is None else stored.take_rows(order, *shape)


def _one_of_stack(stack: StoredTensor, index: int) -> StoredTensor | None:
    """Return a matrix of a tensor [num_matrices, rows, columns]; None if there is no such matrix."""
    count, *shape = stack.shape if len(stack.shape) == _STACK_DIMS else (0, *stack.shape)
    if index >= count:
        return None
    return replace(stack, shape=tuple(shape), data=stack.data[index * shape[0] : (index + 1) * shape[0]])


def _from_bfloat16(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


_DECODERS: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    "bfloat16": _from_bfloat16,
    "float16": lambda data: data.view("<f2").astype(np.float32),
    "float32": lambda data: data.view("<f4").astype(np.float32),
}


def _decoded(tensor: StoredTensor, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    _check_kind(tensor)
    if tensor.kind in _DECODERS:
        return _DECODERS[tensor.kind](rows)
    values: NDArray[np.float32] = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType[tensor.kind.upper()])
    return values


def _block_of(kind: str) -> tuple[int, int]:
    """Return the columns of a block and its bytes; a float is a block of its own."""
    if kind in _FLOAT_BYTES:
        return 1, _FLOAT_BYTES[kind]
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return int(size), int(num_bytes)


def _check_kind(tensor: StoredTensor) -> None:
    if tensor.kind not in _DECODERS and not _can_dequantize(tensor.kind):
        raise ConfigError(f"tensor {tensor.name} is stored as {tensor.kind}, which cannot be read")


# Of one user, or of our own code and files.
@cache
def _can_dequantize(kind: str) -> bool:
    """Return whether the gguf package can dequantize a ggml format, found by trying one block."""
    try:
        ggml_type = GGMLQuantizationType[kind.upper()]
        dequantize(np.zeros((1, GGML_QUANT_SIZES[ggml_type][1]), np.uint8), ggml_type)
    except (KeyError, NotImplementedError):
        return False
    return True
