"""How much memory the values of a JSON text take once it is parsed, estimated before it is parsed."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.contract.errors import TooLargeError

MAX_PARSED_BYTES = 128 << 20
"""Limit in bytes on the memory of a body's parsed values, estimated with the values below."""
BYTES_PER_VALUE = 72
BYTES_PER_TEXT = 160
BYTES_PER_CONTAINER = 400
"""A container is an object or a list."""
_WINDOW_BYTES = 256 << 10


def check_structure(raw: bytes) -> None:
    """Raise TooLargeError if the parsed values of a body would take more than MAX_PARSED_BYTES.

    The first estimate counts every comma and bracket. Only if it exceeds the limit, a second estimate leaves out the
    characters inside strings.
    """
    if parsed_bytes(raw) > MAX_PARSED_BYTES and sum(map(parsed_bytes, _without_texts(raw))) > MAX_PARSED_BYTES:
        message = f"the parsed values of the body take more than {MAX_PARSED_BYTES >> 20} MiB"
        raise TooLargeError(message, code="body_too_complex")


def parsed_bytes(text: bytes) -> int:
    """Return an upper estimate, in bytes, of the memory of the values that begin in this part of a body."""
    containers = text.count(b"{") + text.count(b"[")
    return (
        text.count(b",") * BYTES_PER_VALUE + text.count(b'"') // 2 * BYTES_PER_TEXT + containers * BYTES_PER_CONTAINER
    )


def _without_texts(raw: bytes) -> Iterator[bytes]:
    """Yield a body in parts, without the characters between its quotes."""
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    is_inside = False
    for at in range(0, len(plain), _WINDOW_BYTES):
        parts = plain[at : at + _WINDOW_BYTES].split(b'"')
        yield b'""'.join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
