"""Streams through the end of one of two nodes: `python -m bench.studies.node_restarts --fault stop --tenants 1`.

Two nodes with the demo model, each on a core of its own, answer streams of 400 tokens, and each takes half of them: the
other one is held meanwhile. When each stream has `--at` tokens, one node is stopped (SIGTERM) or killed (SIGKILL).
Printed are: seconds until then; the median and the longest pause of the streams that paused, and how many did; the
median and the last end after the fault; how long the remaining node takes for the tokens of the paused streams as
prompts alone; a hash of the texts, which is the same in all runs.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from fixtures.tiny_model import make_tiny_model

from bench.queue_cost.processes import child
from penstock import AsyncClient
from penstock.cli.demo_model import demo_model
from penstock.runtime.embedded_redis import EmbeddedRedis

MIN_PAUSE_S = {"none": 0.5, "stop": 0.5, "kill": 5.0}
"""A stream moved if it had no token for so long: after a kill at least for the lease, which is 15 s."""


class Reader:
    """One stream: when each chunk came, and whether `mark` tokens have come."""

    def __init__(self, mark: int) -> None:
        self._mark = mark
        self.has_begun = asyncio.Event()
        self.has_mark = asyncio.Event()
        self.times_s: list[float] = []
        self.num_tokens = 0
        self.tokens: list[int] = []
        self.text = self.prompt = ""

    async def read(self, client: AsyncClient, number: int, num_tokens: int) -> None:
        self.prompt = (
            f"Letter number {number}. Dear friend, " + "I write to you about the long journey of this year. " * 4
        )
        stream = client.stream(self.prompt, max_tokens=num_tokens, ignore_eos=True, temperature=1.0, seed=number)
        async for chunk in stream:
            self.times_s.append(time.perf_counter())
            self.tokens += chunk.token_ids
            self.num_tokens += len(chunk.token_ids)
            self.text += chunk.text
            self.has_begun.set()
            if self.num_tokens >= self._mark:
                self.has_mark.set()

    def longest_pause_s(self, since_s: float) -> float:
        """The longest time without a token from `since_s` on."""
        moments = [max([since_s, *(moment for moment in self.times_s if moment <= since_s)])]
        moments += [moment for moment in self.times_s if moment > since_s]
        return max((later - sooner for sooner, later in pairwise(moments)), default=0.0)


async def start_half(readers: Sequence[Reader], other_pid: int) -> None:
    """Wait until the streams have begun, while the other node is held, so that it takes none of them."""
    os.kill(other_pid, signal.SIGSTOP)
    try:
        for reader in readers:
            await reader.has_begun.wait()
    finally:
        os.kill(other_pid, signal.SIGCONT)


async def measure(url: str, pids: Sequence[int], options: argparse.Namespace) -> None:
    """Start the streams, end the node, print the row."""
    readers = [Reader(options.at) for _ in range(options.streams)]
    async with AsyncExitStack() as stack:
        tenants = range(options.tenants)
        clients = [await stack.enter_async_context(AsyncClient(url, tenant=f"t{number}")) for number in tenants]
        async with asyncio.TaskGroup() as group:
            began_s = time.perf_counter()
            for half, other_pid in enumerate(reversed(pids)):
                numbers = range(half * options.streams // 2, (half + 1) * options.streams // 2)
                for number in numbers:
                    group.create_task(readers[number].read(clients[number % len(clients)], number, options.tokens))
                await start_half([readers[number] for number in numbers], other_pid)
            for reader in readers:
                await reader.has_mark.wait()
            fault_s = time.perf_counter()
            begun = [reader.prompt + reader.text for reader in readers]
            if options.fault != "none":
                os.kill(pids[0], signal.SIGTERM if options.fault == "stop" else signal.SIGKILL)
        pauses = [reader.longest_pause_s(fault_s) for reader in readers]
        moved = [number for number, pause in enumerate(pauses) if pause > MIN_PAUSE_S[options.fault]]
        # Another tenant shares no cached prefixes.
        async with AsyncClient(url, tenant="alone") as client:
            began_alone_s = time.perf_counter()
            await client.generate([begun[number] for number in moved], max_tokens=1)
            alone_s = time.perf_counter() - began_alone_s
    ends = sorted(reader.times_s[-1] - fault_s for reader in readers)
    text = hashlib.sha256(repr([reader.tokens for reader in readers]).encode()).hexdigest()[:12]
    paused = median([pauses[number] for number in moved] or [0.0])
    print(
        f"| {options.fault} | {options.tenants} | {fault_s - began_s:.1f} | {paused:.2f} | {max(pauses):.2f} "
        f"| {len(moved)} | {median(ends):.1f} | {ends[-1]:.1f} | {alone_s:.1f} | {text} |",
        flush=True,
    )


def main() -> None:
    """Run what the options name."""
    parser = argparse.ArgumentParser(prog="bench.studies.node_restarts", description=__doc__)
    parser.add_argument("--fault", default="stop", choices=["none", "stop", "kill"])
    parser.add_argument("--tenants", type=int, default=1)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--drain-s", type=float, default=20.0, help="the nodes' setting drain_s")
    parser.add_argument("--timed", type=float, metavar="SCALE", help="a tiny model whose steps take a modelled time")
    parser.add_argument("--at", type=int, default=60, help="tokens of each stream before the fault")
    options = parser.parse_args()
    with ExitStack() as stack:
        url = stack.enter_context(EmbeddedRedis()).url
        argv = ("penstock", "node", str(demo_model()), "--redis-url", url)
        env = {"PENSTOCK_NODE_PROGRESS": "json", "PENSTOCK_NODE_MAX_NUM_SEQS": "32"}
        env |= {"PENSTOCK_NODE_DRAIN_S": str(options.drain_s)}
        if options.timed:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            argv = ("bench.studies.timed_node", str(make_tiny_model(folder / "tiny")), url, str(options.timed))
            env |= {"PENSTOCK_NODE_NUM_THREADS": "1"}
            env |= {"PENSTOCK_NODE_MAX_PREFILL_MS_BESIDE_DECODE": str(30 * options.timed)}
        cores, pids = sorted(os.sched_getaffinity(0)), []
        for core in cores[:2]:
            os.sched_setaffinity(0, {core})  # a node inherits its core
            pids.append(stack.enter_context(child(*argv, **env))[0])
        os.sched_setaffinity(0, cores)
        asyncio.run(measure(url, pids, options))


if __name__ == "__main__":
    main()
