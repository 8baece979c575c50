"""What one HTTP request asks of the queue, and the life of the jobs made from it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.contract.errors import PenstockError
from penstock.contract.job import Priority, SamplingParams
from penstock.contract.problems import rename
from penstock.contract.terms import UNLIMITED, Terms
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.producer.client.request import Prompt
from penstock.producer.openai.messages import NO_TOOLS, ToolUse

LEAVE_TIMEOUT_S = 5.0
"""Redis may be away when the caller is gone too; the queue then ends unheard jobs by itself."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A chunk of a job: the last one that a caller got of a stream, which had so many tokens by its end."""

    job_id: str
    index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One job for each prompt, all with the same options."""

    model: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: Priority = Priority.STANDARD
    tenant: str = "default"
    terms: Terms = UNLIMITED
    idempotency_key: str | None = None
    cut_at: StreamPosition | None = None
    """Where a stream of before goes on; its job is then nobody's to submit."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the caller calls fields of ours where that differs, for errors that are about them."""
    tool_use: ToolUse = NO_TOOLS
    """What a chat's assistant may call, and must."""
    echoes: bool = False
    """The answer begins with the prompt."""
    reads_all: bool = False
    """A stream of before is read from its start, for what its later chunks mean."""

    @property
    def read_after(self) -> int:
        """The index of the chunk behind which a stream is read; the one that it was cut at is read again."""
        return -1 if self.cut_at is None or self.reads_all else self.cut_at.index - 1

    @property
    def tells_tokens(self) -> bool:
        """Whether the answer says more of its tokens, or the prompt's, than their text."""
        return self.echoes or self.params.logprobs is not None or self.params.prompt_logprobs is not None

    def key_of(self, index: int) -> str | None:
        """The idempotency key of one prompt's job."""
        if self.idempotency_key is None or len(self.prompts) == 1:
            return self.idempotency_key
        return f"{self.idempotency_key}:{index}"


@contextlib.asynccontextmanager
async def open_jobs(
    client: AsyncClient, order: GenerationRequest, *, has_begun: Callable[[], bool] = lambda: False
) -> AsyncIterator[list[AsyncJob]]:
    """Submits all jobs or none; whatever ends the block early ends the jobs.

    With an idempotency key a job may be another caller's too, or asked for again, and a caller whose stream `has_begun`
    may come back with an event's id. So nothing cancels such a job here: the queue ends it when nobody has read it for
    its grace time.
    """
    jobs: list[AsyncJob] = []
    try:
        if order.cut_at is not None:
            jobs.append(await client.attach(order.cut_at.job_id, after=order.read_after, tenant=order.tenant))
        else:
            for number, prompt in enumerate(order.prompts):
                jobs.append(await _submit(client, order, number, prompt))
        yield jobs
    except BaseException as error:
        if isinstance(error, PenstockError):
            rename(error, order.names)
        is_shared = order.idempotency_key is not None or order.cut_at is not None
        hung_up = isinstance(error, asyncio.CancelledError)
        await _leave(jobs, may_return=is_shared or (hung_up and has_begun()))
        raise


async def _submit(client: AsyncClient, order: GenerationRequest, index: int, prompt: Prompt) -> AsyncJob:
    return await client.submit(
        prompt,
        model=order.model,
        params=order.params,
        tools=order.tool_use.tools,
        tool_choice=order.tool_use.choice,
        parallel_tool_calls=order.tool_use.parallel,
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
