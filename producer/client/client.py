"""The asynchronous client: what the gateway and the synchronous client build on."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from penstock.contract.admission import estimate_cost
from penstock.contract.broker.connection import connect
from penstock.contract.broker.producer import JobStatus, ProducerBroker
from penstock.contract.errors import ConfigError, RequestError, UnavailableError
from penstock.contract.job import Chunk, Job, Priority, Result, SamplingParams, is_job_id, pool_of
from penstock.contract.settings import RedisSettings
from penstock.contract.wire import PoolRecord
from penstock.producer.client.copies import Copy, Door
from penstock.producer.client.courier import Courier
from penstock.producer.client.inbox import Inbox
from penstock.producer.client.job import AsyncJob
from penstock.producer.client.request import (
    Prompt,
    build_job,
    choose_pool,
    mint_job_id,
    prompt_fields,
    sampling_params,
)
from penstock.producer.client.settings import ClientSettings
from penstock.producer.client.source import JobSource, Submission, submit
from penstock.producer.client.stats import ClientStats

POOLS_TTL_S = 1.0


class AsyncClient:
    """Submits jobs and streams what comes back.

        async with AsyncClient("redis://localhost") as client:
            async for chunk in client.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="")

    `redis_url` defaults to $PENSTOCK_REDIS_URL.
    """

    def __init__(
        self, redis_url: str | None = None, *, tenant: str = "default", settings: ClientSettings | None = None
    ) -> None:
        url = RedisSettings.load(redis_url=redis_url).redis_url
        if not url:
            raise ConfigError("no Redis named: pass redis_url or set PENSTOCK_REDIS_URL", param="redis_url")
        settings = settings or ClientSettings.load()
        self.stats = ClientStats()
        self._tenant = tenant
        self._redis = connect(url)
        broker = ProducerBroker(self._redis)
        self._courier = Courier(broker, settings.outage_s)
        self._inbox = Inbox(self._redis, broker, settings, self.stats)
        self._pools = Copy(lambda: self._courier.ask(lambda b: b.pools()), POOLS_TTL_S)
        self._doors: dict[str, Door] = {}

    async def connect(self) -> Self:
        """Subscribes; raises UnavailableError when Redis is away. `async with` does it too."""
        await self._inbox.open()
        return self

    async def close(self) -> None:
        """Ends every stream, task and connection of this client; jobs go on unless they were not `background`."""
        await self._inbox.close()
        await self._redis.aclose()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def pools(self) -> dict[str, PoolRecord]:
        """The served models by pool, as of at most a second ago."""
        return await self._pools.get()

    async def submit(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        params: SamplingParams | None = None,
        priority: Priority = Priority.STANDARD,
        deadline_s: float | None = None,
        channel: bool = False,
        background: bool = True,
        idempotency_key: str | None = None,
        job_id: str | None = None,
        tenant: str | None = None,
        **sampling: Any,
    ) -> AsyncJob:
        ...
