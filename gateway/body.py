"""Reading a request's body: bounded in size and time, JSON only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from penstock.contract.errors import RequestError, TooLargeError

DISCARD_MAX_BYTES = 64 << 20
DISCARD_MAX_S = 5.0


async def read_json_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The body's bytes, at most `max_bytes` of them ever held."""
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {timeout_s:g} s", code="body_timeout") from None
    except ClientDisconnect:
        raise RequestError("the body ended early", code="body_incomplete") from None
    _check_content_type(request)
    return body


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = TooLargeError(f"the body is larger than {max_bytes} bytes", code="body_too_large")
    if declared.isdecimal() and int(declared) > max_bytes:
        # Who waits for 100 Continue has sent nothing yet, and need not.
        if "expect" not in request.headers:
            await _discard(request.stream())
        raise too_large
    body = bytearray()
    stream = request.stream()
    async for part in stream:
        body += part
        if len(body) > max_bytes:
            body.clear()
            await _discard(stream)
            raise too_large
    return bytes(body)


async def _discard(stream: AsyncIterator[bytes]) -> None:
    """Takes what is still coming: closing a connection under a sender resets it, and the sender never sees the 413."""
    num_bytes = 0
    try:
        async with asyncio.timeout(DISCARD_MAX_S):
            async for part in stream:
                num_bytes += len(part)
                if num_bytes > DISCARD_MAX_BYTES:
                    return
    except TimeoutError:
        return


def _check_content_type(request: Request) -> None:
    """A page of a foreign site can send anything else than JSON to this port without asking."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError("Content-Type must be application/json", code="unsupported_media_type")
