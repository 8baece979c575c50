"""Puts a workload to an engine: one that is stepped in this process, or one that streams to coroutines."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from bench.stopwatch import Stopwatch
from bench.workload import BenchRequest, Workload

Saw = Callable[[int, int], None]
"""Told of a request's number and how many tokens of it just came."""
Ask = Callable[[int, BenchRequest, Stopwatch], Coroutine[Any, Any, None]]


class Stepper(Protocol):
    """An engine that works only while it is called."""

    def add(self, i: int, request: BenchRequest) -> None:
        """Take a request."""

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def step(self, saw: Saw) -> None:
        """Work until something came out."""


def drive(engine: Stepper, workload: Workload, watch: Stopwatch) -> None:
    """Give each request to the engine when it is due and may start, and step until all are answered."""
    pending = deque(range(len(workload.requests)))
    most = workload.max_in_flight or len(pending)
    while pending or engine.has_work():
        while pending and watch.num_open < most and watch.wait_s(pending[0]) <= 0:
            i = pending.popleft()
            watch.asked(i)
            engine.add(i, workload.requests[i])
        if engine.has_work():
            engine.step(watch.saw)
        elif pending:
            time.sleep(max(0.0, watch.wait_s(pending[0])))


def fine_runner() -> asyncio.Runner:
    """A loop with timers to the microsecond; with epoll's, to a millisecond, requests would be sent late."""
    return asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector()))


async def drive_streams(ask: Ask, workload: Workload, watch: Stopwatch) -> None:
    """One coroutine a request, each from when it is due until its stream ends."""
    room = asyncio.Semaphore(workload.max_in_flight or len(workload.requests))

    async def one(i: int, request: BenchRequest) -> None:
        async with room:
            await asyncio.sleep(max(0.0, watch.wait_s(i)))
            watch.asked(i)
            await ask(i, request, watch)

    async with asyncio.TaskGroup() as tasks:
        for i, request in enumerate(workload.requests):
            tasks.create_task(one(i, request))
