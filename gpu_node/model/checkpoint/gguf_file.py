"""A GGUF file, whole or in parts: its metadata and the offset of each tensor, read once; and its mapped content.

The `gguf` package also parses headers, but creates an array for each token of the vocabulary, which takes seconds.
Skipping lists takes milliseconds. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.limits import (
    GGUF_LIST_LIMITS,
    MAX_DIM,
    MAX_LAYERS,
    MAX_LIST,
    MAX_TENSORS,
    MAX_TEXT_BYTES,
    check_metadata,
)
from penstock.gpu_node.model.checkpoint.mapped_file import MappedFile
from penstock.gpu_node.model.checkpoint.usable_file import require_usable
from penstock.gpu_node.model.checkpoint.weight_files import gguf_names, gguf_parts

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
"""Of a tensor, as in ggml (`GGML_MAX_DIMS`)."""
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {number: struct.Struct(f"<{code}") for number, code in _CODES.items()}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_EMBEDDING = "token_embd.weight"
"""The tensor of the tokens' embeddings."""
_LAYER = re.compile(r"blk\.([0-9]{1,9})\.")
_OF_LAYERS = (
    *(".attention.head_count_kv", ".attention.recurrent_layers", ".attention.sliding_window_pattern"),
    ".feed_forward_length",
)
"""What the keys end with that may have a value for each layer. Such lists are always read."""
_QKV = re.compile(r"blk\.([0-9]{1,9})\.attn_qkv\.(?:weight|bias)")
_QWEN, _CONV = "qwen3", "ssm_conv1d.weight"
_SEPARATE_QKV = (
    *("llama", "granite", "smollm3", "nemotron_h", "qwen", "olmo2", "gemma2", "gemma3", "gpt-oss"),
    *("cohere2", "lfm2", "falcon-h1"),
)
"""How architectures are called whose queries, keys and values are tensors of their own."""
_SPLIT_COUNT, _SPLIT_NO = "split.count", "split.no"
"""The number of a model's parts, and the index of one of them."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a GGUF file: its ggml format in lower case, its shape, and its byte range in the file."""

    ggml_type: str
    shape: tuple[int, ...]
    """The tensor's dimensions, the slowest one first."""
    start: int
    num_bytes: int
    part: int = 0
    """The index of its file, if the model is split."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata of a GGUF file with the lists of layers and those that were asked for, and its tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(content: memoryview, lists: Container[str] = ()) -> GgufHeader:
    """Parse the header of a complete file. Raises ConfigError for a file that is truncated, invalid or no GGUF.

    lists: the keys of lists to read, beside those of layers; other lists are skipped.
    """
    cursor = _Cursor(content, lists)
    try:
        if cursor.take(4) != _MAGIC or cursor.number(_U32) not in _VERSIONS:
            raise ConfigError("the file is not a GGUF file of version 2 or 3")
        num_tensors, num_entries = cursor.number(_U64), cursor.number(_U64)
        for what, count in (("tensors", num_tensors), ("metadata entries", num_entries)):
            if count > MAX_TENSORS:
                raise ConfigError(f"the file says that it has {count:,} {what}; at most {MAX_TENSORS:,} are read")
        metadata = dict(cursor.entry() for _ in range(num_entries))
        infos = [cursor.tensor_info() for _ in range(num_tensors)]
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ConfigError(f"the header is cut short or broken: {error}") from error
    check_metadata(metadata)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ConfigError(f"general.alignment is {alignment!r} but must be a whole number of at least 1")
    data_start = -(-cursor.at // alignment) * alignment
    tensors = {name: _tensor(name, dims, kind, data_start + offset) for name, dims, kind, offset in infos}
    for name, tensor in tensors.items():
        if tensor.start + tensor.num_bytes > len(content):
            raise ConfigError(f"the file is cut short: tensor {name} ends past the end of the file")
    if not is_split(metadata):
        _check_tensors(metadata, tensors)
    return GgufHeader({key: value for key, value in metadata.items() if value is not None}, tensors)


def starts_as_gguf(path: Path) -> bool:
    """Return whether a file begins as a GGUF file does. Raises ConfigError if it cannot be read."""
    require_usable(path)
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def is_split(metadata: Mapping[str, Any]) -> bool:
    """Return whether a file is one of several parts."""
    count = metadata.get(_SPLIT_COUNT)
    return isinstance(count, int) and count > 1


def _check_tensors(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """Refuse sizes of the metadata that the tensors do not have. Raises ConfigError that names key and tensor.

    Later code allocates objects per layer, so a count of billions would exhaust memory before it finds a missing
    tensor. With too small a count, the last layers would be left out without a word.
    """
    name = metadata.get("general.architecture")
    key, layers = f"{name}.block_count", {match[1] for one in tensors if (match := _LAYER.match(one))}
    count, found = metadata.get(key), max(map(int, layers), default=-1) + 1
    # A file may lack the layers that predict further tokens, which no runner reads.
    predicting = metadata.get(f"{name}.nextn_predict_layers") or 0
    if count is not None and not found <= count <= (found or len(tensors)) + predicting:
        raise ConfigError(f"{key} is {count}, but the file has the tensors of {found} layers (blk.N)")
    embedding = tensors.get(_EMBEDDING)
    shape = (0, 0) if embedding is None else embedding.shape
    for key, size in zip((f"{name}.vocab_size", f"{name}.embedding_length"), shape, strict=False):
        if size and (count := metadata.get(key)) is not None and count != size:
            raise ConfigError(f"{key} is {count}, but {_EMBEDDING} has the shape {list(shape)}")


def _tensor(name: str, dims: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    try:
        ggml_type = GGMLQuantizationType(kind)
    except ValueError:
        raise ConfigError(f"tensor {name} has the unknown format {kind}") from None
    block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
    if not dims or dims[0] % block_size:
        num_values = dims[0] if dims else 0
        raise ConfigError(f"tensor {name} has rows of {num_values} values, not whole blocks of {block_size}")
    if not all(1 <= dim <= MAX_DIM for dim in dims):
        raise ConfigError(f"tensor {name} has the shape {list(dims)}, whose sizes must be from 1 to {MAX_DIM:,}")
    return GgufTensor(ggml_type.name.lower(), dims[::-1], start, prod(dims) // block_size * block_bytes)


def _with_parts(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, GgufTensor]:
    """Return the tensors with queries, keys and values apart, which the converter joins with --fuse-qkv."""
    architecture, found = str(metadata.get("general.architecture")), dict(tensors)
    if not architecture.startswith(_SEPARATE_QKV):
        return found
    for name, tensor in tensors.items():
        match = _QKV.fullmatch(name)
        keys = 0 if match is None else _keys_of(metadata, architecture, int(match[1]))
        queries = tensor.shape[0] - 2 * keys
        # The recurrent layers of Qwen have a tensor of this name for the inputs of their convolution.
        if match is None or not 0 < keys <= queries or (_QWEN in architecture and f"blk.{match[1]}.{_CONV}" in tensors):
            continue
        del found[name]
        row_bytes, at = tensor.num_bytes // tensor.shape[0], tensor.start
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            shape, num_bytes = (rows, *tensor.shape[1:]), rows * row_bytes
            found[name.replace("_qkv", f"_{part}")] = replace(tensor, shape=shape, start=at, num_bytes=num_bytes)
            at += num_bytes
    return found


def _keys_of(metadata: Mapping[str, Any], architecture: str, layer: int) -> int:
    """Return the channels of a layer's keys; 0 if the metadata does not say them."""
    heads, width = (metadata.get(f"{architecture}.{key}") for key in ("attention.head_count", "embedding_length"))
    count = metadata.get(f"{architecture}.attention.head_count_kv", heads)
    count = count[layer] if isinstance(count, list) and layer < len(count) else count
    dim = metadata.get(f"{architecture}.attention.key_length")
    if dim is None and isinstance(width, int) and isinstance(heads, int) and heads:
        dim = width // heads
    return count * dim if isinstance(count, int) and isinstance(dim, int) else 0


