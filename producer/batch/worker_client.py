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
from penstock.producer.client.sync import LoopThread

T = TypeVar("T")


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


class _ClientThread:
    """A loop on a thread of its own, and the client that connects on it when it is first used."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._client: AsyncClient | None = None
        self._connecting = asyncio.Lock()
        self.loop = LoopThread()

    async def call(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        async with self._connecting:
            if self._client is None:
                # A failed attempt leaves no client, so the next task makes another one.
                self._client = await AsyncClient(self._redis_url).connect()
        return await work(self._client)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
