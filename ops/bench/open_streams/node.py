"""A node without an engine, as a process: `… bench.open_streams node URL CHARS`.

It joins the pool, takes every job, and emits its first token at once. Each line on its stdin is a load: all jobs then
gain tokens at an even rate, by the same script that a node calls. Any answer except OK ends the process.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, cast

from redis.asyncio import Redis

from bench.open_streams.emit_calls import FIRST_TOKEN, EmitCall, text_of
from bench.stopwatch import percentile
from penstock.contract.output import Chunk
from penstock.contract.pool import NodePressure, PoolRecord
from penstock.contract.priority import NUM_LEVELS
from penstock.gpu_node.settings import NodeSettings
from penstock.queue import keys
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import connect
from penstock.queue.broker.node import Capacity, Emission, NodeBroker, Taken
from penstock.queue.wire import encode_chunk

POOL = MODEL = "stub"
NODE = "stub-node"
KV_TOKENS = 1 << 28
SLOTS = 1 << 16
MAX_CALLS = 32
"""Emit calls without an answer; beyond that the node waits, as a node does behind a slow Redis."""
TAKE_INTERVAL_S = 0.01
HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens for all streams, from a time on the monotonic clock."""

    per_s: float
    """Tokens of all streams together."""
    batch: int
    """Streams whose tokens leave in one emit call, as those of one node's step do."""
    from_s: float
    seconds: float
    direct: bool = False
    """Publish to the reading process without the script, which stores each chunk and checks each lease as well."""


class StubNode:
    """The node's loops."""

    def __init__(self, redis: Redis, num_chars: int) -> None:
        self._redis = redis
        self._num_chars = num_chars
        self._broker = NodeBroker(redis, POOL, NODE, "stub")
        self._jobs: list[tuple[str, str]] = []
        self._calls: list[EmitCall] = []
        self._next_index = 1
        self._num_takes = 0
        self._open_calls = asyncio.Semaphore(MAX_CALLS)
        self._late_ms: list[float] = []
        self._call_ms: list[float] = []
        self._num_sent = 0
        self._channel: str | None = None

    async def run(self) -> None:
        """Serve until stdin ends."""
        settings = NodeSettings.load(redis_url="unused", model=MODEL, pool=POOL)
        await self._broker.join(settings.pool_config, PoolRecord(POOL, MODEL, max_model_len=1 << 20))
        await self._heartbeat()
        print(json.dumps({"event": "ready"}), flush=True)
        async with asyncio.TaskGroup() as group:
            loops = [group.create_task(self._take_forever()), group.create_task(self._heartbeat_forever())]
            while line := await asyncio.to_thread(sys.stdin.readline):
                print(json.dumps(await self._publish(Load(**json.loads(line)))), flush=True)
            for loop in loops:
                loop.cancel()

    async def _heartbeat_forever(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._heartbeat()

    async def _heartbeat(self) -> None:
        pressure = NodePressure(NODE, max_num_seqs=SLOTS, kv_tokens_available=KV_TOKENS, revision="stub")
        await self._broker.heartbeat(pressure, free=KV_TOKENS, answered_call=self._num_takes, held=None)
        await self._broker.sweep()

    async def _take_forever(self) -> None:
        while True:
            await asyncio.sleep(TAKE_INTERVAL_S)
            self._num_takes += 1
            capacity = Capacity((KV_TOKENS,) * NUM_LEVELS, (SLOTS,) * NUM_LEVELS, KV_TOKENS, SLOTS)
            taken = await self._broker.take(self._num_takes, secrets.token_hex(8), capacity)
            if taken.jobs:
                answers = await self._broker.emit([self._first_of(job) for job in taken.jobs])
                self._jobs += [
                    (job.job_id, job.lease) for job, answer in zip(taken.jobs, answers, strict=True) if answer == "OK"
                ]

    def _first_of(self, job: Taken) -> Emission:
        text = text_of(time.monotonic_ns(), 0, self._num_chars)
        chunk = Chunk(job.job_id, 0, 0, 0, (FIRST_TOKEN,), text, num_prompt_tokens=1)
        return Emission(job.job_id, job.lease, 0, (encode_chunk(chunk),))

    async def _publish(self, load: Load) -> dict[str, float]:
        """Publish one load; return how many tokens left, and how late they were."""
        if not self._calls:
            batches = [self._jobs[at : at + load.batch] for at in range(0, len(self._jobs), load.batch)]
            self._calls = [EmitCall(batch, self._next_index) for batch in batches]
        self._late_ms, self._call_ms, self._num_sent = [], [], 0
        self._channel = await self._reading_channel() if load.direct else None
        due_s = load.from_s
        async with asyncio.TaskGroup() as group:
            while due_s < load.from_s + load.seconds:
                for call in self._calls:
                    await self._until(due_s)
                    await self._open_calls.acquire()
                    self._late_ms.append((time.monotonic() - due_s) * 1e3)
                    group.create_task(self._emit(call))
                    due_s += call.num_jobs / load.per_s
        seconds = time.monotonic() - load.from_s
        late = {f"late_p{percent}_ms": percentile(self._late_ms, percent) for percent in (50, 99)}
        calls = {f"emit_p{percent}_ms": percentile(self._call_ms, percent) for percent in (50, 99)}
        return {**asdict(load), "num_sent": self._num_sent, "sent_per_s": self._num_sent / seconds, **late, **calls}

    async def _reading_channel(self) -> str:
        """Return the channel of the one process that reads the jobs."""
        inboxes = await cast(Any, self._redis).hget(keys.job(self._jobs[0][0]), "inboxes")
        return keys.inbox_channel(POOL, inboxes.decode())

    async def _until(self, due_s: float) -> None:
        if (left_s := due_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)

    async def _emit(self, call: EmitCall) -> None:
        began_s = time.monotonic()
        if self._channel is None:
            rows = call.rows(time.monotonic_ns(), self._num_chars)
            if wrong := set(await scripts.call(self._redis, "emit", POOL, NODE, rows)) - {b"OK"}:
                raise RuntimeError(f"emit answered {wrong}")
        elif await self._redis.publish(self._channel, call.message(time.monotonic_ns(), self._num_chars)) != 1:
            raise RuntimeError("the gateway does not listen")
        self._call_ms.append((time.monotonic() - began_s) * 1e3)
        self._open_calls.release()
        self._num_sent += call.num_jobs


async def serve(redis_url: str, num_chars: int) -> None:
    """Run the node until its stdin ends."""
    redis = connect(redis_url)
    try:
        await StubNode(redis, num_chars).run()
    finally:
        await redis.aclose()
