"""msgpack encoding of a task's output inside a job's result, and access to its parts.

Tokens are int32 in one byte string; token strings are one text and the positions where they end. So a reader can take
a part of a million tokens without decoding the others.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from penstock.contract.tasks import Detokenized, TaskOutput, Tokenized
from penstock.queue.msgpack_codec import WireError, checked_map, pack

_INT = "i"
_INT_BYTES = 4


class PackedOutput:
    """The output of a task, whose tokens are decoded on access. Raises WireError for malformed values."""

    def __init__(self, value: Any) -> None:
        fields = checked_map(value)
        self.kind: str = _typed(fields, "kind", str)
        self.text: str = _typed(fields, "text", str, "")
        self.num_tokens: int = _typed(fields, "num", int, 0)
        self.max_model_len: int = _typed(fields, "max_len", int, 0)
        self._ids = _ints(fields, "tokens")
        self.has_tokens = "tokens" in fields
        self.has_strs = "ends" in fields
        self._ends = _ints(fields, "ends")
        self._strs: bytes = _typed(fields, "strs", bytes, b"")

    def token_ids(self) -> Iterator[int]:
        """Yield the token ids."""
        return iter(self._ids)

    def token_strs(self) -> Iterator[str]:
        """Yield the tokens as the vocabulary spells them."""
        start = 0
        for end in self._ends:
            yield self._strs[start:end].decode(errors="replace")
            start = end

    def whole(self) -> TaskOutput:
        """Return the decoded output. Raises WireError for an unknown kind."""
        if self.kind == "detokenize":
            return Detokenized(self.text)
        if self.kind != "tokenize":
            raise WireError(f"unknown kind of output {self.kind[:64]!r}")
        strs = tuple(self.token_strs()) if self.has_strs else None
        return Tokenized(self.num_tokens, self.max_model_len, tuple(self.token_ids()), strs)


def encode_tokenized(
    num_tokens: int, max_model_len: int, token_ids: Sequence[int] | None, token_strs: Sequence[str] | None
) -> bytes:
    """Encode the output of `Tokenize`. None stands for what was not requested."""
    fields: dict[str, Any] = {"kind": "tokenize", "num": num_tokens, "max_len": max_model_len}
    if token_ids is not None:
        fields["tokens"] = _packed_ints(token_ids)
    if token_strs is not None:
        encoded = [token.encode() for token in token_strs]
        fields |= {"strs": b"".join(encoded), "ends": _packed_ints(list(accumulate(map(len, encoded))))}
    return pack(fields)


def encode_detokenized(text: str) -> bytes:
    """Encode the output of `Detokenize`."""
    return pack({"kind": "detokenize", "text": text})


def _packed_ints(values: Sequence[int]) -> bytes:
    return _little_endian(array(_INT, values)).tobytes()


def _ints(fields: dict[str, Any], name: str) -> array[int]:
    data: bytes = _typed(fields, name, bytes, b"")
    if len(data) % _INT_BYTES:
        raise WireError(f"output field {name!r} has {len(data)} bytes, not a multiple of {_INT_BYTES}")
    values = array(_INT)
    values.frombytes(data)
    return _little_endian(values)


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _typed(fields: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = fields.get(name, default)
    if type(value) is not kind:
        raise WireError(f"output field {name!r} is a {type(value).__name__}")
    return value
