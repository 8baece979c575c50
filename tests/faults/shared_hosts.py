"""`python -m faults.shared_hosts`: two nodes on the same cores, of which one is killed or stopped at random moments.

One node has a chat, the other one background work, which waits for as long as the chat runs (`background_share` 0).
When the chat's node is killed or stopped, the background work must go on within a second; when the other node is, no
gap of the chat may be longer. It prints what it measured and what was violated.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from unittest import mock

from fakes.processes.node_process import NodeProcess
from faults.tools.report import Measurement, quantile, record

from penstock.producer.client import AsyncClient, AsyncJob
from penstock.runtime.embedded_redis import EmbeddedRedis

MAX_GAP_S = 1.0
CHAT, BATCH = "chat", "batch"
_STEP_S = 0.02
_MAX_TOKENS = 4000
_PATIENCE_S = 60.0
_WATCHED_S = MAX_GAP_S + 0.3
"""For how long a chat is watched after the other node was killed or stopped."""


@dataclass(slots=True)
class Reader:
    """Reads a job, and notes when its tokens come."""

    job: AsyncJob
    came_s: list[float] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to read."""
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for _ in self.job.chunks():
            self.came_s.append(time.monotonic())

    async def next_after(self, since_s: float) -> float:
        """Return when the first token after a time came. Raises TimeoutError."""
        async with asyncio.timeout(_PATIENCE_S):
            while not self.came_s or self.came_s[-1] <= since_s:
                await asyncio.sleep(0.002)
        return next(at_s for at_s in self.came_s if at_s > since_s)

    def longest_gap_s(self, since_s: float, until_s: float) -> float:
        """Return the longest time without a token between two times."""
        came_s = [since_s, *(one for one in self.came_s if since_s < one < until_s), until_s]
        return max(b - a for a, b in pairwise(came_s))

    async def end(self) -> None:
        """Cancel the job and stop reading."""
        await self.job.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task


class SharedHost:
    """Two nodes with one runtime folder, and a job on each."""

    def __init__(self, client: AsyncClient, redis_url: str) -> None:
        self._client = client
        self._redis_url = redis_url
        self._nodes: dict[str, NodeProcess] = {}

    async def start(self, pool: str) -> None:
        """Start the node of a pool."""
        place = {"pool": pool, "name": f"{pool}-{secrets.token_hex(3)}", "lease_ms": 3000}
        node = NodeProcess(self._redis_url, step_s=_STEP_S, share=0.0, **place)
        self._nodes[pool] = await asyncio.to_thread(node.wait_ready)

    def close(self) -> None:
        """Kill both nodes."""
        for node in self._nodes.values():
            node.close()

    @asynccontextmanager
    async def jobs(self) -> AsyncIterator[dict[str, Reader]]:
        """Run a chat, and then background work that waits for it. Both are canceled at the end."""
        readers: dict[str, Reader] = {}
        try:
            for pool in (CHAT, BATCH):
                background = pool == BATCH
                job = await self._client.submit("go on", model=pool, max_tokens=_MAX_TOKENS, background=background)
                readers[pool] = Reader(job)
                readers[pool].start()
                if pool == CHAT:
                    await readers[CHAT].next_after(0.0)
            async with asyncio.timeout(_PATIENCE_S):
                while (await readers[BATCH].job.status()).state != "running":
                    await asyncio.sleep(0.02)
            yield readers
        finally:
            for reader in readers.values():
                await reader.end()

    async def strike(self, pool: str, number: signal.Signals, rng: random.Random) -> float:
        """Kill or stop the node of a pool while both have work. Return for how long the other one waited."""
        async with self.jobs() as readers:
            begun_s = time.monotonic()
            await asyncio.sleep(rng.uniform(0.1, 0.5))
            struck_s = time.monotonic()
            assert not any(begun_s < one < struck_s for one in readers[BATCH].came_s), "background work did not wait"
            self._nodes[pool].signal(number)
            if pool == CHAT:
                waited_s = await readers[BATCH].next_after(struck_s) - struck_s
            else:
                await asyncio.sleep(_WATCHED_S)
                waited_s = readers[CHAT].longest_gap_s(struck_s, struck_s + _WATCHED_S - 2 * _STEP_S)
            if number == signal.SIGSTOP:
                self._nodes[pool].signal(signal.SIGCONT)
        if number == signal.SIGKILL:
            self._nodes[pool].close()
            await self.start(pool)
        return waited_s


async def run(args: argparse.Namespace) -> list[str]:
    """Run the campaign. Return what is wrong."""
    rng, waits = random.Random(args.seed), defaultdict[str, list[float]](list)
    print(f"seed {args.seed}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="shared-host-") as name,
        mock.patch.dict(os.environ, {"PENSTOCK_RUNTIME_DIR": name}),
        EmbeddedRedis() as server,
    ):
        async with AsyncClient(server.url) as client:
            host = SharedHost(client, server.url)
            try:
                for pool in (CHAT, BATCH):
                    await host.start(pool)
                for _ in range(args.faults):
                    pool = rng.choice((CHAT, BATCH))
                    number = rng.choice((signal.SIGKILL, signal.SIGSTOP))
                    waits[f"{pool} {number.name}"].append(await host.strike(pool, number, rng))
            finally:
                host.close()
    measurements: dict[str, Measurement] = {}
    for what, seconds in sorted(waits.items()):
        measurements |= {
            what: len(seconds),
            f"{what}: p50 s": quantile(seconds, 0.5),
            f"{what}: longest s": max(seconds),
        }
    found = [
        f"after {what} the other node waited {longest:.2f} s"
        for what, seconds in waits.items()
        if (longest := max(seconds)) > MAX_GAP_S
    ]
    print(f"{time.strftime('%H:%M:%S')} {measurements}")
    print("\n".join(f"  VIOLATION {problem}" for problem in found) or "  nothing violated", flush=True)
    if args.record and not found:
        record("Nodes on the same cores: one is killed or stopped", "reference engine, share 0", measurements)
    return found


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    one = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one.add_argument("--record", action="store_true", help="write the measurements to ops/bench/results/faults.md")
    one.add_argument("--faults", type=int, default=200, help="kills and stops of either node")
    one.add_argument("--seed", type=int, default=secrets.randbits(32))
    return one


def main() -> None:
    """Run the campaign. The exit status tells whether anything was violated."""
    found = asyncio.run(run(parser().parse_args()))
    sys.exit(f"{len(found)} violations" if found else 0)


if __name__ == "__main__":
    main()
