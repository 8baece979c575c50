"""Read tensors of safetensors and GGUF files under Hugging Face's names, memory-mapped and without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.limits import MAX_DIM, MAX_HEADER_BYTES, MAX_TENSOR_DIMS, MAX_TENSORS
from penstock.gpu_node.model.checkpoint.dummy import RandomWeights
from penstock.gpu_node.model.checkpoint.expert_stacks import EXPERT, one_of_experts, one_of_stack, turned_matrix
from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile, GgufTensor
from penstock.gpu_node.model.checkpoint.gguf_names import GgufNames, half_of_experts
from penstock.gpu_node.model.checkpoint.mapped_file import MappedFile
from penstock.gpu_node.model.checkpoint.scaled_matrix import ScaledTensor
from penstock.gpu_node.model.checkpoint.source import ModelSource
from penstock.gpu_node.model.checkpoint.stored_kinds import (
    DerivedTensor,
    FindStored,
    ReadScaled,
    Stored,
    StoredTensor,
    check_kind,
)
from penstock.gpu_node.model.checkpoint.weight_files import INDEX, gguf_parts, safetensors_files, weight_map
from penstock.runtime.reading import reading, reason_of

_SAFETENSORS_KINDS = {
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "F32": ("float32", 4),
    "F8_E4M3": ("f8_e4m3", 1),
    "I8": ("i8", 1),
    "U8": ("u8", 1),
    "I32": ("i32", 4),
    "I64": ("i64", 8),
}
"""The supported safetensors dtypes, with the bytes per number."""
_MATRIX_DIMS = 2
_GGML_KINDS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_BASES = ("model", "gpt_neox", "transformer", "backbone")
"""What names of a decoder's tensors begin with in a checkpoint of the decoder and its head."""
_ENCODER_BASES = ("bert", "roberta", "data2vec_text", "electra", "distilbert", "nomic_bert", "gte")
"""What names of an encoder's tensors begin with in a checkpoint of the encoder and a head."""
_PUBLISHED_BASES = {"gte": "new"}
"""What they begin with in published files instead."""
_OLD_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Ends of the names of norms, and what they were in files of BERT's first years."""
_HEAD = "lm_head"
TEXT_BASES = ("model.language_model", "language_model.model", "model.text_model")
"""What these names begin with in a checkpoint of a model that has a decoder as a part, such as one for images."""
TEXT_HEADS = ("language_model.lm_head", "model.lm_head")
_SCALED_PARTS = (
    *("qweight", "qzeros", "scales", "g_idx", "weight", "weight_packed", "weight_shape", "weight_scale"),
    *("weight_scale_inv", "weight_zero_point", "weight_g_idx", "weight_scale_2", "weight_global_scale"),
)
"""The last parts of the names of tensors that make up a quantized matrix."""
_SIZES = (
    "compare config.json, or a GGUF file's metadata: vocab_size, hidden_size, intermediate_size, num_hidden_layers, "
    "num_attention_heads, num_key_value_heads (num_kv_heads), head_dim, num_experts, attention_bias, mlp_bias, "
    "tie_word_embeddings, quantization_config, of Falcon new_decoder_architecture, parallel_attn and multi_query"
)
"""The fields of which the names and shapes of tensors are made, for a reader of an error."""


