"""Streams through the end of one of two nodes: `python -m bench.studies.node_restarts --fault stop --tenants 1`.

Two nodes with the demo model, each on a core of its own, answer streams of 400 tokens. When each stream has `--at` tokens, one node is stopped
(SIGTERM) or killed (SIGKILL). Printed are the pauses of the streams from then on, their ends, and a hash of the texts,
which must be the same in every run.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import signal
import time
from contextlib import AsyncExitStack, ExitStack
from statistics import median

from bench.queue_cost.processes import child
from penstock import AsyncClient
from penstock.cli.demo_model import demo_model
from penstock.runtime.embedded_redis import EmbeddedRedis


class Reader:
    """One stream: when each chunk came."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.num_tokens = 0
        self.tokens: list[int] = []

    async def read(self, client: AsyncClient, number: int, num_tokens: int) -> None:
        prompt = f"Letter number {number}. Dear friend, " + "I write to you about the long journey of this year. " * 4
        stream = client.stream(prompt, max_tokens=num_tokens, ignore_eos=True, temperature=1.0, seed=number)
        async for chunk in stream:
            self.times_s.append(time.perf_counter())
            self.tokens += chunk.token_ids
            self.num_tokens += len(chunk.token_ids)

    def longest_pause_s(self, since_s: float) -> float:
        """The longest time without a token from `since_s` on."""
        moments = [max([since_s, *(moment for moment in self.times_s if moment <= since_s)])]
        moments += [moment for moment in self.times_s if moment > since_s]
        return max((later - sooner for sooner, later in zip(moments, moments[1:], strict=False)), default=0.0)


async def measure(url: str, pid: int, options: argparse.Namespace) -> None:
    """Start the streams, end the node, print the row."""
    readers = [Reader() for _ in range(options.streams)]
    async with AsyncExitStack() as stack:
        tenants = range(options.tenants)
        clients = [await stack.enter_async_context(AsyncClient(url, tenant=f"t{number}")) for number in tenants]
        async with asyncio.TaskGroup() as group:
            began_s = time.perf_counter()
            for number, reader in enumerate(readers):
                group.create_task(reader.read(clients[number % len(clients)], number, options.tokens))
            while min(reader.num_tokens for reader in readers) < options.at:
                await asyncio.sleep(0.02)
            fault_s = time.perf_counter()
            if options.fault != "none":
                os.kill(pid, signal.SIGTERM if options.fault == "stop" else signal.SIGKILL)
    pauses = sorted(reader.longest_pause_s(fault_s) for reader in readers)
    ends = sorted(reader.times_s[-1] - fault_s for reader in readers)
    text = hashlib.sha256(repr([reader.tokens for reader in readers]).encode()).hexdigest()[:12]
    moved = sum(pause > 0.5 for pause in pauses)
    print(
        f"| {options.fault} | {options.tenants} | {fault_s - began_s:.1f} | {median(pauses):.2f} | {pauses[-1]:.2f} "
        f"| {moved} | {median(ends):.1f} | {ends[-1]:.1f} | {text} |",
        flush=True,
    )


def main() -> None:
    """Run what the options name."""
    parser = argparse.ArgumentParser(prog="bench.studies.node_restarts", description=__doc__)
    parser.add_argument("--fault", default="stop", choices=["none", "stop", "kill"])
    parser.add_argument("--tenants", type=int, default=1)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--at", type=int, default=60, help="tokens of each stream before the fault")
    options = parser.parse_args()
    model = str(demo_model())
    with ExitStack() as stack:
        url = stack.enter_context(EmbeddedRedis()).url
        argv = ("penstock", "node", model, "--redis-url", url)
        env = {"PENSTOCK_NODE_PROGRESS": "json", "PENSTOCK_NODE_MAX_NUM_SEQS": "32"}
        cores, pids = sorted(os.sched_getaffinity(0)), []
        for core in cores[:2]:
            os.sched_setaffinity(0, {core})  # a node inherits its core
            pids.append(stack.enter_context(child(*argv, **env))[0])
        os.sched_setaffinity(0, cores)
        asyncio.run(measure(url, pids[0], options))


if __name__ == "__main__":
    main()
