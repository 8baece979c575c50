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

    @property
    def stats(self) -> ClientStats:
        """The client's counters."""
        return self._client.stats

    def pools(self) -> dict[str, ServedPool]:
        """See `AsyncClient.pools`."""
        return self._loop.call(self._client.pools())

    def submit(self, prompt: Prompt, **options: Unpack[SubmitOptions]) -> Job:
        """See `AsyncClient.submit`."""
        return Job(self, self._loop.call(self._client.submit(prompt, **options)))

    def stream(self, prompt: Prompt, **options: Unpack[SubmitOptions]) -> Iterator[Chunk]:
        """Submits a job and yields its chunks; see `submit` and `Job.stream`."""
        return self.submit(prompt, **options).stream()

    def attach(self, job_id: str, *, after: int = -1, tenant: str | None = None) -> Job:
        """See `AsyncClient.attach`."""
        return Job(self, self._loop.call(self._client.attach(job_id, after=after, tenant=tenant)))

    def result(self, job_id: str, *, check: bool = True, tenant: str | None = None) -> Result:
        """Waits for a job's end; see `AsyncJob.result`."""
        return self._loop.call(self._client.result(job_id, check=check, tenant=tenant))

    def status(self, job_id: str, *, tenant: str | None = None) -> JobStatus:
        """Where a job stands."""
        return self._loop.call(self._client.status(job_id, tenant=tenant))

    def cancel(self, job_id: str, *, tenant: str | None = None) -> str:
        """Cancels a job; answers its state; see `AsyncJob.cancel`."""
        return self._loop.call(self._client.cancel(job_id, tenant=tenant))


class Job:
    """A handle on a submitted or attached job; see `AsyncJob`."""

    def __init__(self, client: Client, job: AsyncJob) -> None:
        # The client closes when nobody holds it any more.
        self._client = client
        self._loop = client._loop
        self._job = job
        self.id = job.id
        self.pool = job.pool

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
        """Cancels the job; answers its state; see `AsyncJob.cancel`."""
        return self._loop.call(self._job.cancel())

    def detach(self) -> None:
        """Says that nobody reads here any more; see `AsyncJob.detach`."""
        self._loop.call(self._job.detach())


def _close(loop: LoopThread, client: AsyncClient) -> None:
    loop.stop(client.close())


async def _next_of(batches: AsyncGenerator[list[Chunk], None]) -> list[Chunk]:
    return await anext(batches, [])
