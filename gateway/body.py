"""Reading a request's body: bounded in size and time, JSON only."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from penstock.contract.errors import RequestError, TooLargeError

MAX_BODY_BYTES_HELD = 64 << 20
"""Bytes of large bodies that a gateway keeps until they are parsed. Further ones wait unread."""
MAX_BODY_BYTES_HELD_OF_TENANT = 16 << 20
_MAX_SMALL_BYTES = 256 << 10


def num_bytes_to_hold(request: Request, max_bytes: int) -> int:
    """What a body takes of MAX_BODY_BYTES_HELD: nothing for a small one, the most for one of unknown size."""
    declared = request.headers.get("content-length", "")
    if not declared.isdecimal():
        return max_bytes
    return 0 if (num_bytes := int(declared)) <= _MAX_SMALL_BYTES or num_bytes > max_bytes else num_bytes


async def read_json_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The body's bytes. What is too large is refused unread; the server throws away what still comes."""
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
    """Only plain JSON is read. A page of a foreign site can send anything else to this port without asking."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise RequestError(
            f"Content-Encoding {coding[:64]!r} is not read; send it plain", code="unsupported_media_type"
        )
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError("Content-Type must be application/json", code="unsupported_media_type")