def _most_values(key: str) -> int:
    return MAX_LAYERS if key.endswith(_OF_LAYERS) else GGUF_LIST_LIMITS.get(key, MAX_LIST)


class _Cursor:
    """Reads values one after another; raises struct.error past the end."""

    def __init__(self, content: memoryview, lists: Container[str]) -> None:
        self._content = content
        self._lists = lists
        self.at = 0

    def number(self, layout: struct.Struct) -> int:
        value: int = layout.unpack_from(self._content, self.at)[0]
        self.at += layout.size
        return value

    def take(self, num_bytes: int) -> bytes:
        left = len(self._content) - self.at
        if left < num_bytes:
            raise struct.error(f"{num_bytes} bytes wanted, {left} left")
        taken = bytes(self._content[self.at : self.at + num_bytes])
        self.at += num_bytes
        return taken

    def text(self) -> str:
        num_bytes = self.number(_U64)
        if num_bytes > MAX_TEXT_BYTES:
            raise ConfigError(f"a text of the header has {num_bytes:,} bytes; at most {MAX_TEXT_BYTES:,} are read")
        return self.take(num_bytes).decode()

    def entry(self) -> tuple[str, Any]:
        """Read a metadata key and its value. A list that is skipped has the value None."""
        key, kind = self.text(), self.number(_U32)
        if kind in _SCALARS:
            return key, self.number(_SCALARS[kind])
        if kind == _STRING:
            return key, self.text()
        if kind != _ARRAY:
            raise ConfigError(f"{key} has the unknown type {kind}")
        return key, self._list(key, is_wanted=key in self._lists or key.endswith(_OF_LAYERS))

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read a tensor's name, dimensions (fastest first), format, and offset from the start of the data."""
        name, num_dims = self.text(), self.number(_U32)
        if num_dims > _MAX_DIMS:
            raise ConfigError(f"tensor {name} has {num_dims} dimensions; at most {_MAX_DIMS} are allowed")
        dims = tuple(self.number(_U64) for _ in range(num_dims))
        return name, dims, self.number(_U32), self.number(_U64)

    def _list(self, key: str, *, is_wanted: bool) -> list[Any] | None:
        kind, length = self.number(_U32), self.number(_U64)
        if length > (most := _most_values(key)):
            raise ConfigError(f"{key} has {length:,} values; at most {most:,} are read")
        if kind == _STRING and is_wanted:
            return self._texts(length)
        if kind == _STRING:
            self._skip_texts(length)
            return None
        if kind not in _SCALARS:
            raise ConfigError(f"{key} is a list of the unknown type {kind}")
        start, self.at = self.at, self.at + length * _SCALARS[kind].size
        return list(struct.unpack_from(f"<{length}{_CODES[kind]}", self._content, start)) if is_wanted else None

    def _texts(self, count: int) -> list[str]:
        start = self.at
        self._skip_texts(count)
        # A slice of bytes is quicker than one of a memoryview.
        content, at, unpack, texts = bytes(self._content[start : self.at]), 0, _U64.unpack_from, []
        for _ in range(count):
            end = at + 8 + unpack(content, at)[0]
            texts.append(content[at + 8 : end].decode())
            at = end
        return texts

    def _skip_texts(self, count: int) -> None:
        content, at, unpack = self._content, self.at, _U64.unpack_from
        for _ in range(count):
            at += 8 + unpack(content, at)[0]
        self.at = at


