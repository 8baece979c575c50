"""What the ways to Redis and back take by themselves: a prompt goes through a list, each token through a channel, and
nothing is admitted, leased, kept or acknowledged. One prompt at a time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from bench.drive import drive_streams, fine_runner
from bench.queue_cost.processes import child
from bench.stopwatch import Stopwatch
from bench.workload import BenchRequest, Workload
from penstock.runtime.embedded_redis import EmbeddedRedis

PROMPTS = "prompts"
TOKENS = "tokens"


async def serve_plain(redis_url: str, step_s: float) -> None:
    """Answers prompts, a token each `step_s`, until it is killed."""
    async with Redis.from_url(redis_url, socket_timeout=None) as redis:
        print(json.dumps({"event": "ready"}), flush=True)
        while True:
            _, prompt = await redis.brpop([PROMPTS])
            for _ in range(json.loads(prompt)["max_tokens"]):
                await asyncio.to_thread(time.sleep, step_s)
                await redis.publish(TOKENS, b"token")


class PlainSession:
    """The asking side."""

    def __init__(self, redis: Redis, tokens: PubSub, runner: asyncio.Runner) -> None:
        self._redis = redis
        self._tokens = tokens
        self._runner = runner

    def run(self, workload: Workload, watch: Stopwatch) -> None:
        """Answers a workload of one request at a time."""
        self._runner.run(drive_streams(self._ask, workload, watch))

    async def _ask(self, i: int, request: BenchRequest, watch: Stopwatch) -> None:
        await self._redis.lpush(PROMPTS, json.dumps({"prompt": request.prompt, "max_tokens": request.num_output}))
        num_seen = 0
        while num_seen < request.num_output:
            if await self._tokens.get_message(ignore_subscribe_messages=True, timeout=None):
                num_seen += 1
                watch.saw(i, 1)


@contextmanager
def open_plain(step_ms: float) -> Iterator[PlainSession]:
    """Such a worker, and what asks it."""
    with EmbeddedRedis() as server, fine_runner() as runner:
        redis = Redis.from_url(server.url, socket_timeout=None)
        tokens = redis.pubsub()
        runner.run(tokens.subscribe(TOKENS))
        with child("bench.queue_cost", "plain", server.url, str(step_ms / 1e3)):
            yield PlainSession(redis, tokens, runner)
        runner.run(tokens.aclose())
        runner.run(redis.aclose())
