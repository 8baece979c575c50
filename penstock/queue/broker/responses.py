"""The records of stored responses. `submit` writes a record together with its job; this module reads and deletes it."""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from penstock.contract.errors import NotFoundError, UnavailableError
from penstock.contract.job import pool_of
from penstock.queue import keys
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import translated
from penstock.queue.broker.job_records import large_result_bytes_of

SEAL_KEY_BYTES = 32


class StoredBytes(NamedTuple):
    """How many bytes are stored of a response."""

    record: int
    result: int
    """The size of its job's result if it is large, else 0."""


class ResponseBroker:
    """The stored responses of all pools. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def num_bytes(self, job_id: str, tenant: str) -> StoredBytes:
        """Return how much `read` and the job's result would bring. Raises NotFoundError as `read` does."""
        with translated():
            values = await cast(Any, self._redis.hmget(keys.job(job_id), ["tenant", "response_bytes", "stored"]))
        owner, record, stored = ((value or b"").decode() for value in values)
        if owner != tenant or not record:
            raise _no_response(job_id)
        return StoredBytes(int(record), large_result_bytes_of({"stored": stored}))

    async def read(self, job_id: str, tenant: str) -> bytes:
        """Return the record of a stored response. Raises NotFoundError, also for the response of another tenant."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.hget(keys.job(job_id), "tenant")
                pipe.get(keys.response(job_id))
                owner, record = await pipe.execute()
        if record is None or owner is None or owner.decode() != tenant:
            raise _no_response(job_id)
        return cast(bytes, record)

    async def delete(self, job_id: str, tenant: str) -> None:
        """Delete a stored response with its job's log and result. An open job is canceled. Raises NotFoundError."""
        answer = await cast(Any, scripts.call(self._redis, "delete_response", pool_of(job_id), job_id, tenant))
        if answer != b"OK":
            raise _no_response(job_id)

    async def seal_key(self) -> bytes:
        """Return the secret of all gateways for the seals of summaries. The first call of all stores a random one."""
        redis = cast(Any, self._redis)
        with translated():
            found = await redis.get(keys.SEAL_KEY)
            if found is None:
                await redis.set(keys.SEAL_KEY, secrets.token_bytes(SEAL_KEY_BYTES), nx=True)
                found = await redis.get(keys.SEAL_KEY)
        if found is None:
            raise UnavailableError("the secret for the seals of summaries was deleted just now", code="no_seal_key")
        return cast(bytes, found)


def _no_response(job_id: str) -> NotFoundError:
    return NotFoundError(f"no response is stored of job {job_id}", code="response_not_found")