class GgufFile:
    """A GGUF file that is mapped, with all its parts if it is split. The first part has the metadata."""

    def __init__(self, path: Path) -> None:
        """`path`: the file, or any part of a split one. Raises ConfigError for a missing part and an empty file."""
        self.paths = gguf_parts(path)
        self.path = self.paths[0]
        self.parts = tuple(MappedFile(part) for part in self.paths)
        self._header: GgufHeader | None = None

    @property
    def header(self) -> GgufHeader:
        """The header with the lists of layers alone. Raises ConfigError that names a truncated or invalid file."""
        if self._header is None:
            self._header = self.header_with(())
        return self._header

    def header_with(self, lists: Container[str]) -> GgufHeader:
        """Return the header with some lists. Raises ConfigError as `header` does."""
        found = self._read(0, lists)
        if len(self.parts) > 1 or is_split(found.metadata):
            found = self._joined(found)
        found = replace(found, tensors=_with_parts(found.metadata, found.tensors))
        # A vocabulary takes many megabytes, so it is not kept.
        kept = {key: value for key, value in found.metadata.items() if key not in lists}
        self._header = replace(found, metadata=kept)
        return found

    def bytes_of(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """Return the bytes of a tensor."""
        return self.parts[tensor.part].content[tensor.start : tensor.start + tensor.num_bytes]

    def _path_of(self, part: int) -> Path:
        return self.path.with_name(gguf_names(self.path.name)[part])

    def _read(self, part: int, lists: Container[str]) -> GgufHeader:
        try:
            return read_header(self.parts[part].content.data, lists)
        except ConfigError as error:
            raise ConfigError(f"cannot read {self._path_of(part)}: {error.message}") from error

    def _joined(self, first: GgufHeader) -> GgufHeader:
        """Return the header of the first part with the tensors of all. Raises ConfigError for parts that do not fit."""
        headers = [first, *(self._read(part, ()) for part in range(1, len(self.parts)))]
        tensors: dict[str, GgufTensor] = {}
        for part, header in enumerate(headers):
            number, count = header.metadata.get(_SPLIT_NO), header.metadata.get(_SPLIT_COUNT)
            if (number, count) != (part, len(headers)):
                is_part = f"is part {number} of {count}" if count is not None else "is not part of a split model"
                expected = f"its name must end in -{(number or 0) + 1:05}-of-{count or 1:05}.gguf"
                raise ConfigError(f"cannot read {self._path_of(part)}: its metadata says that it {is_part}; {expected}")
            tensors |= {name: replace(tensor, part=part) for name, tensor in header.tensors.items()}
        total = first.metadata.get("split.tensors.count", len(tensors))
        if total != len(tensors):
            raise ConfigError(f"cannot read {self.path}: its parts have {len(tensors)} tensors, not {total}")
        try:
            _check_tensors(first.metadata, tensors)
        except ConfigError as error:
            raise ConfigError(f"cannot read {self.path}: {error.message}") from error
        return replace(first, tensors=tensors)
