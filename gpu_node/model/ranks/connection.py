"""The connection between rank 0 and a rank on another host: frames, and how both prove that they know the secret.

A frame is a header and bytes of a fixed layout; nothing is pickled. Frames are neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError

_HEADER = struct.Struct("<BxxxIQ")
"""Kind, length of the content, and the number of a message."""
_MAX_HELLO_BYTES = 4096
_MAX_FRAME_BYTES = 1 << 30
_NONCE_BYTES = 32
MIN_SECRET_BYTES = 16
SEND_PATIENCE_S = 10
"""Seconds after which a connection counts as broken if the other host does not acknowledge what was sent."""
_BY_RANK_0, _BY_RANK = b"penstock rank 0", b"penstock rank"


class FrameKind(IntEnum):
    """The kinds of frames."""

    HELLO = 1
    """From a rank: a nonce."""
    CHALLENGE = 2
    """From rank 0: a nonce, and a digest of both nonces and the secret."""
    ANSWER = 3
    """From a rank: such a digest, and its version of penstock."""
    ACCEPTED = 4
    REFUSED = 5
    """From rank 0: why."""
    CONFIG = 6
    """From rank 0: what the rank computes, as JSON."""
    REPORT = 7
    """From a rank: a line for `RankGroup`, as JSON."""
    STATE = 8
    """From a rank, four times a second: what it shows of itself."""
    MESSAGE = 9
    """From rank 0: a message to all ranks; its first byte is its kind."""
    LIFE = 10
    """From rank 0, four times a second."""


class ConnectionLostError(Exception):
    """The other end of a connection has closed it, or does not answer."""


class RankConnection:
    """A connection. Any thread may send; one thread receives."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._sending = threading.Lock()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
            stream.setsockopt(socket.IPPROTO_TCP, option, value)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SEND_PATIENCE_S * 1000)

    @property
    def own_address(self) -> str:
        """The address of this host that the connection has."""
        return str(self.stream.getsockname()[0])

    @property
    def other_address(self) -> str:
        """The address of the other host."""
        return str(self.stream.getpeername()[0])

    def send(self, frame: FrameKind, content: bytes = b"", number: int = 0) -> None:
        """Send a frame. Raises ConnectionLostError."""
        try:
            with self._sending:
                self.stream.sendall(_HEADER.pack(frame, len(content), number) + content)
        except OSError as error:
            raise ConnectionLostError(str(error)) from error

    def receive(self, max_bytes: int = _MAX_FRAME_BYTES) -> tuple[FrameKind, bytes, int]:
        """Wait for a frame. Return its kind, content and number. Raises ConnectionLostError."""
        kind, length, number = _HEADER.unpack(self._read(_HEADER.size))
        if length > max_bytes:
            raise ConnectionLostError(f"a frame of {length} bytes is longer than {max_bytes}")
        try:
            return FrameKind(kind), self._read(length), number
        except ValueError as error:
            raise ConnectionLostError(f"a frame has the unknown kind {kind}") from error

    def close(self) -> None:
        """End the connection; the other end notices. Calls after the first do nothing."""
        with suppress(OSError):  # The other end may be first.
            self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()

    def _read(self, length: int) -> bytes:
        parts, left = [], length
        while left:
            try:
                part = self.stream.recv(min(left, 1 << 20))
            except OSError as error:
                raise ConnectionLostError(str(error) or type(error).__name__) from error
            if not part:
                raise ConnectionLostError("the other end has closed the connection")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def read_secret(path: Path) -> bytes:
    """Return the secret that all ranks of a group know. Raises ConfigError."""
    setting = "rank_secret_file"
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}", param=setting) from error
    if len(secret) < MIN_SECRET_BYTES:
        problem = f"{path} has {len(secret)} bytes, and a secret needs at least {MIN_SECRET_BYTES}"
        raise ConfigError(f"{setting}: {problem}", param=setting)
    return secret


def admit(connection: RankConnection, secret: bytes, patience_s: float) -> None:
    """Let a rank prove that it knows the secret, and prove that to it. Raises ConnectionLostError and ConfigError."""
    connection.stream.settimeout(patience_s)
    theirs = _content(connection, FrameKind.HELLO)
    own = os.urandom(_NONCE_BYTES)
    connection.send(FrameKind.CHALLENGE, own + _digest(secret, _BY_RANK_0, theirs, own))
    answer = _content(connection, FrameKind.ANSWER)
    digest, theirs_version = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:].decode(errors="replace")
    if not hmac.compare_digest(digest, _digest(secret, _BY_RANK, theirs, own)):
        _refuse(connection, "it has another secret (rank_secret_file)")
    if theirs_version != version("penstock-llm"):
        _refuse(connection, f"it has version {theirs_version} of penstock, and rank 0 has {version('penstock-llm')}")
    connection.send(FrameKind.ACCEPTED)
    connection.stream.settimeout(None)


def ask(connection: RankConnection, secret: bytes) -> Mapping[str, Any]:
    """Join as a rank; wait for what rank 0 wants computed. Raises ConnectionLostError, ConfigError if it is refused."""
    own = os.urandom(_NONCE_BYTES)
    connection.send(FrameKind.HELLO, own)
    challenge = _content(connection, FrameKind.CHALLENGE)
    theirs, digest = challenge[:_NONCE_BYTES], challenge[_NONCE_BYTES:]
    if not hmac.compare_digest(digest, _digest(secret, _BY_RANK_0, own, theirs)):
        raise ConfigError("rank 0 has another secret (rank_secret_file)", param="rank_secret_file")
    connection.send(FrameKind.ANSWER, _digest(secret, _BY_RANK, own, theirs) + version("penstock-llm").encode())
    frame, reason, _ = connection.receive(_MAX_HELLO_BYTES)
    if frame is FrameKind.REFUSED:
        raise ConfigError(f"rank 0 refuses this rank: {reason.decode(errors='replace')}")
    frame, config, _ = connection.receive()
    if frame is not FrameKind.CONFIG:
        raise ConnectionLostError(f"rank 0 sent {frame.name}, not what to compute")
    found: Mapping[str, Any] = json.loads(config)
    return found


def _content(connection: RankConnection, wanted: FrameKind) -> bytes:
    frame, content, _ = connection.receive(_MAX_HELLO_BYTES)
    if frame is not wanted:
        raise ConnectionLostError(f"the other end sent {frame.name}, not {wanted.name}")
    return content


def _refuse(connection: RankConnection, why: str) -> None:
    connection.send(FrameKind.REFUSED, why.encode())
    raise ConfigError(f"a rank at {connection.other_address} is refused: {why}")


def _digest(secret: bytes, side: bytes, of_rank: bytes, of_rank_0: bytes) -> bytes:
    return hmac.digest(secret, side + of_rank + of_rank_0, hashlib.sha256)
