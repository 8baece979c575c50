"""Reading of request bodies, which must be JSON and are bounded in size and time."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from penstock.contract.errors import RequestError, TooLargeError
from penstock.gateway.shared_budget import Claim

MAX_BODY_BYTES_HELD = 64 << 20
"""Bytes of large bodies that a gateway holds in memory until they are parsed. Further bytes wait unread."""
MAX_BODY_BYTES_HELD_OF_TENANT = 16 << 20
"""The share of MAX_BODY_BYTES_HELD that one tenant may use."""
BODY_STEP_BYTES = 256 << 10
"""Bytes by which the claim of a body grows while it arrives. Bodies up to this size need no claim."""


async def read_json_body(request: Request, claim: Claim, *, max_bytes: int, timeout_s: float) -> bytes:
    """Read and return the body, at most `max_bytes` long. Its claim grows as it arrives.

    So a slow client holds only what it has sent. While the body waits for memory, its time stands still. Raises
    TooLargeError for a larger body; the server then discards the rest. Raises RequestError for a body that arrives too
    slowly, ends early, or is not plain JSON by its headers.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            body = await _read(request, claim, max_bytes, limit)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {timeout_s:g} s", code="body_timeout") from None
    except ClientDisconnect:
        raise RequestError("the body ended early", code="body_incomplete") from None
    _check_kind(request)
    return body


async def _read(request: Request, claim: Claim, max_bytes: int, limit: asyncio.Timeout) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = TooLargeError(f"the body is larger than {max_bytes} bytes", code="body_too_large")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise too_large
        if len(body) > max(BODY_STEP_BYTES, claim.amount):
            await _grow(claim, len(body), limit)
    return bytes(body)


async def _grow(claim: Claim, num_bytes: int, limit: asyncio.Timeout) -> None:
    """Wait for memory. Meanwhile the connection is not read, so the time does not count."""
    loop, due_s = asyncio.get_running_loop(), limit.when()
    began_s = loop.time()
    limit.reschedule(None)
    await claim.grow_to(num_bytes)
    limit.reschedule(None if due_s is None else due_s + loop.time() - began_s)


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
