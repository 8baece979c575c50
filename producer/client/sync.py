"""The synchronous client: the asynchronous one on a private thread."""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self, Unpack

from penstock.contract.errors import UnavailableError, error_of
from penstock.contract.job import Chunk, Outcome, Result
from penstock.producer.client.client import AsyncClient
from penstock.producer.client.job import AsyncJob
from penstock.producer.client.loop_thread import LoopThread
from penstock.producer.client.request import Prompt, SubmitOptions
from penstock.producer.client.settings import ClientSettings
from penstock.producer.client.signature import with_options
from penstock.producer.client.stats import ClientStats
from penstock.queue.broker.producer import JobStatus, ServedPool


class Client:
    """Submits jobs and streams what comes back; any number of threads may share one, forked processes may not.

        with Client("redis://localhost") as client:
            for chunk in client.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="")

    Connects when made (raises UnavailableError when Redis is away); closes with `with`, close(), or the interpreter.
    """

    def __init__(
        self, redis_url: str | None = None, *, tenant: str = "default", settings: ClientSettings | None = None
    ) -> None:
        self._client = AsyncClient(redis_url, tenant=tenant, settings=settings)
        self._loop = LoopThread()
        self._finalizer = weakref.finalize(self, _close, self._loop, self._client)
        try:
            self._loop.call(self._client.connect())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends every stream of this client; threads that wait on one get UnavailableError."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._client).replace("AsyncClient", "Client", 1)

    @property
    def stats(self) -> ClientStats:
        """The client's counters."""
        return self._client.stats

    def pools(self) -> dict[str, ServedPool]:
        """Return every announced model by pool, as of at most a second ago; those with a live node come first."""
        return self._loop.call(self._client.pools())

    @with_options
    def submit(self, prompt: Prompt, **options: Unpack[SubmitOptions]) -> Job:
        """Check, admit and enqueue a job; `SubmitOptions` and `SamplingParams` say what each argument means.

        `prompt` is text, token ids or the messages of a chat.

        Raises RequestError (`param` names the argument at fault), BusyError (come back after `retry_after_ms`),
        ConflictError (id or idempotency key of another request), UnavailableError (no node, or Redis stays away).
        """
        return Job(self, self._loop.call(self._client.submit(prompt, **options)))

    @with_options
    def stream(self, prompt: Prompt, **options: Unpack[SubmitOptions]) -> Iterator[Chunk]:
        """Submit a job and yield its chunks. Takes and raises what `submit` does; raises the job's error at its end."""
        return self.submit(prompt, **options).stream()

    def attach(self, job_id: str, *, after: int = -1, tenant: str | None = None) -> Job:
        """Return a job submitted anywhere, to be read from the chunk behind index `after`; raises NotFoundError."""
        return Job(self, self._loop.call(self._client.attach(job_id, after=after, tenant=tenant)))

    def result(self, job_id: str, *, check: bool = True, tenant: str | None = None) -> Result:
        """Wait for a job's end and return its result; raises the job's error when it did not end `done`, if `check`."""
        return self._loop.call(self._client.result(job_id, check=check, tenant=tenant))

    def status(self, job_id: str, *, tenant: str | None = None) -> JobStatus:
        """Where a job stands."""
        return self._loop.call(self._client.status(job_id, tenant=tenant))

    def cancel(self, job_id: str, *, tenant: str | None = None) -> str:
        """Cancel a job; return `cancelled`, `running` (it ends within a step) or the terminal state it was in."""
        return self._loop.call(self._client.cancel(job_id, tenant=tenant))


class Job:
    """A handle on a submitted or attached job; any number of threads may stream from it, each from where it starts."""

    def __init__(self, client: Client, job: AsyncJob) -> None:
        # The client closes when nobody holds it any more.
        self._client = client
        self._loop = client._loop
        self._job = job
        self.id = job.id
        self.pool = job.pool

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def stream(self) -> Iterator[Chunk]:
        """The job's chunks in order; behind the last one, raises the job's error when it did not end `done`."""
        outcome: Outcome | None = None
        for chunk in self.chunks():
            outcome = chunk.outcome
            yield chunk
        if outcome is not None and outcome.state != "done":
            raise error_of(outcome)

    def chunks(self) -> Iterator[Chunk]:
        """The job's chunks in order; the last one carries the outcome, whatever it is."""
        batches = self._job.batches()
        try:
            while batch := self._loop.call(_next_of(batches)):
                yield from batch
        finally:
            # Not waited for: a garbage collector may close this generator on the loop's own thread.
            with suppress(UnavailableError):
                self._loop.post(batches.aclose())

    def result(self, *, check: bool = True) -> Result:
        """The job's result once it has ended; raises the job's error when it did not end `done`, unless told not to."""
        return self._loop.call(self._job.result(check=check))

    def status(self) -> JobStatus:
        """Where the job stands."""
        return self._loop.call(self._job.status())

    def cancel(self) -> str:
        """Cancel the job; return `cancelled`, `running` (it ends within a step) or the terminal state it was in."""
        return self._loop.call(self._job.cancel())

    def detach(self) -> None:
        """Stop reading here; a non-background job without another reader is then cancelled."""
        self._loop.call(self._job.detach())


def _close(loop: LoopThread, client: AsyncClient) -> None:
    loop.stop(client.close())


async def _next_of(batches: AsyncGenerator[list[Chunk], None]) -> list[Chunk]:
    return await anext(batches, [])
