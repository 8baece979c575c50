"""The soak's load: a number of concurrent jobs by the client and over HTTP, each stream compared with the reference."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from faults.tools.http_reader import HttpReading, http_client
from faults.tools.processes import GatewayProcess
from faults.tools.work import KINDS, PROMPT, Work, check_logs, new_work, statuses
from redis.asyncio import Redis

from penstock.contract.errors import BusyError, UnavailableError
from penstock.producer.client import AsyncClient
from penstock.queue.broker.connection import with_retries

PATIENCE_S = 300.0
RETRY_S = 0.5
Read = Callable[[Work], Awaitable[None]]


class Load:
    """Counts accepted jobs and their outcomes. Raises at the first stream that differs from the reference."""

    def __init__(
        self,
        redis: Redis,
        client: AsyncClient,
        pool: str,
        gateways: Sequence[GatewayProcess],
        *,
        rng: random.Random,
        pace_s: float,
    ) -> None:
        """A reader starts a job every `pace_s` at most. A load that followed the machine's speed would leave more or
        less in Redis as other work comes and goes. That would hide growth.
        """
        self._redis, self._client, self._pool, self._gateways, self._rng = redis, client, pool, gateways, rng
        self._pace_s = pace_s
        self._is_over = False
        self.counts: Counter[str] = Counter()

    def stop(self) -> None:
        """Start no more jobs, and read the running ones to their ends."""
        self._is_over = True

    async def run(self, *, num_clients: int, num_http: int) -> None:
        """Run this many readers of each kind, each with one job after the other, until `stop`."""
        async with http_client() as self._http, asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(self._repeat(self._read_by_client))
            for _ in range(num_http):
                group.create_task(self._repeat(self._read_by_http))

    async def _repeat(self, read: Read) -> None:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._rng.random() * self._pace_s)
        while not self._is_over:
            next_s = clock() + self._pace_s
            number = self.counts["accepted"]
            await read(new_work(self._pool, self._rng.randint(20, 150), **KINDS[number % len(KINDS)]))
            await asyncio.sleep(next_s - clock())

    async def _read_by_client(self, work: Work) -> None:
        try:
            job = await self._client.submit(PROMPT, **work.options)
        except (BusyError, UnavailableError):
            self.counts["refused"] += 1
            await asyncio.sleep(RETRY_S)
            return
        self.counts["accepted"] += 1
        await work.read(job.chunks())
        await self._note_end(work)
        if work.end == "succeeded":
            work.check()
            await with_retries(lambda: check_logs(self._redis, [work]), PATIENCE_S)

    async def _read_by_http(self, work: Work) -> None:
        """Request with one idempotency key from any gateway until the whole answer has arrived."""
        key = secrets.token_hex(8)
        reading, job_id = HttpReading(), ""
        while not (reading.is_whole or reading.error == "node_lost"):
            if self._rng.random() < 0.5:
                reading = HttpReading()  # else the stream goes on where it was cut
            await reading.read(self._http, self._rng.choice(self._gateways).url, work, key=key)
            assert reading.job_id in ("", job_id) or not job_id, "the key names one job"
            job_id = reading.job_id or job_id
            if not reading.is_whole:
                self.counts["asked again"] += 1
                await asyncio.sleep(RETRY_S)
        self.counts["accepted"] += 1
        if reading.is_whole:
            reading.check(work)
        work.options["job_id"] = reading.job_id
        await self._note_end(work)

    async def _note_end(self, work: Work) -> None:
        (status,) = await with_retries(lambda: statuses(self._redis, [work]), PATIENCE_S)
        assert status.outcome is not None
        self.counts[f"{status.state} {status.outcome.code}".strip()] += 1
        self.counts["taken over"] += status.losses > 0
        self.counts["tokens"] += work.num_expected
