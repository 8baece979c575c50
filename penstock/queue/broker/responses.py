"""The records of stored responses. `submit` writes a record together with its job; this module reads and deletes it."""

from __future__ import annotations

from typing import Any, cast

from redis.asyncio import Redis

from penstock.contract.errors import NotFoundError
from penstock.contract.job import pool_of
from penstock.queue import keys
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import translated


class ResponseBroker:
    """The stored responses of all pools. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

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


def _no_response(job_id: str) -> NotFoundError:
    return NotFoundError(f"no response is stored of job {job_id}", code="response_not_found")
