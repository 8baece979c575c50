"""Sends the planned requests when they are due, even if the server has not answered earlier ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from penstock.cli.bench.answer import AnswerReader
from penstock.cli.bench.connection import Connections
from penstock.cli.bench.options import LimitOptions
from penstock.cli.bench.records import PlannedRequest, RequestRecord
from penstock.cli.bench.target import Target


@dataclass(frozen=True, slots=True)
class Measured:
    """The records of a load in order of arrival, and its duration and CPU time."""

    records: tuple[RequestRecord, ...]
    duration_s: float
    client_cpu_s: float
    """CPU time of this process during the load."""
    num_unfinished: int = 0
    """Requests that Ctrl-C left without an end. They are not among the records."""


@dataclass(frozen=True)
class Load:
    """An open loop: a request is sent when it is due, not when an earlier answer has come.

    `max_concurrency` bounds the open requests; those beyond it wait. No request is sent after `duration`.
    """

    target: Target
    connections: Connections
    limits: LimitOptions

    async def run(self, plan: Sequence[PlannedRequest], on_end: Callable[[RequestRecord], None]) -> Measured:
        """Run the whole plan, and call `on_end` after each request. Ctrl-C ends it early."""
        bodies = [self.target.request(planned.prompt, planned.max_tokens) for planned in plan]
        slots = asyncio.Semaphore(self.limits.max_concurrency) if self.limits.max_concurrency else None
        records: list[RequestRecord] = []
        start_cpu_s, start_s = time.process_time(), time.perf_counter()
        num_unfinished = 0
        try:
            async with asyncio.TaskGroup() as tasks:
                for planned, body in zip(plan, bodies, strict=True):
                    wait_s = start_s + planned.due_s - time.perf_counter()
                    if wait_s > 0:
                        await asyncio.sleep(wait_s)
                    record = RequestRecord(planned.due_s)
                    records.append(record)
                    tasks.create_task(self._send(body, record, slots, start_s, on_end))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            num_unfinished = len(plan) - sum(record.is_over for record in records)
        duration_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        over = tuple(record for record in records if record.is_over)
        return Measured(over, duration_s, cpu_s, num_unfinished)

    async def _send(
        self,
        body: bytes,
        record: RequestRecord,
        slots: asyncio.Semaphore | None,
        start_s: float,
        on_end: Callable[[RequestRecord], None],
    ) -> None:
        record.ready_s = time.perf_counter() - start_s
        async with AsyncExitStack() as stack:
            now_s = record.ready_s
            if slots is not None:
                await stack.enter_async_context(slots)
                now_s = time.perf_counter() - start_s
            if self.limits.duration is not None and now_s > self.limits.duration:
                return
            record.sent_s = now_s
            await self.connections.exchange(body, AnswerReader(record), start_s, self.limits.request_timeout)
            record.is_over = True
            on_end(record)
