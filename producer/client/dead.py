"""Dead letters for an operator: inspect, retry under a new id, purge."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from penstock.contract.job import pool_of
from penstock.contract.tenant import Terms
from penstock.producer.client.job import AsyncJob
from penstock.queue.broker.connection import Retries
from penstock.queue.broker.dead_letters import DeadLetter, DeadLetters
from penstock.queue.wire import Request


class DeadLetterBox:
    """A client's access to the dead letters of all pools, as `AsyncClient.dead`."""

    def __init__(self, retries: Retries, letters: DeadLetters, submit: Callable[..., Awaitable[AsyncJob]]) -> None:
        self._retries = retries
        self._letters = letters
        self._submit = submit

    async def newest(self, pool: str, limit: int = 100) -> list[DeadLetter]:
        """Return up to `limit` dead letters of a pool, the newest first."""
        return await self._retries.call(lambda: self._letters.newest(pool, limit))

    async def get(self, job_id: str) -> DeadLetter:
        """Return one dead letter. Raises NotFoundError."""
        return await self._retries.call(lambda: self._letters.get(job_id))

    async def request(self, job_id: str) -> Request:
        """Return the request of a dead letter. Raises NotFoundError."""
        return await self._retries.call(lambda: self._letters.request(job_id))

    async def retry(self, job_id: str) -> AsyncJob:
        """Submit a dead letter's request as a new job for the same tenant, and purge the letter.

        A call after an interrupted one returns the same new job. Raises NotFoundError, and what `AsyncClient.submit`
        raises.
        """
        letter, request = await self.get(job_id), await self.request(job_id)
        job = await self._submit(
            next(form for form in (request.prompt, request.prompt_token_ids, request.messages) if form is not None),
            model=pool_of(job_id),
            tools=request.tools,
            chat_template_kwargs=request.chat_template_kwargs,
            adapter=None if request.adapter is None else request.adapter.name,
            params=None if request.task is not None else request.params,
            task=request.task,
            priority=letter.priority,
            tenant=letter.tenant,
            terms=Terms(weight=letter.weight),
            idempotency_key=f"retry:{job_id}",
        )
        await self.purge([job_id])
        return job

    async def purge(self, job_ids: Sequence[str]) -> int:
        """Delete dead letters and their requests; return how many there were."""
        return await self._retries.call(lambda: self._letters.purge(job_ids))

    async def purge_all(self, pool: str) -> int:
        """Delete all dead letters of a pool and their requests; return how many there were."""
        return await self._retries.call(lambda: self._letters.purge_all(pool))
