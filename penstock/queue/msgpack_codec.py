"""msgpack with limits on size, depth and type: extension types, oversized or deep values are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, cast

import msgpack

from penstock.contract.errors import InvariantError, PenstockError

MAX_BYTES = 16 << 20
MAX_DEPTH = 8


class WireError(PenstockError):
    """Bytes that are not what they claim to be."""

    code = "bad_wire_data"


Pack = Callable[[Any], bytes]


def pack(value: Any) -> bytes:
    """The bytes of a value."""
    return cast(bytes, msgpack.packb(value, use_bin_type=True))


def new_pack() -> Pack:
    """A `pack` that keeps its buffer, which is most of the work of packing something small; for one thread only."""
    return cast(Pack, msgpack.Packer(use_bin_type=True).pack)


def array_header(num_items: int) -> bytes:
    """What stands before the items of an array."""
    if num_items < 16:
        return bytes((0x90 | num_items,))
    return struct.pack(">BH", 0xDC, num_items) if num_items < 1 << 16 else struct.pack(">BI", 0xDD, num_items)


def with_member(packed_map: bytes, name: str, packed_value: bytes) -> bytes:
    """A packed map of fewer than 15 members, with one more behind them."""
    if not 0x80 <= packed_map[0] < 0x8F:
        raise InvariantError("the map has more members than one byte can count")
    return b"".join((bytes((packed_map[0] + 1,)), memoryview(packed_map)[1:], pack(name), packed_value))


def unpack_all(data: bytes) -> list[Any]:
    """All values that lie back to back in `data`; raises WireError."""
    unpacker = _unpacker(data)
    values: list[Any] = []
    end, tell, skip, unpack, keep = len(data), unpacker.tell, unpacker.skip, unpacker.unpack, values.append
    try:
        # First over everything without making anything: a list is reserved at the length that it claims to have.
        while tell() < end:
            skip()
        unpacker.feed(data)
        # Not list(unpacker): it takes a value that the data ends in for the end of the data.
        while tell() < 2 * end:
            keep(unpack())
    except WireError:
        raise
    except Exception as error:  # msgpack raises many classes, ValueError and its own among them
        raise WireError(f"not msgpack: {type(error).__name__}: {error}") from error
    return values


def checked_map(value: Any) -> dict[str, Any]:
    """The value, which must be a map and not too deep; raises WireError."""
    if not isinstance(value, dict):
        raise WireError(f"expected a msgpack map, found {type(value).__name__}")
    _check_depth(value)
    return value


def _unpacker(data: bytes) -> msgpack.Unpacker:
    if len(data) > MAX_BYTES:
        raise WireError(f"message of {len(data)} bytes exceeds {MAX_BYTES}")
    # The buffer's size also limits every length that the data declares.
    unpacker = msgpack.Unpacker(ext_hook=_refuse_ext, max_buffer_size=max(len(data), 1), max_ext_len=0)
    unpacker.feed(data)
    return unpacker


def _refuse_ext(code: int, data: bytes) -> Any:
    raise WireError(f"msgpack extension type {code} is not allowed")


def _check_depth(value: dict[str, Any] | list[Any], depth: int = 1) -> None:
    if depth > MAX_DEPTH:
        raise WireError(f"msgpack value is nested deeper than {MAX_DEPTH}")
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            _check_depth(item, depth + 1)
