"""The limits of uploads that go to the storage of files: how many come in at once, and how slowly."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.requests import ClientDisconnect

from penstock.contract.errors import BusyError, RequestError
from penstock.producer.files.storage import FilesSettings

_RETRY_MS = 5_000


class UploadTime:
    """The time that a client has to send a form: as much as any body, and more with each KiB that has arrived."""

    def __init__(self, limit: asyncio.Timeout, *, first_s: float, bytes_per_s: float) -> None:
        self._limit = limit
        self._bytes_per_s = bytes_per_s
        self._due_s = asyncio.get_running_loop().time() + first_s
        limit.reschedule(self._due_s)

    def received(self, num_bytes: int) -> None:
        """Note received bytes."""
        self._due_s += num_bytes / self._bytes_per_s
        self._limit.reschedule(self._due_s)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Let the block take no time: the storage is slow, not the client."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        self._limit.reschedule(None)
        try:
            yield
        finally:
            self._due_s += clock() - began_s
            self._limit.reschedule(self._due_s)


@asynccontextmanager
async def timed_upload(settings: FilesSettings, first_s: float, what: str) -> AsyncIterator[UploadTime]:
    """Limit the time of an upload in the block: no least rate holds for its first seconds.

    Raises RequestError for a client that is too slow or disconnects.
    """
    rate = settings.min_upload_kib_per_s
    try:
        async with asyncio.timeout(None) as limit:
            yield UploadTime(limit, first_s=first_s, bytes_per_s=rate * 1024)
    except TimeoutError:
        message = f"the {what} arrives too slowly: beyond {first_s:g} s, at least {rate:g} KiB per second must arrive"
        raise RequestError(message, code="body_timeout") from None
    except ClientDisconnect:
        raise RequestError("the body ends early", code="body_incomplete") from None


class UploadSlots:
    """How many uploads of one kind a gateway receives at once: `limit` of a tenant, and four times as many in all."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_open: Counter[str] = Counter()

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Take a slot for the block. Raises BusyError if none is free."""
        limit = self._limit
        if self._num_open[tenant] >= limit or self._num_open.total() >= 4 * limit:
            message = f"too many uploads at once: {limit} of a tenant and {4 * limit} in all are received at a time"
            raise BusyError(message, code="uploads_busy", retry_after_ms=_RETRY_MS)
        self._num_open[tenant] += 1
        try:
            yield
        finally:
            self._num_open[tenant] -= 1
            self._num_open += Counter()  # drops tenants with 0
