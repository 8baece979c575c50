"""Parsing of bodies: small ones where they come, large ones in a process of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from contextlib import suppress

from penstock.contract.errors import RequestError, UnavailableError
from penstock.gateway.openai.parsed_body import ParsedBody, decode_asked, parse
from penstock.gateway.parser_process import FORMS, HEAD
from penstock.gateway.shared_budget import SharedBudget

log = logging.getLogger(__name__)

MAX_BYTES_ON_LOOP = 256 << 10
_FEW_BYTES = 8 << 10
"""A body of fewer bytes is parsed in a millisecond, whatever it consists of."""
_MAX_CONTAINERS_ON_LOOP = 256
_MAX_COMMAS_ON_LOOP = 4096
"""More objects, lists or values than these take some milliseconds to check, however few bytes they are."""
PARSE_TIMEOUT_S = 20.0
"""A body that takes longer is refused, and the process that parses it is ended."""
_REAP_TIMEOUT_S = 5.0


def is_heavy(raw: bytes) -> bool:
    """Whether a body takes too long to be parsed on the event loop."""
    if len(raw) <= _FEW_BYTES:
        return False
    return (
        len(raw) > MAX_BYTES_ON_LOOP
        or raw.count(b"{") + raw.count(b"[") > _MAX_CONTAINERS_ON_LOOP
        or raw.count(b",") > _MAX_COMMAS_ON_LOOP
    )


class Parser:
    """Parses bodies for one gateway; the process for large ones is started when the first one comes."""

    def __init__(self) -> None:
        self._turns = SharedBudget(1, per_owner=1)
        self._child: _Child | None = None
        self._is_closed = False

    async def parse(self, form: str, raw: bytes, owner: str) -> ParsedBody:
        """What a body asks for; raises RequestError for a wrong one. Owners of large ones take turns."""
        if not is_heavy(raw):
            return parse(form, raw)
        async with self._turns.taken(owner, 1):
            return decode_asked(await self._ask(form, raw))

    async def close(self) -> None:
        """End the process."""
        self._is_closed = True
        await self._end_child()

    async def _ask(self, form: str, raw: bytes) -> bytes:
        if self._child is None:
            self._child = await _Child.start()
        try:
            async with asyncio.timeout(PARSE_TIMEOUT_S):
                return await self._child.ask(form, raw)
        except TimeoutError:
            await self._end_child()
            said = f"the body takes longer than {PARSE_TIMEOUT_S:g} s to be parsed"
            raise RequestError(said, code="body_too_complex") from None
        except (OSError, EOFError) as error:
            await self._end_child()
            if self._is_closed:
                raise UnavailableError("this gateway ends", code="gateway_ends") from error
            log.warning("the parser process ended", extra={"reason": repr(error), "body_bytes": len(raw)})
            raise RequestError("the body takes too much memory to be parsed", code="body_too_complex") from None
        except asyncio.CancelledError:
            # Its answer would be taken for that to the next body.
            await self._end_child()
            raise

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end()


class _Child:
    """A parser process, and the line to it."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket) -> None:
        self._process = process
        self._line = line

    @classmethod
    async def start(cls) -> _Child:
        """Start one. On a thread, since a fork of a large process takes a while."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        command = [sys.executable, "-m", "penstock.gateway.parser_process", str(theirs.fileno())]
        try:
            process = await asyncio.to_thread(
                subprocess.Popen,
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=os.environ | {"RUST_BACKTRACE": "0"},
            )
        except OSError as error:
            ours.close()
            log.warning("the parser process cannot be started", extra={"reason": str(error)})
            raise UnavailableError("large bodies cannot be parsed at the moment", code="no_parser") from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, ours)

    async def ask(self, form: str, raw: bytes) -> bytes:
        """The answer to a body; raises OSError or EOFError where the process ends."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._line, HEAD.pack(FORMS.index(form), len(raw)))
        await loop.sock_sendall(self._line, raw)
        _, num_bytes = HEAD.unpack(await self._receive(HEAD.size))
        return bytes(await self._receive(num_bytes))

    async def _receive(self, num_bytes: int) -> bytearray:
        loop, data, at = asyncio.get_running_loop(), bytearray(num_bytes), 0
        view = memoryview(data)
        while at < num_bytes:
            got = await loop.sock_recv_into(self._line, view[at:])
            if not got:
                raise EOFError("the process has gone")
            at += got
        return data

    async def end(self) -> None:
        """Kill it."""
        self._line.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, _REAP_TIMEOUT_S)
