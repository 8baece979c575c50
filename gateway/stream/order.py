"""What one HTTP request asks of the queue, and the life of the jobs made from it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.contract.errors import PenstockError
from penstock.contract.job import Priority, SamplingParams
from penstock.contract.terms import UNLIMITED, Terms
from penstock.producer.client import AsyncClient, AsyncJob

LEAVE_TIMEOUT_S = 5.0
"""Redis may be away when the caller is gone too; the queue then ends unheard jobs by itself."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Order:
    """One job for each prompt, all with the same options."""

    model: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: Priority = Priority.STANDARD
    tenant: str = "default"
    terms: Terms = UNLIMITED
    idempotency_key: str | None = None
    prompt_field: str = "prompt"
    """What the caller calls the prompt, for errors that are about it."""

    def key_of(self, index: int) -> str | None:
        """The idempotency key of one prompt's job."""
        if self.idempotency_key is None or len(self.prompts) == 1:
            return self.idempotency_key
        return f"{self.idempotency_key}:{index}"


@contextlib.asynccontextmanager
async def open_jobs(client: AsyncClient, order: Order) -> AsyncIterator[list[AsyncJob]]:
    """Submits all jobs or none; whatever ends the block early ends the jobs.

    With an idempotency key a job may be another caller's too, or asked for again, so nothing cancels it here: the queue
    ends it when nobody has read it for its grace time.
    """
    jobs: list[AsyncJob] = []
    try:
        for index, prompt in enumerate(order.prompts):
            jobs.append(await _submit(client, order, index, prompt))
        yield jobs
    except BaseException as error:
        if isinstance(error, PenstockError) and error.param == "prompt":
            error.param = order.prompt_field
        await _leave(jobs, may_return=order.idempotency_key is not None)
        raise


async def _submit(client: AsyncClient, order: Order, index: int, prompt: Prompt) -> AsyncJob:
    return await client.submit(
        prompt,
        model=order.model,
        params=order.params,
        priority=order.priority,
        tenant=order.tenant,
        terms=order.terms,
        background=False,
        idempotency_key=order.key_of(index),
    )


async def _leave(jobs: Sequence[AsyncJob], *, may_return: bool) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LEAVE_TIMEOUT_S):
            calls = [job.detach() if may_return else job.cancel() for job in jobs]
            await asyncio.gather(*calls, return_exceptions=True)
