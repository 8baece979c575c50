"""msgpack encoding of a task's output inside a job's result, and access to its parts.

Texts and lists are byte strings: texts in UTF-8, tokens as int32, vectors as float32, token strings as one text and the
positions where they end. So a reader takes a part of a million tokens without copying or decoding the others.
"""

from __future__ import annotations

import codecs
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from penstock.contract.tasks import Detokenized, Embedding, TaskOutput, Tokenized
from penstock.queue.msgpack_codec import WireError, binary, pack, with_members

_INT: Final = "i"
_INT_BYTES = 4
_FLOAT: Final = "f"
_FLOAT_BYTES = 4
_WINDOW_BYTES = 16 << 10
Number = TypeVar("Number", int, float)


class PackedOutput:
    """The output of a task, whose parts are decoded on access. Raises WireError for malformed values."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """`fields`: the members of the output by name; byte strings may be memory views."""
        self.kind: str = _of_type(fields, "kind", str)
        self.num_tokens: int = _of_type(fields, "num", int, 0)
        self.max_model_len: int = _of_type(fields, "max_len", int, 0)
        self.has_strs = "ends" in fields
        self._text = _view(fields, "text")
        self._ids = _ints(fields, "tokens")
        self._ends = _ints(fields, "ends")
        self._strs = _view(fields, "strs")
        self.vector: memoryview[int] = _view(fields, "vector")
        """The bytes of an embedding: float32, little-endian."""

    def text_parts(self) -> Iterator[str]:
        """Yield the text in parts."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for at in range(0, len(self._text), _WINDOW_BYTES):
            yield decoder.decode(self._text[at : at + _WINDOW_BYTES])
        yield decoder.decode(b"", final=True)

    def token_ids(self) -> Iterator[int]:
        """Yield the token ids."""
        return iter(self._ids)

    def token_strs(self) -> Iterator[str]:
        """Yield the tokens as the vocabulary spells them."""
        start = 0
        for end in self._ends:
            yield str(self._strs[start:end], "utf-8", "replace")
            start = end

    def floats(self) -> array[float]:
        """Return the numbers of an embedding."""
        if len(self.vector) % _FLOAT_BYTES:
            raise WireError(f"a vector has {len(self.vector)} bytes, not a multiple of {_FLOAT_BYTES}")
        values = array(_FLOAT)
        values.frombytes(self.vector)
        return _little_endian(values)

    def whole(self) -> TaskOutput:
        """Return the decoded output. Raises WireError for an unknown kind."""
        if self.kind == "detokenize":
            return Detokenized("".join(self.text_parts()))
        if self.kind == "embed":
            return Embedding(tuple(self.floats()), self.num_tokens)
        if self.kind != "tokenize":
            raise WireError(f"unknown kind of output {self.kind[:64]!r}")
        strs = tuple(self.token_strs()) if self.has_strs else None
        return Tokenized(self.num_tokens, self.max_model_len, tuple(self.token_ids()), strs)


def encode_tokenized(
    num_tokens: int, max_model_len: int, token_ids: Sequence[int] | None, token_strs: Iterable[str] | None
) -> bytes:
    """Encode the output of `Tokenize`. None stands for what was not requested."""
    members: list[tuple[str, Iterable[bytes | bytearray]]] = []
    if token_ids is not None:
        members.append(("tokens", binary(_packed_ints(token_ids))))
    if token_strs is not None:
        strs, ends = bytearray(), array(_INT)
        for token in token_strs:
            strs += token.encode()
            ends.append(len(strs))
        members += [("strs", binary(strs)), ("ends", binary(_little_endian(ends).tobytes()))]
    return with_members(pack({"kind": "tokenize", "num": num_tokens, "max_len": max_model_len}), members)


def encode_detokenized(text: str) -> bytes:
    """Encode the output of `Detokenize`."""
    return pack({"kind": "detokenize", "text": text.encode()})


def encode_embedding(vector: bytes, num_tokens: int) -> bytes:
    """Encode the output of `Embed`. `vector`: float32, little-endian."""
    return pack({"kind": "embed", "num": num_tokens, "vector": vector})


def _packed_ints(values: Sequence[int]) -> bytes:
    return _little_endian(array(_INT, values)).tobytes()


def _little_endian(values: array[Number]) -> array[Number]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _ints(fields: Mapping[str, Any], name: str) -> memoryview[int]:
    data = _view(fields, name)
    if len(data) % _INT_BYTES:
        raise WireError(f"output field {name!r} has {len(data)} bytes, not a multiple of {_INT_BYTES}")
    if sys.byteorder == "big":
        values = array(_INT)
        values.frombytes(data)
        return memoryview(_little_endian(values))
    return data.cast(_INT)


def _view(fields: Mapping[str, Any], name: str) -> memoryview[int]:
    value = fields.get(name, b"")
    if not isinstance(value, (bytes, memoryview)):
        raise WireError(f"output field {name!r} is a {type(value).__name__}")
    return memoryview(value)


def _of_type(fields: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = fields.get(name, default)
    if type(value) is not kind:
        raise WireError(f"output field {name!r} is a {type(value).__name__}")
    return value
