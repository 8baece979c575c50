"""The bodies of message batches: stored as lines while they arrive, in memory of a few MiB.

Another process splits all but small bodies, because that takes seconds of computation (`splitting.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

from fastapi import Request

from penstock.contract.errors import RequestError, TooLargeError, UnavailableError
from penstock.gateway.apis.message_batches.splitting import COUNT, END, HEAD, REFUSAL, RequestSplitter
from penstock.gateway.request.reading import BodyProcess, caller_of, check_kind, is_heavy, spawn_on
from penstock.gateway.request.uploads import UploadSlots, UploadTime, timed_upload
from penstock.gateway.settings import GatewaySettings
from penstock.producer.files.service import Files, Upload
from penstock.runtime.event_loop import cancel_until_done

_LOG = logging.getLogger("penstock.gateway")
MAX_BYTES_ON_LOOP = 64 << 10
"""Bodies up to this size are split on the event loop."""
_SPLITTER = (sys.executable, "-m", "penstock.gateway.apis.message_batches.splitting")
_GROWTH_BYTES = 1 << 20
"""Bytes by which the lines may exceed the body, because some numbers become longer."""


@dataclass(frozen=True, slots=True)
class StoredRequests:
    """The requests of a body, stored as lines. The file is not saved yet."""

    upload: Upload
    num_rows: int


class BatchBodies:
    """Receives and stores the bodies of message batches."""

    def __init__(self, files: Files, settings: GatewaySettings) -> None:
        self._files = files
        self._settings = settings
        self._slots = UploadSlots(files.settings.max_tenant_uploads)

    @asynccontextmanager
    async def stored(self, request: Request) -> AsyncIterator[StoredRequests]:
        """Store the requests of a body. What the block does not save is dropped at its end.

        Raises RequestError for a body that is no batch, TooLargeError, BusyError for a limit, and UnavailableError.
        """
        check_kind(request)
        tenant, max_bytes = caller_of(request).tenant, self._files.settings.max_message_batch_mib << 20
        declared = request.headers.get("content-length", "")
        num_bytes = int(declared) if declared.isdecimal() else max_bytes
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        with self._slots.taken(tenant):
            async with AsyncExitStack() as uploads:
                async with timed_upload(self._files.settings, self._settings.body_timeout_s, "body") as time:
                    body = _Body(request, time, max_bytes)
                    found = await self._received(body, tenant, num_bytes, uploads)
                await found.upload.finish()
                yield found

    async def _received(self, body: _Body, tenant: str, num_bytes: int, uploads: AsyncExitStack) -> StoredRequests:
        """Store the lines of a body that has up to so many bytes. The upload ends with `uploads`."""
        beginning = await body.beginning()
        if not body.is_whole or is_heavy(beginning):
            upload = await uploads.enter_async_context(await self._files.begin(tenant, num_bytes + _GROWTH_BYTES))
            return StoredRequests(upload, await self._split(body, beginning, upload))
        splitter = RequestSplitter(self._files.settings.max_message_batch_rows)
        lines = splitter.push(beginning)
        splitter.end()
        upload = await uploads.enter_async_context(await self._files.begin(tenant, len(lines)))
        await upload.write(lines)
        return StoredRequests(upload, splitter.num_rows)

    async def _split(self, body: _Body, beginning: bytes, upload: Upload) -> int:
        """Let another process split a body, and store its lines. Return their number."""
        child = await _Splitter.start(self._files.settings.max_message_batch_rows)
        sending = asyncio.create_task(_pass_on(body, beginning, child), name="penstock body of a message batch")
        try:
            async with aclosing(child.blocks()) as blocks:
                async for kind, content in blocks:
                    if kind == END:
                        await sending
                        return int(COUNT.unpack(content)[0])
                    if kind == REFUSAL:
                        told = json.loads(content)
                        refused = TooLargeError if told.get("status") == TooLargeError.status else RequestError
                        raise refused(told["message"], code=told["code"], param=told.get("param"))
                    await upload.write(memoryview(content))
            raise EOFError("the splitter process closed its socket")
        except (OSError, EOFError) as error:
            if sending.done() and not isinstance(sending.exception(), OSError | None):
                # This error, such as that of a client that is gone, ended the process.
                await sending
            _LOG.warning("the splitter process ended", extra={"reason": repr(error)})
            raise RequestError("the body takes too much memory to parse", code="body_too_complex") from None
        finally:
            await cancel_until_done([sending])
            if not sending.cancelled():
                # Of a refused body, the process does not read the rest.
                sending.exception()
            await child.end()


class _Body:
    """The pieces of a request's body, within its limits of size and time."""

    def __init__(self, request: Request, time: UploadTime, max_bytes: int) -> None:
        self._pieces = request.stream()
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.time = time
        self.is_whole = False

    async def beginning(self) -> bytes:
        """Return the body up to a bit more than MAX_BYTES_ON_LOOP, or all of it."""
        beginning = bytearray()
        async for piece in self.rest():
            beginning += piece
            if len(beginning) > MAX_BYTES_ON_LOOP:
                break
        return bytes(beginning)

    async def rest(self) -> AsyncGenerator[bytes, None]:
        """Yield the further pieces. Raises TooLargeError, and ClientDisconnect."""
        while (piece := await anext(self._pieces, None)) is not None:
            self._num_bytes += len(piece)
            if self._num_bytes > self._max_bytes:
                raise _too_large(self._max_bytes)
            self.time.received(len(piece))
            yield piece
        self.is_whole = True


async def _pass_on(body: _Body, beginning: bytes, child: _Splitter) -> None:
    try:
        await child.send(beginning)
        async for piece in body.rest():
            # The storage may be slow. That is no fault of the client.
            with body.time.standing_still():
                await child.send(piece)
        child.end_body()
    except BaseException:
        child.kill()
        raise


class _Splitter(BodyProcess):
    """A splitter process."""

    name = "splitter"

    @classmethod
    async def start(cls, max_rows: int) -> _Splitter:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            process = await asyncio.to_thread(spawn_on, theirs, [*_SPLITTER, str(max_rows)])
        except OSError as error:
            ours.close()
            _LOG.warning("the splitter process cannot be started", extra={"reason": str(error)})
            raise UnavailableError("large bodies cannot be parsed at the moment", code="no_parser") from error
        except BaseException:
            ours.close()
            raise
        return cls(process, ours)

    async def send(self, piece: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._line, piece)

    def end_body(self) -> None:
        self._line.shutdown(socket.SHUT_WR)

    async def blocks(self) -> AsyncGenerator[tuple[bytes, bytearray], None]:
        """Yield kind and content of each block. Raises OSError or EOFError at the end of the process."""
        while True:
            kind, num_bytes = HEAD.unpack(await self.receive(HEAD.size))
            yield kind, await self.receive(num_bytes)

    def kill(self) -> None:
        self._process.kill()


def _too_large(max_bytes: int) -> TooLargeError:
    message = f"the body is larger than {max_bytes} bytes (PENSTOCK_FILES_MAX_MESSAGE_BATCH_MIB)"
    return TooLargeError(message, code="body_too_large")
