"""Parsing of request bodies: small bodies on the event loop, large bodies in a separate process."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from contextlib import suppress

from penstock.contract.errors import RequestError, UnavailableError
from penstock.gateway.request import socket_message
from penstock.gateway.request.parsed_body import ParsedBody, decode_parsed_body, parse
from penstock.gateway.request.parser_process import FORMS, HEAD
from penstock.gateway.request.socket_message import SocketMessage, decode_socket_message, parse_socket_message
from penstock.gateway.settings import UnknownFields
from penstock.gateway.shared_budget import SharedBudget

log = logging.getLogger(__name__)

MAX_BYTES_ON_LOOP = 256 << 10
_FEW_BYTES = 8 << 10
"""A body up to this size parses within a millisecond, whatever its content."""
_MAX_CONTAINERS_ON_LOOP = 256
_MAX_COMMAS_ON_LOOP = 4096
"""A body with more objects, lists or values than these limits takes several milliseconds to check at any size."""
PARSE_TIMEOUT_S = 20.0
"""Seconds that the parser process may take for one body. After that the body is refused and the process is killed."""
_REAP_TIMEOUT_S = 5.0
_PARSER = (sys.executable, "-m", "penstock.gateway.request.parser_process")


def is_heavy(raw: bytes) -> bool:
    """Return whether parsing the body on the event loop would block it too long."""
    if len(raw) <= _FEW_BYTES:
        return False
    return (
        len(raw) > MAX_BYTES_ON_LOOP
        or raw.count(b"{") + raw.count(b"[") > _MAX_CONTAINERS_ON_LOOP
        or raw.count(b",") > _MAX_COMMAS_ON_LOOP
    )


class Parser:
    """Parses request bodies for one gateway. The parser process starts with the first large body."""

    def __init__(self, unknown_fields: UnknownFields = "refuse") -> None:
        self._unknown_fields = unknown_fields
        self._parsing = SharedBudget(1, per_owner=1)
        self._child: _Child | None = None
        self._is_closed = False

    async def parse(self, form: str, raw: bytes, owner: str) -> ParsedBody:
        """Return the checked content of a body of the given form, a key of `parsed_body.BODIES`.

        Large bodies are parsed one at a time, and owners are served round robin. Raises RequestError for an invalid
        body and UnavailableError if the parser process cannot start.
        """
        if not is_heavy(raw):
            return parse(form, raw, ignores_unknown=self._unknown_fields == "ignore")
        async with self._parsing.taken(owner, 1):
            return decode_parsed_body(await self._ask(form, raw))

    async def parse_message(self, raw: bytes, owner: str) -> SocketMessage:
        """Return the parsed message of a WebSocket. Raises what `parse` raises where no message was parsed."""
        if not is_heavy(raw):
            return parse_socket_message(raw, ignores_unknown=self._unknown_fields == "ignore")
        async with self._parsing.taken(owner, 1):
            return decode_socket_message(await self._ask(socket_message.FORM, raw))

    async def close(self) -> None:
        """Kill the parser process. A body that it is parsing is refused with UnavailableError."""
        self._is_closed = True
        await self._end_child()

    async def _ask(self, form: str, raw: bytes) -> bytes:
        if self._child is None:
            self._child = await _Child.start(self._unknown_fields)
        try:
            async with asyncio.timeout(PARSE_TIMEOUT_S):
                return await self._child.ask(form, raw)
        except TimeoutError:
            await self._end_child()
            message = f"the body takes longer than {PARSE_TIMEOUT_S:g} s to parse"
            raise RequestError(message, code="body_too_complex") from None
        except (OSError, EOFError) as error:
            await self._end_child()
            if self._is_closed:
                raise UnavailableError("this gateway is stopping", code="gateway_stopped") from error
            log.warning("the parser process ended", extra={"reason": repr(error), "body_bytes": len(raw)})
            raise RequestError("the body takes too much memory to parse", code="body_too_complex") from None
        except asyncio.CancelledError:
            # Otherwise the next body would receive the answer to this one.
            await self._end_child()
            raise

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end()


class _Child:
    """A parser process and the socket to it."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket) -> None:
        self._process = process
        self._line = line

    @classmethod
    async def start(cls, unknown_fields: UnknownFields) -> _Child:
        """Start a parser process. It starts on a thread, because forking a large process is slow."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            process = await asyncio.to_thread(_spawn, theirs, unknown_fields)
        except OSError as error:
            ours.close()
            log.warning("the parser process cannot be started", extra={"reason": str(error)})
            raise UnavailableError("large bodies cannot be parsed at the moment", code="no_parser") from error
        except BaseException:
            ours.close()
            raise
        return cls(process, ours)

    async def ask(self, form: str, raw: bytes) -> bytes:
        """Send a body to the process and return its answer. Raises OSError or EOFError if the process ends."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._line, HEAD.pack(FORMS.index(form), len(raw)))
        await loop.sock_sendall(self._line, raw)
        _, num_bytes = HEAD.unpack(await self._receive(HEAD.size))
        return bytes(await self._receive(num_bytes))

    async def _receive(self, num_bytes: int) -> bytearray:
        loop, data, at = asyncio.get_running_loop(), bytearray(num_bytes), 0
        view = memoryview(data)
        while at < num_bytes:
            num_received = await loop.sock_recv_into(self._line, view[at:])
            if not num_received:
                raise EOFError("the parser process closed its socket")
            at += num_received
        return data

    async def end(self) -> None:
        """Kill the process and wait for its exit."""
        self._line.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, _REAP_TIMEOUT_S)


def _spawn(line: socket.socket, unknown_fields: UnknownFields) -> subprocess.Popen[bytes]:
    """Start a parser process whose stdin is `line`, and close the gateway's copy of it.

    Both happen on one thread. If the caller closed the copy after a cancellation, its descriptor could belong to a
    client's connection by the time of the fork, and the process would inherit that.
    """
    with line:
        environment = os.environ | {"RUST_BACKTRACE": "0"}
        return subprocess.Popen([*_PARSER, unknown_fields], stdin=line.fileno(), env=environment)
