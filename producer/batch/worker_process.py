"""What the tasks of a worker process share: the client, with an event loop on a thread, and the traces of the tasks.

A task waits on its own thread, so the pools `threads`, `prefork` and `solo` work alike. The loop starts with the first
task, because a fork would lose its thread.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from celery import Task, signals
from celery.concurrency.thread import TaskPool as ThreadPool

from penstock.producer.client import AsyncClient
from penstock.producer.client.loop_thread import LoopThread
from penstock.queue.broker.redis_clock import RedisClock
from penstock.runtime.redis_source import tell_redis_source
from penstock.runtime.service_manager import ServiceManager
from penstock.runtime.tracing.context import TRACER_KEY, context_of
from penstock.runtime.tracing.setup import tracing_of

if TYPE_CHECKING:
    from celery.worker.consumer import Consumer
    from opentelemetry.context import Context

    from penstock.runtime.tracing.export import Tracing

T = TypeVar("T")


def tell_service_manager() -> None:
    """Tell systemd when this process is a worker that takes tasks, and when it stops.

    It has no watchdog: Celery's consumer restarts while Redis is away, which is no reason to end the worker.
    """
    manager = ServiceManager.of_environment()
    signals.worker_ready.connect(lambda **_: manager.ready("takes tasks"), weak=False)
    signals.worker_shutting_down.connect(lambda **_: manager.stopping(), weak=False)


class WorkerClient:
    """Runs coroutines with the client of this process, from any thread."""

    def __init__(self, redis_url: Callable[[], str], num_threads: int = 1) -> None:
        """`redis_url` is asked for the URL of the job queue when the first task runs.

        `num_threads`: how many threads call at most. A Celery worker sets it when its pool is known.
        """
        self._redis_url = redis_url
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._running: _ClientThread | None = None
        self._pid = 0
        self.clock = RedisClock()
        """That of Celery's Redis, in a worker's main process."""
        signals.worker_ready.connect(self._note_pool)

    def _note_pool(self, sender: Consumer, **_: Any) -> None:
        # A child process of the pool `prefork` runs one task at a time.
        if isinstance(sender.pool, ThreadPool):
            self._num_threads = sender.pool.limit

    def run(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]], task_id: str = "") -> T:
        """Run `work` to its end. If the calling thread is interrupted, as by a time limit, the work is canceled.

        Raises UnavailableError while Redis is unreachable, and TaskTerminatedError if `terminate` named the task.
        """
        running = self._of_this_process()
        return running.loop.call(running.call(work, task_id))

    def terminate(self, task_id: str) -> None:
        """Let the call of a task of this process, which runs or begins soon, raise TaskTerminatedError."""
        running = self._of_this_process()
        running.loop.post(running.terminate(task_id))

    def close(self, **_: Any) -> None:
        """Close the client and end the loop. Celery calls this when a process of a worker ends."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.loop.stop(running.close())

    def _of_this_process(self) -> _ClientThread:
        with self._lock:
            if self._running is None or self._pid != os.getpid():
                self._running, self._pid = _ClientThread(self._redis_url(), self._num_threads), os.getpid()
                # The first ends a child process, the second a worker without child processes.
                for ending in (signals.worker_process_shutdown, signals.worker_shutdown):
                    ending.connect(self.close, weak=False)
            return self._running


class TaskTerminatedError(Exception):
    """Celery was told to end the task."""


TOGETHER_S = 0.02
"""The shortest time between two starts of calls, while threads are free that may still call."""


