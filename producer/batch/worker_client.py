"""The client of a worker process: one event loop on a thread, which all tasks of the process share.

A task waits on its own thread, so the pools `threads`, `prefork` and `solo` work alike. The loop starts with the first
task, because a fork would lose its thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from celery import signals

from penstock.producer.client import AsyncClient

T = TypeVar("T")
_CLOSE_TIMEOUT_S = 5.0


class WorkerClient:
    """Runs coroutines with the client of this process, from any thread."""

    def __init__(self, redis_url: Callable[[], str]) -> None:
        """`redis_url` is asked for the URL of the job queue when the first task runs."""
        self._redis_url = redis_url
        self._lock = threading.Lock()
        self._running: _ClientLoop | None = None
        self._pid = 0

    def run(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """Run `work` to its end. If the calling thread is interrupted, as by a time limit, the work is canceled.

        Raises UnavailableError while Redis is unreachable.
        """
        running = self._of_this_process()
        future = asyncio.run_coroutine_threadsafe(running.call(work), running.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, **_: Any) -> None:
        """Close the client and end the loop. Celery calls this when a process of a worker ends."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None and self._pid == os.getpid():
            running.close()

    def _of_this_process(self) -> _ClientLoop:
        with self._lock:
            if self._running is None or self._pid != os.getpid():
                self._running, self._pid = _ClientLoop(self._redis_url()), os.getpid()
                # The first ends a child process, the second a worker without child processes.
                for ending in (signals.worker_process_shutdown, signals.worker_shutdown):
                    ending.connect(self.close, weak=False)
            return self._running


class _ClientLoop:
    """A loop that runs on a thread of its own, and the client that connects on it when it is first used."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._client: AsyncClient | None = None
        self._connecting = asyncio.Lock()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="penstock-client", daemon=True)
        self._thread.start()

    async def call(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        async with self._connecting:
            if self._client is None:
                # A failed attempt leaves no client, so the next task makes another one.
                self._client = await AsyncClient(self._redis_url).connect()
        return await work(self._client)

    def close(self) -> None:
        if self._client is not None:
            future = asyncio.run_coroutine_threadsafe(self._client.close(), self.loop)
            try:
                future.result(_CLOSE_TIMEOUT_S)
            except TimeoutError:
                future.cancel()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()
