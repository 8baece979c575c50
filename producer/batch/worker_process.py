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

from penstock.producer.client import AsyncClient
from penstock.producer.client.sync import LoopThread
from penstock.runtime.service_manager import ServiceManager
from penstock.runtime.tracing.context import TRACER_KEY, context_of
from penstock.runtime.tracing.setup import tracing_of

if TYPE_CHECKING:
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

    def __init__(self, redis_url: Callable[[], str]) -> None:
        """`redis_url` is asked for the URL of the job queue when the first task runs."""
        self._redis_url = redis_url
        self._lock = threading.Lock()
        self._running: _ClientThread | None = None
        self._pid = 0

    def run(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """Run `work` to its end. If the calling thread is interrupted, as by a time limit, the work is canceled.

        Raises UnavailableError while Redis is unreachable.
        """
        running = self._of_this_process()
        return running.loop.call(running.call(work))

    def close(self, **_: Any) -> None:
        """Close the client and end the loop. Celery calls this when a process of a worker ends."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.loop.stop(running.close())

    def _of_this_process(self) -> _ClientThread:
        with self._lock:
            if self._running is None or self._pid != os.getpid():
                self._running, self._pid = _ClientThread(self._redis_url()), os.getpid()
                # The first ends a child process, the second a worker without child processes.
                for ending in (signals.worker_process_shutdown, signals.worker_shutdown):
                    ending.connect(self.close, weak=False)
            return self._running


TOGETHER_S = 0.01
"""How long a call waits for others, while one is running. It halves the script calls of a group of short tasks."""


class _ClientThread:
    """A loop on a thread of its own, and the client that connects on it when it is first used.

    Tasks come one by one. Calls that begin together share calls of Redis, so a call begins at once only if none runs.
    """

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._client: AsyncClient | None = None
        self._connecting = asyncio.Lock()
        self._num_running = 0
        self._next_start: asyncio.Event | None = None
        self.loop = LoopThread()

    async def call(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        async with self._connecting:
            if self._client is None:
                # A failed attempt leaves no client, so the next task makes another one.
                self._client = await AsyncClient(self._redis_url).connect()
        if self._num_running:
            await self._start_together()
        self._num_running += 1
        try:
            return await work(self._client)
        finally:
            self._num_running -= 1

    async def _start_together(self) -> None:
        if self._next_start is None:
            self._next_start = asyncio.Event()
            asyncio.get_running_loop().call_later(TOGETHER_S, self._start)
        await self._next_start.wait()

    def _start(self) -> None:
        if self._next_start is not None:
            self._next_start.set()
            self._next_start = None

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
