"""Profiles of a running node: an operator asks through Redis, and the node answers with files in pieces.

The request is a key outside of the pools' prefix, so that only the admin's user can write it (ops/acl). The answer is a
list of which few pieces are in Redis at a time, whatever the size of the files.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from redis.asyncio import Redis

from penstock.contract.errors import ConflictError, UnavailableError
from penstock.queue import keys, wire
from penstock.queue.broker.connection import translated
from penstock.queue.protocol_version import PROTOCOL_VERSION
from penstock.queue.wire import WireError, pack

MAX_PROFILE_S = 60.0
MAX_FILE_BYTES = 64 << 20
"""The largest compressed file of a profile."""
PIECE_BYTES = 256 << 10
MAX_PIECES = 8
"""Pieces of an answer that are in Redis at a time."""
REQUEST_TTL_MS = 15_000
"""A node that does not read a request within this time does not read it at all."""
PIECE_TTL_MS = 30_000
"""How long a node waits for the caller to read, and Redis keeps what it has not read."""
PATIENCE_S = 60.0
"""How long a caller waits for an answer after the profile's time: the node compresses its files."""
TRACE, OPERATIONS = "trace.json.gz", "operations.json.gz"
"""The files of a profile: steps and stacks, and the runner's operations where it can record them."""
_POLL_S = 0.1
DOORBELL = "profile"
"""The message on a node's doorbell channel. It cannot be a job's id, which contains a dot."""


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """An operator's request for a profile of a node."""

    id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """The numbers of a profile, or the reason why there is none."""

    node_id: str
    seconds: float = 0.0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    part_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the steps' parts, as in the metrics."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Name → bytes of each file that follows."""
    problem: str = ""


T = TypeVar("T")
_request_adapter = TypeAdapter(ProfileRequest)
_summary_adapter = TypeAdapter(ProfileSummary)


class ProfileBroker:
    """Both ends of a profile. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)

    async def ask(self, pool: str, node_id: str, seconds: float) -> ProfileRequest:
        """Ask a node to profile itself. Raises ConflictError if it has not read an earlier request yet."""
        request = ProfileRequest(secrets.token_hex(8), seconds)
        packed = pack({"v": PROTOCOL_VERSION, **asdict(request)})
        with translated():
            if not await self._redis.set(keys.profile_request(node_id), packed, px=REQUEST_TTL_MS, nx=True):
                raise ConflictError(f"node {node_id} has been asked for a profile and has not begun yet")
            await self._redis.publish(keys.doorbell(pool, node_id), DOORBELL)
        return request

    async def answer(self, pool: str, request: ProfileRequest) -> tuple[ProfileSummary, dict[str, bytes]]:
        """Wait for a node's answer. Raises UnavailableError if it does not come in time."""
        key, patience_s = keys.profile(pool, request.id), request.seconds + PATIENCE_S
        summary = _decoded(_summary_adapter, await self._next_piece(key, patience_s))
        files = {}
        for name, size in summary.files.items():
            if name not in (TRACE, OPERATIONS):
                raise WireError(f"a profile has no file {name[:64]!r}")
            data = bytearray()
            while len(data) < min(size, MAX_FILE_BYTES):
                data += await self._next_piece(key, PIECE_TTL_MS / 1000)
            files[name] = bytes(data)
        return summary, files

    async def _next_piece(self, key: str, patience_s: float) -> bytes:
        end_s = time.monotonic() + patience_s
        while True:
            with translated():
                piece = await self._redis.lpop(key)
            if piece is not None:
                return bytes(piece)
            if time.monotonic() > end_s:
                message = "the node did not answer: it has left, its release knows no profiles, or it may not read them"
                raise UnavailableError(message, code="no_answer")
            await asyncio.sleep(_POLL_S)

    async def request(self, node_id: str) -> ProfileRequest | None:
        """Return the request for this node, once; None if there is none."""
        key = keys.profile_request(node_id)
        with translated():
            data = await self._redis.get(key)
            if data is None:
                return None
            await self._redis.delete(key)
        return _decoded(_request_adapter, data)

    async def send(self, pool: str, request: ProfileRequest, summary: ProfileSummary, files: list[bytes]) -> None:
        """Send the answer. Raises UnavailableError if the caller stops reading it."""
        key = keys.profile(pool, request.id)
        pieces = [data[at : at + PIECE_BYTES] for data in files for at in range(0, len(data), PIECE_BYTES)]
        for piece in (pack({"v": PROTOCOL_VERSION, **asdict(summary)}), *pieces):
            end_s = time.monotonic() + PIECE_TTL_MS / 1000
            with translated():
                while await self._redis.llen(key) >= MAX_PIECES:
                    if time.monotonic() > end_s:
                        raise UnavailableError("the caller of a profile has left", code="no_reader")
                    await asyncio.sleep(_POLL_S)
                await self._redis.rpush(key, piece)
                await self._redis.pexpire(key, PIECE_TTL_MS)


def _decoded(adapter: TypeAdapter[T], data: bytes) -> T:
    try:
        return adapter.validate_python(wire.unpack_map(data))
    except ValidationError as error:
        raise WireError(f"not a profile: {error.errors()[0]['msg']}") from error
