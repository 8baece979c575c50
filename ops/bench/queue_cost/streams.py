"""CPU per token of each process while many streams are read, from Redis and over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from typing import Any

from bench.queue_cost.clock import SPOKEN, STAMP
from bench.queue_cost.processes import POOL, CpuMeter, gateway, node, redis_pid
from penstock import AsyncClient
from penstock.runtime.embedded_redis import EmbeddedRedis


async def read_streams(client: AsyncClient, num_streams: int, num_tokens: int) -> tuple[int, list[float]]:
    """Runs streams to their end: tokens, and what lay between a step and its arrival here."""
    lags_ms: list[float] = []
    num_read = 0

    async def read(first_token: int) -> None:
        nonlocal num_read
        job = await client.submit([first_token, *[SPOKEN] * 31], max_tokens=num_tokens)
        async for batch in job.batches():
            now_ns = time.monotonic_ns()
            for chunk in batch:
                num_read += len(chunk.token_ids)
                if first_token == STAMP and chunk.text:
                    lags_ms.append((now_ns - int(chunk.text.split()[-1])) / 1e6)

    await asyncio.gather(*(read(STAMP if i == num_streams // 2 else SPOKEN) for i in range(num_streams)))
    return num_read, lags_ms


async def measure_load(server: EmbeddedRedis, step_ms: float, num_streams: int, num_tokens: int) -> None:
    with node(server.url, step_ms) as (node_pid, _):
        async with AsyncClient(server.url) as client:
            await read_streams(client, num_streams, 8)
            with CpuMeter({"node": node_pid, "redis": redis_pid(server), "client": os.getpid()}) as meter:
                num_read, lags_ms = await read_streams(client, num_streams, num_tokens)
    print(f"  step {step_ms:g} ms: {meter.report(num_read)}; step → client p50 {statistics.median(lags_ms):.2f} ms")


async def open_stream(url: str, fields: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a streamed completion with these fields, over a connection of its own."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(fields | {"stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return reader, writer


async def read_http(url: str, num_streams: int, num_tokens: int) -> tuple[int, list[float]]:
    """The same over HTTP, an event for each token, by a reader that does no more than count events."""
    lags_ms: list[float] = []

    async def read(first_token: int) -> int:
        fields = {"model": POOL, "prompt": [first_token, *[SPOKEN] * 31], "max_tokens": num_tokens}
        reader, writer = await open_stream(url, fields)
        num_events, tail = 0, b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 16)
            if not data:
                raise RuntimeError(f"the gateway hung up: {tail!r}")
            num_events += data.count(b"data: {")
            tail = data
            if first_token == STAMP and (at := data.rfind(b'"text":"')) >= 0:
                stamps = data[at + 8 :].split(b'"')[0].split()
                if stamps:
                    lags_ms.append((time.monotonic_ns() - int(stamps[-1])) / 1e6)
        writer.close()
        return num_events

    counts = await asyncio.gather(*(read(STAMP if i == num_streams // 2 else SPOKEN) for i in range(num_streams)))
    return sum(counts), lags_ms


async def measure_http(server: EmbeddedRedis, step_ms: float, num_streams: int, num_tokens: int) -> None:
    every_token = node(server.url, step_ms, PENSTOCK_NODE_STREAM_INTERVAL_MS="0")
    with every_token as (node_pid, _), gateway(server.url) as (gateway_pid, said):
        await read_http(said["url"], num_streams, 8)
        pids = {"node": node_pid, "redis": redis_pid(server), "gateway": gateway_pid, "reader": os.getpid()}
        with CpuMeter(pids) as meter:
            num_events, lags_ms = await read_http(said["url"], num_streams, num_tokens)
    cost, lag_ms = meter.report(num_streams * num_tokens), statistics.median(lags_ms)
    print(f"  step {step_ms:g} ms: {cost}; step → reader p50 {lag_ms:.2f} ms")
    gateway_us = meter.spent_us["gateway"]
    print(
        f"  gateway: {num_events / meter.wall_s:,.0f} events/s with {gateway_us / meter.wall_s / 1e6:.0%} of a core: "
        f"{gateway_us / num_events:.1f} us/event, {num_events / gateway_us * 1e6:,.0f} events/s of one process"
    )