class Checkpoint:
    """The tensors of a model, found by name."""

    _random: RandomWeights | None = None
    """Makes the tensors of a model without weight files."""

    def __init__(
        self,
        find: FindStored,
        files: Mapping[Path, MappedFile],
        read_scaled: ReadScaled | None = None,
        names: Iterable[str] = (),
        shown: Callable[[str], str] = str,
    ) -> None:
        """files: the weight files; read_scaled: reads quantized matrices; names: of the tensors in the files.

        shown: returns how errors name a tensor.
        """
        self.names = frozenset(names)
        """The names of the tensors in the files."""
        self._find, self._shown = find, shown
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
            files = dict(zip(gguf.paths, gguf.parts, strict=True))
            tensors = _GgufTensors(gguf)
            return cls(tensors.find, files, names=gguf.header.tensors, shown=tensors.shown)
        files = {path: MappedFile(path) for path in weight_files(source)}
        stored = _tensors_of(source.folder, files)
        return cls(_finder_of(stored), files, read_scaled, stored)

    def get(self, name: str, *shape: int) -> Stored:
        """Return a tensor by name. Its data is read lazily from the mapped file, unless it is quantized.

        Raises ConfigError if the tensor is missing, has another shape than the config says, or an unsupported dtype.
        """
        tensor: Stored | None = None
        try:
            tensor = self._scaled(name) or self._find(name) or turned_matrix(name, self._find)
            if tensor is None and self._random is not None:
                tensor = StoredTensor(name, "bfloat16", shape, _rows(self._random.tensor(name, shape), shape))
            if tensor is None:
                raise ConfigError(f"the checkpoint has no tensor {self._shown(name)}; {_SIZES}")
            if tensor.shape != shape:
                found = f"tensor {self._shown(name)} has shape {list(tensor.shape)}, the config says {list(shape)}"
                raise ConfigError(f"{found}; {_SIZES}")
            if isinstance(tensor, StoredTensor):
                check_kind(tensor)
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

    def _scaled(self, name: str) -> ScaledTensor | DerivedTensor | None:
        matrix = name.removesuffix(".weight")
        if self._read_scaled is None or matrix == name:
            return None
        try:
            tensor = self._read_scaled(matrix, self._find)
            is_whole = not isinstance(tensor, ScaledTensor) or tensor.is_whole
        except (ValueError, TypeError, IndexError, ArithmeticError) as error:
            parts = {part: self._find(f"{matrix}.{part}") for part in _SCALED_PARTS}
            shapes = ", ".join(f"{part} {list(one.shape)}" for part, one in parts.items() if one is not None)
            raise ConfigError(f"the tensors of {matrix} do not fit together ({shapes}): {error}") from error
        if isinstance(tensor, ScaledTensor) and not is_whole:
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
        return next((found for one in _known_names(name) if (found := tensors.get(one)) is not None), None)

    def find(name: str) -> StoredTensor | None:
        return stored(name) or one_of_experts(name, stored)

    return find


def _known_names(name: str) -> tuple[str, ...]:
    """Return the names that a tensor may have in a checkpoint."""
    first, _, rest = name.partition(".")
    if first in _BASES:
        return (name, rest, f"backbone.{rest}", *(f"{base}.{rest}" for base in TEXT_BASES))
    if first in _ENCODER_BASES:
        end = ".".join(name.rsplit(".", 2)[1:])
        old_rest = rest.removesuffix(end) + _OLD_NORMS.get(end, end)
        published = f"{_PUBLISHED_BASES.get(first, first)}.{rest}"
        return tuple(dict.fromkeys((name, rest, published, f"{first}.{old_rest}", old_rest)))
    return (name, *(f"{head}.{rest}" for head in TEXT_HEADS)) if first == _HEAD else (name,)


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

    def shown(self, name: str) -> str:
        """Return a tensor's name with the file's own name for it, for a reader of an error."""
        own = self._names.name_of(name)
        return name if own is None else f"{name} ({own})"

    def find(self, name: str) -> StoredTensor | None:
        gguf_name, expert = self._names.name_of(name) or "", EXPERT.search(name)
        found = self._names.stored_name(gguf_name, self._header.tensors)
        if found is None:
            return self._joined(name, gguf_name, None if expert is None else int(expert[1]))
        tensor: GgufTensor = self._header.tensors[found]
        stored, shape = self._stored(name, gguf_name, tensor), tensor.shape
        if expert is not None:
            return one_of_stack(stored, int(expert[1]))
        try:
            order = self._names.row_order_of(name, shape[0])
        except ConfigError as error:
            raise ConfigError(f"cannot read {self._paths[tensor.part]}: {gguf_name}: {error.message}") from error
        return stored if order is None else stored.take_rows(order, *shape)

    def _stored(self, name: str, gguf_name: str, tensor: GgufTensor) -> StoredTensor:
        kind, shape = _GGML_KINDS.get(tensor.ggml_type, tensor.ggml_type), tensor.shape
        return StoredTensor(name, kind, self._names.shape_of(gguf_name, shape), _rows(self._bytes_of(tensor), shape))

    def _joined(self, name: str, gguf_name: str, expert: int | None) -> StoredTensor | None:
        """Return a matrix of a tensor that holds others beside it; None if the file has none."""
        tensors = self._header.tensors
        if expert is None:
            inputs = self._names.joined_inputs(gguf_name)
            whole = None if inputs is None else tensors.get(inputs[0])
            if inputs is None or whole is None or whole.shape[0] <= int(inputs[1].max()):
                return None
            return self._stored(name, inputs[0], whole).take_rows(inputs[1], len(inputs[1]), *whole.shape[1:])
        place = half_of_experts(gguf_name)
        tensor = None if place is None else tensors.get(place[0])
        both = None if place is None or tensor is None else one_of_stack(self._stored(name, place[0], tensor), expert)
        if place is None or both is None or len(both.shape) != _MATRIX_DIMS:
            return None
        half = both.shape[0] // 2
        return both.span(place[1] * half, (place[1] + 1) * half)
