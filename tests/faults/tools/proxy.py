"""A proxy between penstock and Redis that drops, delays, cuts and changes calls. It knows each script by name.

A connection's bytes pass unchanged, except around a call that the rule applies to. The proxy sends that call when all
calls before it are answered, and holds its answer until it is complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import hiredis

from penstock.queue.broker.script_text import source

Address = str | tuple[str, int]
READ_BYTES = 1 << 16
_FILES = (resources.files("penstock.queue") / "scripts").iterdir()
_SCRIPTS = [file.name.removesuffix(".lua") for file in _FILES if file.name.endswith(".lua")]
_BY_DIGEST = {hashlib.sha1(source(name).encode()).hexdigest().encode(): name for name in _SCRIPTS}
_BY_SOURCE = {source(name).encode(): name for name in _SCRIPTS}


@dataclass(frozen=True)
class Fault:
    """A fault for one call. `before` and `after` run before the call is sent, and before its answer is sent back."""

    before: Callable[[], Awaitable[None]] | None = None
    is_sent: bool = True
    answer: bytes | None = None
    """Instead of Redis's own."""
    share: float = 1.0
    """How much of the answer arrives before the connection is cut; 1: all, and it stays."""
    after: Callable[[], Awaitable[None]] | None = None


LOST_CALL = Fault(is_sent=False, share=0.0)
LOST_REPLY = Fault(share=0.0)
CUT_REPLY = Fault(share=0.5)

Rule = Callable[[str, int], Fault | None]
"""Of a call's name and how often it was called so far, this time included."""


class FaultProxy:
    """Listens on its own socket. `rule` gets the calls of all connections; `target` may change while it runs."""

    def __init__(self, target: Address) -> None:
        self.target = target
        self.rule: Rule | None = None
        self.delay_s = 0.0
        self.calls: Counter[str] = Counter()
        self.refuses = False
        """Whether new connections are closed at once."""
        self._flows = asyncio.Event()
        self._flows.set()
        self._folder = tempfile.TemporaryDirectory(prefix="proxy-")
        self._path = str(Path(self._folder.name) / "proxy.sock")
        self._links: set[_Link] = set()

    @property
    def url(self) -> str:
        """The URL for penstock's settings."""
        return f"unix://{self._path}"

    def cut(self) -> None:
        """Close all connections."""
        for link in list(self._links):
            link.close()

    def set_black_hole(self, *, on: bool) -> None:
        """Deliver no bytes and report no error. Bytes sent meanwhile arrive after the pause."""
        if on:
            self._flows.clear()
        else:
            self._flows.set()

    async def pass_on(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Deliver bytes after the configured delay."""
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        await self._flows.wait()
        writer.write(data)
        await writer.drain()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.close()
            return
        try:
            there = await _open(self.target)
        except OSError:
            writer.close()
            return
        link = _Link(self, reader, writer, *there)
        self._links.add(link)
        try:
            await link.run()
        finally:
            link.close()
            self._links.discard(link)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._server.close()
        self._flows.set()
        while self._links:
            self.cut()
            await asyncio.sleep(0.01)
        self._folder.cleanup()


class _Link:
    """One connection through the proxy."""

    def __init__(
        self,
        proxy: FaultProxy,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._reader, self._writer = reader, writer
        self._far_reader, self._far_writer = far_reader, far_writer
        self._num_asked = self._num_answered = 0
        self._progress = asyncio.Event()
        self._held: bytearray | None = None

    async def run(self) -> None:
        """Run until either side closes."""
        ways = [asyncio.create_task(self._ask()), asyncio.create_task(self._answer())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    def close(self) -> None:
        self._writer.close()
        self._far_writer.close()

    async def _ask(self) -> None:
        parser = hiredis.Reader()
        while data := await self._reader.read(READ_BYTES):
            parser.feed(data)
            while (command := parser.gets()) is not False:
                name = _name_of(command)
                self._proxy.calls[name] += 1
                rule = self._proxy.rule
                fault = rule(name, self._proxy.calls[name]) if rule else None
                if fault is None:
                    self._num_asked += 1
                    await self._proxy.pass_on(self._far_writer, hiredis.pack_command(tuple(command)))
                elif not await self._suffer(fault, command):
                    return

    async def _suffer(self, fault: Fault, command: list[bytes]) -> bool:
        """Apply a call's fault. Return false if the connection must be closed."""
        if fault.before is not None:
            await fault.before()
        while self._num_answered < self._num_asked:
            await self._wait()
        answer = fault.answer
        if fault.is_sent and answer is None:
            self._held = bytearray()
            self._num_asked += 1
            await self._proxy.pass_on(self._far_writer, hiredis.pack_command(tuple(command)))
            while self._num_answered < self._num_asked:
                await self._wait()
            answer, self._held = bytes(self._held), None
        if fault.after is not None:
            await fault.after()
        await self._proxy.pass_on(self._writer, (answer or b"")[: int(len(answer or b"") * fault.share)])
        return fault.share == 1.0

    async def _wait(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    async def _answer(self) -> None:
        parser = hiredis.Reader(notEnoughData=_NOTHING)
        while data := await self._far_reader.read(READ_BYTES):
            parser.feed(data)
            while parser.gets() is not _NOTHING:
                self._num_answered += 1
            if self._held is None:
                await self._proxy.pass_on(self._writer, data)
            else:
                self._held += data
            self._progress.set()


_NOTHING = object()


async def _open(target: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(target, str):
        return await asyncio.open_unix_connection(target)
    return await asyncio.open_connection(*target)


def _name_of(command: list[Any]) -> str:
    """Return a script's name, or the command's."""
    verb = command[0].upper()
    if verb == b"EVALSHA":
        return _BY_DIGEST.get(command[1], "evalsha")
    if verb == b"EVAL":
        return _BY_SOURCE.get(command[1], "eval")
    return verb.decode().lower()
