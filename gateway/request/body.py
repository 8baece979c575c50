"""Reading of request bodies, which must be JSON and are bounded in size and time."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from penstock.contract.errors import RequestError, TooLargeError

MAX_BODY_BYTES_HELD = 64 << 20
"""Bytes of large bodies that a gateway holds in memory until they are parsed. Further large bodies wait unread."""
MAX_BODY_BYTES_HELD_OF_TENANT = 16 << 20
"""The share of MAX_BODY_BYTES_HELD that one tenant may use."""
_MAX_SMALL_BYTES = 256 << 10
"""Bodies up to this size do not count toward MAX_BODY_BYTES_HELD."""


def num_bytes_to_hold(request: Request, max_bytes: int) -> int:
    """Return how many bytes of MAX_BODY_BYTES_HELD to reserve for a body.

    A small body needs none. A body of unknown size needs `max_bytes`. A body that is too large is refused unread, so
    it needs none either.
    """
    declared = request.headers.get("content-length", "")
    if not declared.isdecimal():
        return max_bytes
    return 0 if (num_bytes := int(declared)) <= _MAX_SMALL_BYTES or num_bytes > max_bytes else num_bytes


async def read_json_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """Read and return the body, at most `max_bytes` long.

    Raises TooLargeError for a larger body; the server then discards the rest. Raises RequestError for a body that
    arrives too slowly, ends early, or is not plain JSON by its headers.
    """
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {timeout_s:g} s", code="body_timeout") from None
    except ClientDisconnect:
        raise RequestError("the body ended early", code="body_incomplete") from None
    _check_kind(request)
    return body


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = TooLargeError(f"the body is larger than {max_bytes} bytes", code="body_too_large")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def _check_kind(request: Request) -> None:
    """Refuse a body that is compressed or not declared as JSON.

    A browser lets a page of another site send other content types without a CORS preflight.
    """
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise RequestError(
            f"Content-Encoding {coding[:64]!r} is not supported; send the body uncompressed",
            code="unsupported_media_type",
        )
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError("Content-Type must be application/json", code="unsupported_media_type")
