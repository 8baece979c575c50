"""An engine for asyncio programs: it steps on a thread of its own, and each request is an asynchronous stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from penstock.contract.errors import ConflictError, InvariantError, JobCancelledError, UnavailableError
from penstock.contract.sampling import SamplingParams
from penstock.gpu_node.engine.config import ModelOrConfig
from penstock.gpu_node.engine.engine import Engine
from penstock.gpu_node.engine.offline import Prompt, RequestOptions, generations_of, one_request
from penstock.gpu_node.engine.records import EngineRequest, EngineStats, Generation, RequestTimings, StepOutput
from penstock.gpu_node.engine.worker import EngineWorker

T = TypeVar("T")


class AsyncEngine:
    """Runs a model in this process. `async with` loads it and starts its thread; leaving the context ends the thread.

    Any number of tasks of one event loop may use it at once: the engine computes their requests in one batch.
    """

    def __init__(self, model: ModelOrConfig, **settings: Any) -> None:
        """`model` and `settings` are those of `Engine`; they are checked when the context is entered."""
        self._load = partial(Engine, model, **settings)
        self._engine: Engine | None = None
        self._worker: EngineWorker | None = None
        # Keyed by id: id of a request.
        self._streams: dict[str, asyncio.Queue[StepOutput | BaseException | None]] = {}
        """The outputs of each open request. None ends its stream; so does the error that ended the engine."""
        self._calls: set[asyncio.Future[Any]] = set()
        """Calls that the engine's thread has not answered yet."""
        self._num_named = 0

    async def __aenter__(self) -> Self:
        """Load the model, on another thread, and start. Raises ConfigError."""
        self._engine = await asyncio.to_thread(self._load)
        loop = asyncio.get_running_loop()
        self._worker = EngineWorker(self._engine, lambda outputs: _on(loop, partial(self._deliver, outputs)))
        self._worker.stopped.add_done_callback(lambda done: _on(loop, partial(self._end_all, done)))
        self._worker.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the engine's thread after its step. Streams that are still open end."""
        if self._worker is not None:
            self._worker.stop()
            await asyncio.wait([asyncio.wrap_future(self._worker.stopped)])

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[StepOutput]:
        """Queue a prompt, and yield its outputs as they come. The arguments are those of `Engine.add_request`.

        Closing the stream aborts the request, and so does canceling the task that reads it. After `abort` it ends.
        Raises RequestError for a request that can never run, ConflictError for an id that is open.
        """
        async for output in self._outputs_of(await self._request(prompt, params, options)):
            yield output

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Return the finished choices of a prompt. Arguments and errors are those of `stream`.

        Raises JobCancelledError if `abort` ends the request.
        """
        request = await self._request(prompt, params, options)
        outputs = [output async for output in self._outputs_of(request)]
        if not outputs or outputs[-1].usage is None:
            raise JobCancelledError(f"request {request.request_id} was aborted")
        return generations_of([request], outputs)[0]

    async def abort(self, request_id: str) -> None:
        """Drop a request before the next step; its stream ends. Does nothing for an unknown id."""
        engine, _ = self._running()
        await self._call(partial(engine.abort, request_id))
        if (outputs := self._streams.get(request_id)) is not None:
            outputs.put_nowait(None)

    async def timings(self, request_id: str) -> RequestTimings:
        """Return where the time of a request went so far. Raises NotFoundError as `Engine.timings` does."""
        engine, _ = self._running()
        return await self._call(partial(engine.timings, request_id))

    async def stats(self) -> EngineStats:
        """Return a snapshot of memory, queues and counters."""
        engine, _ = self._running()
        return await self._call(engine.stats)

    def _running(self) -> tuple[Engine, EngineWorker]:
        if self._engine is None or self._worker is None:
            raise InvariantError("an AsyncEngine is used outside of its `async with`")
        if self._worker.stopped.done():
            raise _stopped(self._worker.stopped.exception())
        return self._engine, self._worker

    async def _call(self, command: Callable[[], T]) -> T:
        """Run a command on the engine's thread, between two steps."""
        _, worker = self._running()
        answer = asyncio.wrap_future(worker.call(command))
        self._calls.add(answer)
        try:
            return await answer
        finally:
            self._calls.discard(answer)

    async def _request(self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions) -> EngineRequest:
        """Make a request on another thread, because a long prompt or a new grammar takes long."""
        engine, _ = self._running()
        if "request_id" not in options:
            self._num_named += 1
            options["request_id"] = f"request-{self._num_named}"

        def make() -> EngineRequest:
            request = one_request(prompt, params, engine.tokenizer, **options)
            return replace(request, prepared=engine.prepare(request.params, request.adapter, tenant=request.tenant))

        return await asyncio.to_thread(make)

    async def _outputs_of(self, request: EngineRequest) -> AsyncGenerator[StepOutput]:
        engine, worker = self._running()
        request_id, outputs = request.request_id, asyncio.Queue[StepOutput | BaseException | None]()
        if request_id in self._streams:
            raise ConflictError(f"request {request_id} is already in the engine")
        self._streams[request_id] = outputs
        has_ended = False
        try:
            await self._call(partial(engine.add, request, is_timed=True))
            while not has_ended and (output := await outputs.get()) is not None:
                if isinstance(output, BaseException):
                    raise _stopped(output) from output
                has_ended = output.usage is not None
                yield output
        finally:
            del self._streams[request_id]
            if not has_ended:
                worker.abort(request_id)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put_nowait(output)

    def _end_all(self, done: Future[None]) -> None:
        """End the streams and calls that the engine's thread will not answer any more."""
        error = done.exception()
        for stream in self._streams.values():
            stream.put_nowait(error)
        for answer in self._calls:
            if not answer.done():
                answer.set_exception(_stopped(error))


def _stopped(error: BaseException | None) -> UnavailableError:
    cause = f"because of {error!r}" if error else "at the end of its `async with`"
    return UnavailableError(f"the engine stopped {cause}: enter a new AsyncEngine")


def _on(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Run a call on the loop, from another thread. A loop that is closed has no use for it."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
