"""Delayed jobs that fall due within one second, beside chats whose first tokens are timed."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from faults.tools.backlog_entries import Requests, each
from faults.tools.report import quantile

from penstock.producer.client import AsyncClient

_AT_ONCE = 64
CHAT_TOKENS = 16
SPREAD_S = 1.0
"""Seconds within which all jobs fall due."""


@dataclass(slots=True)
class Chats:
    """Chats over HTTP, one after another at random times: how each part of a run served them."""

    gateway: str
    pool: str
    per_s: float
    first_ms: dict[str, list[float]] = field(default_factory=dict)
    """The milliseconds to each chat's first token, by the part of the run in which the chat began."""
    refused: Counter[str] = field(default_factory=Counter)
    part: str = "alone"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send chats while the block runs, then wait for the last ones."""
        async with httpx.AsyncClient(timeout=60) as http, asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(self._send(http, tasks))
            try:
                yield
            finally:
                sending.cancel()

    async def _send(self, http: httpx.AsyncClient, tasks: asyncio.TaskGroup) -> None:
        rng = random.Random(41)
        while True:
            await asyncio.sleep(rng.expovariate(self.per_s))
            tasks.create_task(self._chat(http))

    async def _chat(self, http: httpx.AsyncClient) -> None:
        part, started_s = self.part, time.perf_counter()
        body: dict[str, Any] = {"model": self.pool, "prompt": [1, 2, 3], "max_tokens": CHAT_TOKENS, "stream": True}
        async with http.stream("POST", f"{self.gateway}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                self.refused[str(answer.status_code)] += 1
                return
            is_first = True
            async for line in answer.aiter_lines():
                if is_first and line.startswith("data: {") and json.loads(line.removeprefix("data: ")).get("choices"):
                    self.first_ms.setdefault(part, []).append(1000 * (time.perf_counter() - started_s))
                    is_first = False

    def shown(self, part: str) -> str:
        """Return the median and the 99th percentile of a part."""
        times = self.first_ms.get(part, [0.0])
        return f"{quantile(times, 0.5):.0f} / {quantile(times, 0.99):.0f}"


async def submit_delayed(url: str, requests: Requests, due_s: float, job_ids: list[str], refused: Counter[str]) -> None:
    """Submit all requests for one second, which begins at `due_s` on this process's monotonic clock."""
    rng = random.Random(42)
    async with AsyncClient(url) as client:

        async def submit(index: int) -> None:
            delay_s = due_s + rng.uniform(0, SPREAD_S) - time.monotonic()
            options: dict[str, Any] = {"model": requests.pool, "not_before_s": delay_s, **requests.sampling}
            job_ids.append((await client.submit_unread(requests.prompt(index), **options)).job_id)

        await each(requests.number, submit, at_once=_AT_ONCE)
        refused.update({name: n for name, n in client.stats.decisions.items() if name != "admitted"})
