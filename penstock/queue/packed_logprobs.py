"""Log-probabilities as msgpack has them, in and out: a few bytes a value, since twenty of them may go with a token."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.contract.logprobs import TokenLogprobs
from penstock.queue import msgpack_codec
from penstock.queue.msgpack_codec import Pack, WireError, array_header


@dataclass(frozen=True, slots=True)
class Rows:
    """Log-probabilities of some tokens, packed back to back."""

    num_rows: int
    data: bytes

    @property
    def array(self) -> bytes:
        """What stands for them in a chunk or a result."""
        return array_header(self.num_rows) + self.data


NO_ROWS = Rows(0, b"")


def rows_of(entries: Sequence[TokenLogprobs], pack: Pack = msgpack_codec.pack) -> Rows:
    """Pack log-probabilities."""
    if not entries:
        return NO_ROWS
    return Rows(len(entries), pack(to_wire(entries))[len(array_header(len(entries))) :])


def joined(parts: Sequence[Rows]) -> Rows:
    """Parts in order as one."""
    return Rows(sum(part.num_rows for part in parts), b"".join(part.data for part in parts))


def to_wire(entries: Sequence[TokenLogprobs]) -> list[Any]:
    """What msgpack packs: per token its ids, values as float32, and texts."""
    return [[e.token_ids, struct.pack(f"<{len(e.values)}f", *e.values), e.tokens] for e in entries]


def from_wire(entries: Any, token_ids: Sequence[int] | None = None) -> tuple[TokenLogprobs, ...]:
    """The same back, which must be of `token_ids` where there are any; raises WireError for what is of another form."""
    if not isinstance(entries, list):
        raise WireError("log-probabilities are no list")
    if entries and token_ids is not None and len(entries) != len(token_ids):
        raise WireError(f"log-probabilities of {len(entries)} tokens stand beside {len(token_ids)}")
    return tuple(map(_entry_of, entries))


def _entry_of(entry: Any) -> TokenLogprobs:
    if not isinstance(entry, list) or [*map(type, entry)] != [list, bytes, list]:
        raise WireError("log-probabilities of a token are not its ids, values and texts")
    ids, packed, texts = entry
    counts = {len(ids), len(texts), len(packed) / 4} - ({0.0} if len(ids) == 1 else set())
    if counts != {len(ids)} or not ids:
        raise WireError("log-probabilities of a token are not as many as its ids and texts")
    if {*map(type, ids)} != {int} or not {*map(type, texts)} <= {bytes, str}:
        raise WireError("log-probabilities name tokens by what is no id or text")
    return TokenLogprobs(tuple(ids), struct.unpack(f"<{len(packed) // 4}f", packed), tuple(texts))