class _ClientThread:
    """A loop on a thread of its own, and the client that connects on it when it is first used.

    Calls that begin together share calls of Redis and steps of the engine, but tasks come one by one. So calls begin
    at most every TOGETHER_S, unless all threads wait for calls and no further call can come.
    """

    def __init__(self, redis_url: str, num_threads: int) -> None:
        self._redis_url = redis_url
        self._num_threads = num_threads
        self._client: AsyncClient | None = None
        self._connecting = asyncio.Lock()
        self._num_running = 0
        self._waiting: list[asyncio.Future[None]] = []
        # Of one user: the app that runs here.
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._terminated: set[str] = set()
        self._next_start_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.loop = LoopThread()

    async def call(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]], task_id: str = "") -> T:
        if not task_id:
            return await self._call(work)
        if task_id in self._terminated:
            self._terminated.discard(task_id)
            raise TaskTerminatedError("the task was terminated")
        calls = asyncio.ensure_future(self._call(work))
        self._calls[task_id] = calls
        try:
            return await calls
        except asyncio.CancelledError:
            if task_id in self._terminated:
                raise TaskTerminatedError("the task was terminated") from None
            calls.cancel()
            raise
        finally:
            self._terminated.discard(task_id)
            del self._calls[task_id]

    async def terminate(self, task_id: str) -> None:
        """Cancel the call of a task, also one that begins later."""
        self._terminated.add(task_id)
        if (call := self._calls.get(task_id)) is not None:
            call.cancel()

    async def _call(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        async with self._connecting:
            if self._client is None:
                # A failed attempt leaves no client, so the next task makes another one.
                tell_redis_source(self._redis_url, "worker")
                self._client = await AsyncClient(self._redis_url).connect()
        start = self._next_start()
        try:
            await start
            return await work(self._client)
        finally:
            if not start.cancelled():
                self._num_running -= 1

    def _next_start(self) -> asyncio.Future[None]:
        """Return a future that is done when the next calls begin. The call counts as running from then on."""
        loop = asyncio.get_running_loop()
        start = loop.create_future()
        self._waiting.append(start)
        if self._num_running + len(self._waiting) >= self._num_threads or loop.time() >= self._next_start_s:
            self._start()
        elif self._timer is None:
            self._timer = loop.call_at(self._next_start_s, self._start)
        return start

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._next_start_s = asyncio.get_running_loop().time() + TOGETHER_S
        for start in self._waiting:
            if not start.cancelled():
                self._num_running += 1
                start.set_result(None)
        self._waiting.clear()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


# The trace of a task: from the program that sends the task, through the worker, to the task's jobs.
#
# The task's headers `traceparent` and `tracestate` carry it, so OpenTelemetry's own instrumentation of Celery works at
# either end too. Programs that do not use OpenTelemetry send no such headers.

SERVICE = "penstock-worker"
_HEADERS = ("traceparent", "tracestate")


def carry_trace(headers: MutableMapping[str, Any], **_: Any) -> None:
    """Add the current span to the headers of a task that is being sent. Celery calls this before it sends one."""
    if "opentelemetry.trace" not in sys.modules or _HEADERS[0] in headers:
        return
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    TraceContextTextMapPropagator().inject(headers)


class TaskTraces:
    """The traces of the tasks that a worker runs. Each process of the worker exports its own spans."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tracing: Tracing | None = None
        self._is_set_up = False

    @contextmanager
    def continued(self, task: Task) -> Iterator[None]:
        """Run the block in the trace that the task carries. With traces on, the block is a span of that trace."""
        tracing = self._of_this_process()
        given = {name: value for name in _HEADERS if isinstance(value := task.request.get(name), str)}
        if tracing is None and not given:
            yield
            return
        try:
            from opentelemetry import context, trace
        except ModuleNotFoundError:
            yield
            return
        if trace.get_current_span().get_span_context().is_valid:
            # Another instrumentation has begun a span for this task.
            yield
            return
        parent = context_of(given)
        if tracing is not None:
            with _span_of(task, tracing, parent):
                yield
            return
        token = context.attach(parent)
        try:
            yield
        finally:
            context.detach(token)

    def _of_this_process(self) -> Tracing | None:
        """Return the export of spans. It begins with the first task, because a fork would lose its thread."""
        with self._lock:
            if not self._is_set_up:
                self._is_set_up = True
                self._tracing = tracing = tracing_of(None, SERVICE)
                if tracing is not None:
                    # The first ends a child process, the second a worker without child processes.
                    for ending in (signals.worker_process_shutdown, signals.worker_shutdown):
                        ending.connect(lambda **_: tracing.close(), weak=False)
            return self._tracing


@contextmanager
def _span_of(task: Task, tracing: Tracing, parent: Context) -> Iterator[None]:
    from opentelemetry import context, trace

    attributes = {
        "messaging.system": "celery",
        "messaging.operation.type": "process",
        "messaging.message.id": task.request.id,
        "celery.task_name": task.name,
    }
    # An exception's message may quote the request, so it is not recorded.
    with tracing.tracer.start_as_current_span(
        f"run {task.name}",
        parent,
        trace.SpanKind.CONSUMER,
        attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        token = context.attach(context.set_value(TRACER_KEY, tracing.tracer))
        try:
            yield
        except Exception as error:
            span.set_attribute("error.type", type(error).__name__)
            raise
        finally:
            context.detach(token)
