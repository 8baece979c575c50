"""Lets clients reach a server without TLS by TLS, on a port that also passes connections without TLS.

So Sentinel, which has no TLS itself, watches servers under the addresses at which clients use TLS.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Self

from faults.tools.redis_process import free_port

_TLS_HANDSHAKE = b"\x16"
_READ_BYTES = 1 << 16


def new_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 that signs itself. Return it and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


class TlsFront:
    """Listens on `port` in this event loop, and passes all connections to the local port `target`."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.port = free_port()
        self.target = 0
        self.num_tls = 0
        """Connections with TLS so far."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._tasks = set[asyncio.Task[None]]()

    async def __aenter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._listener.setblocking(False)
        self._start(self._accept())
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()
        await asyncio.sleep(0)  # aborted connections close in the next round

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            near, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            self._start(self._serve(near))

    async def _serve(self, near: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(near, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(near)
        with suppress(OSError):
            has_tls = near.recv(1, socket.MSG_PEEK) == _TLS_HANDSHAKE
            self.num_tls += has_tls
            reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, near, ssl=self._context if has_tls else None
            )
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            try:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
                try:
                    await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
                finally:
                    far_writer.transport.abort()
            finally:
                writer.transport.abort()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(_READ_BYTES):
            sink.write(data)
            await sink.drain()
    sink.close()
