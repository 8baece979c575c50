"""A client's access to stored responses."""

from __future__ import annotations

from penstock.queue.broker.connection import Retries
from penstock.queue.broker.jobs import ResponseBroker, StoredBytes
from penstock.queue.broker.producer import ProducerBroker
from penstock.queue.results import PackedResult


class StoredResponses:
    """A client's access to the records of stored responses of all pools, as `AsyncClient.responses`."""

    def __init__(self, retries: Retries, broker: ResponseBroker, jobs: ProducerBroker) -> None:
        self._retries = retries
        self._broker = broker
        self._jobs = jobs

    async def num_bytes(self, job_id: str, tenant: str) -> StoredBytes:
        """Return the sizes of a stored response's record and result. Raises NotFoundError."""
        return await self._retries.call(lambda: self._broker.num_bytes(job_id, tenant))

    async def read(self, job_id: str, tenant: str) -> bytes:
        """Return the record of a stored response. Raises NotFoundError."""
        return await self._retries.call(lambda: self._broker.read(job_id, tenant))

    async def delete(self, job_id: str, tenant: str) -> None:
        """Delete a stored response with its job's log and result. An open job is canceled. Raises NotFoundError."""
        await self._retries.call(lambda: self._broker.delete(job_id, tenant))

    async def seal_key(self) -> bytes:
        """Return the secret with which all gateways seal the summaries of conversations."""
        return await self._retries.call(self._broker.seal_key)

    async def result(self, job_id: str, tenant: str) -> PackedResult | None:
        """Return the result of a response's job, or None while the job is open. Raises NotFoundError."""
        return await self._retries.call(lambda: self._jobs.packed_result(job_id, tenant))
