"""msgpack encoding and decoding with limits: extension types and oversized or deeply nested values are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import msgpack

from penstock.contract.errors import InvariantError, PenstockError

MAX_BYTES = 16 << 20
MAX_DEPTH = 8


class WireError(PenstockError):
    """Bytes on the wire are malformed, of another version, or above a limit."""

    code = "bad_wire_data"


Pack = Callable[[Any], bytes]


pack: Pack = partial(msgpack.packb, use_bin_type=True)
"""Returns the msgpack bytes of a value."""


def new_pack() -> Pack:
    """Return a `pack` that reuses its buffer, which saves most of the time for small values. For one thread only."""
    return cast(Pack, msgpack.Packer(use_bin_type=True).pack)


def array_header(num_items: int) -> bytes:
    """Return the msgpack header of an array with this number of items."""
    if num_items < 16:
        return bytes((0x90 | num_items,))
    return struct.pack(">BH", 0xDC, num_items) if num_items < 1 << 16 else struct.pack(">BI", 0xDD, num_items)


def binary(data: bytes | bytearray) -> tuple[bytes, bytes | bytearray]:
    """Return the header and the data of a msgpack byte string. `pack` would copy it into a buffer that grows."""
    size = len(data)
    if size < 1 << 16:
        return struct.pack(">BB", 0xC4, size) if size < 1 << 8 else struct.pack(">BH", 0xC5, size), data
    return struct.pack(">BI", 0xC6, size), data


def with_members(packed_map: bytes, members: Sequence[tuple[str, Iterable[bytes | bytearray]]]) -> bytes:
    """Return a packed map with members appended, each a name and the parts of its packed value.

    The bytes are copied once, since a value may have megabytes. The map must end up with at most 15 members.
    """
    if not 0x80 <= packed_map[0] <= 0x8F - len(members):
        raise InvariantError("the map would have more than 15 members, the most that a one-byte header can count")
    parts: list[bytes | bytearray | memoryview] = [bytes((packed_map[0] + len(members),)), memoryview(packed_map)[1:]]
    for name, value in members:
        parts.append(pack(name))
        parts.extend(value)
    return b"".join(parts)


def unpack_all(data: bytes) -> list[Any]:
    """Decode all values that are concatenated in `data`. Raises WireError."""
    unpacker = _unpacker(data)
    values: list[Any] = []
    end, tell, skip, unpack, keep = len(data), unpacker.tell, unpacker.skip, unpacker.unpack, values.append
    try:
        # First skip over all values without building them: unpack would allocate a list at the length that it claims.
        while tell() < end:
            skip()
        unpacker.feed(data)
        # Not list(unpacker): it silently drops an incomplete value at the end.
        while tell() < 2 * end:
            keep(unpack())
    except WireError:
        raise
    except Exception as error:  # msgpack raises many classes, ValueError and its own among them
        raise WireError(f"not msgpack: {type(error).__name__}: {error}") from error
    return values


def unpack_utf8(data: bytes) -> Any:
    """Decode one value. Texts stay UTF-8 bytes, names of members included, and `data` is not copied. Raises WireError.

    A decoded text takes up to four times its bytes.
    """
    if len(data) > MAX_BYTES:
        raise WireError(f"message of {len(data)} bytes exceeds {MAX_BYTES}")
    try:
        return msgpack.unpackb(data, raw=True, ext_hook=_refuse_ext)
    except WireError:
        raise
    except Exception as error:  # msgpack raises many classes
        raise WireError(f"not msgpack: {type(error).__name__}: {error}") from error


def checked_map(value: Any) -> dict[str, Any]:
    """Return `value` if it is a map within MAX_DEPTH. Raises WireError."""
    if not isinstance(value, dict):
        raise WireError(f"expected a msgpack map, found {type(value).__name__}")
    # Level by level: a call for each list or map would take twice as long.
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for one in level
            for item in (one.values() if type(one) is dict else one)
            if type(item) is list or type(item) is dict
        ]
        if not level:
            return value
    raise WireError(f"msgpack value is nested deeper than {MAX_DEPTH}")


def _unpacker(data: bytes) -> msgpack.Unpacker:
    if len(data) > MAX_BYTES:
        raise WireError(f"message of {len(data)} bytes exceeds {MAX_BYTES}")
    # The buffer's size also limits every length that the data declares.
    unpacker = msgpack.Unpacker(ext_hook=_refuse_ext, max_buffer_size=max(len(data), 1), max_ext_len=0)
    unpacker.feed(data)
    return unpacker


def _refuse_ext(code: int, data: bytes) -> Any:
    raise WireError(f"msgpack extension type {code} is not allowed")
