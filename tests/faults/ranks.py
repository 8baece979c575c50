"""`python -m faults.ranks`: ranks of two nodes are killed and stopped under load, rank 0 included.

Each job's tokens must equal those of one rank in peace. With `--runner torch` they may differ from the place on where
two logits are almost equal. At the end no rank may be left, and Redis must be consistent.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from fakes.ties import num_departures
from faults.tools.redis_process import RedisProcess
from faults.tools.report import Measurement, quantile, record
from fixtures.tiny_model import make_tiny_model

from penstock.contract.errors import BusyError, UnavailableError
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.engine.records import Generation
from penstock.producer.client import AsyncClient, ClientSettings
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.connection import connect

POOL, LEASE_S, STALL_S = "ranks", 3.0, 1.0
NUM_NODES, NUM_READERS, NUM_JOBS = 2, 8, 24
MAX_TOKENS = 150
PATIENCE_S = 200.0
"""Longer than a node waits for a rank that is stopped while it starts."""
RANKS = {f"penstock.gpu_node.model.loading.{name}" for name in ("rank_process", "torch_rank_process")}


@dataclass(frozen=True, slots=True)
class Runner:
    """What the nodes compute with."""

    name: str
    num_stages: int

    @property
    def settings(self) -> dict[str, Any]:
        """Those that one rank has too."""
        dtype = "bfloat16" if self.name == "native" else "float32"
        return {"runner": self.name, "dtype": dtype, "num_kv_blocks": 256}

    def params(self, number: int) -> dict[str, Any]:
        """How a job samples. Tokens of the torch runner can be compared at ties only if they are the likeliest ones."""
        temperature = 1.0 if self.name == "native" else 0.0
        return {"temperature": temperature, "seed": number, "max_tokens": MAX_TOKENS, "ignore_eos": True}


class RankedNode:
    """A node of two ranks, or of two for each stage, as `penstock node` starts it."""

    def __init__(self, url: str, model: Path, name: str, log: Path, runner: Runner) -> None:
        self._options = [str(model), "--redis-url", url, "--pool", POOL, "--name", name]
        for setting, value in runner.settings.items():
            self._options += [f"--{setting.replace('_', '-')}", str(value)]
        sizes = {"tensor": 2, "pipeline": runner.num_stages}
        self._options += [word for kind, size in sizes.items() for word in (f"--{kind}-parallel-size", str(size))]
        self._options += ["--num-threads", str(2 * runner.num_stages), "--rank-stall-s", str(STALL_S)]
        self._options += ["--lease-ms", str(int(LEASE_S * 1000)), "--drain-s", "1", "--avoid-ms", "200"]
        self._options += ["--max-losses", "1000"]
        self._log = log
        self.start()

    def start(self) -> None:
        """Start it, also after it was killed."""
        command = [str(Path(sys.executable).with_name("penstock")), "node", *self._options]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        """The process of rank 0."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process of rank 0 has ended."""
        return self._process.poll() is not None

    def ranks(self) -> list[psutil.Process]:
        """The processes of its other ranks."""
        if self.has_ended:
            return []
        return [one for one in psutil.Process(self.pid).children(recursive=True) if _is_rank(one)]

    def stop(self) -> None:
        """Let it drain and end, or end while it still loads the model."""
        self._process.terminate()
        assert self._process.wait(PATIENCE_S) in (0, -signal.SIGTERM)

    def replace(self) -> None:
        """Kill it and start it again."""
        self._process.kill()
        self._process.wait()
        self.start()


def _is_rank(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return not RANKS.isdisjoint(words) and not any("process_guard" in word for word in words)


async def _ranks_of(node: RankedNode) -> list[psutil.Process]:
    """Wait until the ranks of a node run, and return them. A node whose rank is killed while it starts ends itself."""
    async with asyncio.timeout(PATIENCE_S):
        while not (ranks := node.ranks()):
            if node.has_ended:
                node.start()
            await asyncio.sleep(0.05)
    return ranks


async def kill_another_rank(node: RankedNode) -> None:
    random.choice(await _ranks_of(node)).kill()


async def kill_rank_0(node: RankedNode) -> None:
    ranks = await _ranks_of(node)
    await asyncio.to_thread(node.replace)
    await _until_gone(ranks, 2.0)


async def stop_another_rank(node: RankedNode) -> None:
    rank = random.choice(await _ranks_of(node))
    rank.suspend()
    await _until_gone([rank], PATIENCE_S)


async def stop_rank_0(node: RankedNode) -> None:
    """Its ranks end after the lease. Once it runs again, it starts others."""
    ranks = await _ranks_of(node)
    os.kill(node.pid, signal.SIGSTOP)
    await _until_gone(ranks, LEASE_S + 5)
    os.kill(node.pid, signal.SIGCONT)


async def _until_gone(processes: list[psutil.Process], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while any(process.is_running() for process in processes):
            await asyncio.sleep(0.02)


class Readers:
    """Submit jobs and compare their tokens with those of one rank, until they are stopped."""

    def __init__(self, client: AsyncClient, expected: list[tuple[int, ...]], runner: Runner) -> None:
        self._client = client
        self._expected = expected
        self._runner = runner
        self.departed: list[tuple[int, tuple[int, ...]]] = []
        """Jobs by their number, and tokens that are not those of one rank."""
        self.counts: Counter[str] = Counter()
        self.gaps_s: list[float] = []
        self.is_over = False

    async def until_one_more(self) -> None:
        """Wait until one more job has ended."""
        before = self.counts["jobs"]
        async with asyncio.timeout(PATIENCE_S):
            while self.counts["jobs"] == before:
                await asyncio.sleep(0.1)

    async def run(self, rng: random.Random) -> None:
        """Read one job after another."""
        while not self.is_over:
            number = rng.randrange(NUM_JOBS)
            try:
                job = await self._client.submit(_prompt(number), model=POOL, **self._runner.params(number))
            except (BusyError, UnavailableError):
                self.counts["refused"] += 1
                await asyncio.sleep(1)
                continue
            tokens, longest_s, seen_s = list[int](), 0.0, time.monotonic()
            async for chunk in job.chunks():
                now_s = time.monotonic()
                longest_s, seen_s = max(longest_s, now_s - seen_s), now_s
                tokens += chunk.token_ids
            if tuple(tokens) != self._expected[number]:
                assert self._runner.name == "torch", f"job {job.id} has other tokens"
                self.departed.append((number, tuple(tokens)))
            self.gaps_s.append(longest_s)
            self.counts["jobs"] += 1
            self.counts["tokens"] += len(tokens)


def _prompt(number: int) -> str:
    return f"the gate opens by pressure, and the turbine has number {number}"


def _expected(model: Path, runner: Runner) -> list[Generation]:
    """What one rank answers."""
    engine = Engine(str(model), num_threads=1, **runner.settings)
    params = [SamplingParams(**runner.params(number)) for number in range(NUM_JOBS)]
    return engine.generate([_prompt(number) for number in range(NUM_JOBS)], params)


def _check_ties(model: Path, prompts: list[tuple[int, ...]], departed: list[tuple[int, tuple[int, ...]]]) -> None:
    """Assert that tokens differ from those of one rank only from a place on where two logits are almost equal."""
    from transformers import AutoModelForCausalLM

    assert len(departed) < NUM_JOBS
    num_departures(AutoModelForCausalLM.from_pretrained(model), [(prompts[number], own) for number, own in departed])


async def run(runner: Runner, num_kills: int, num_stops: int, seed: int, folder: Path) -> None:
    """Apply all faults, and check everything afterwards."""
    random.seed(seed)
    rng, model = random.Random(seed), make_tiny_model(folder / "tiny")
    answers = await asyncio.to_thread(_expected, model, runner)
    redis = RedisProcess(folder / "redis")
    redis.start()
    nodes = [RankedNode(redis.url, model, f"n{i}", folder / f"n{i}.log", runner) for i in range(NUM_NODES)]
    faults = [*[rng.choice((kill_rank_0, kill_another_rank)) for _ in range(num_kills)]]
    faults += [rng.choice((stop_rank_0, stop_another_rank)) for _ in range(num_stops)]
    rng.shuffle(faults)
    began_s, counts = time.monotonic(), Counter[str]()
    try:
        async with AsyncClient(redis.url, settings=ClientSettings(outage_s=PATIENCE_S)) as client:
            readers = Readers(client, [answer.token_ids for answer in answers], runner)
            async with asyncio.TaskGroup() as group:
                for number in range(NUM_READERS):
                    group.create_task(readers.run(random.Random(seed + number)))
                await readers.until_one_more()
                for number, fault in enumerate(faults):
                    await fault(rng.choice(nodes))
                    counts[fault.__name__.replace("_", " ")] += 1
                    if runner.name == "torch":
                        # Its start takes longer than the pause, and a fault during a start only ends the node.
                        await readers.until_one_more()
                    await asyncio.sleep(rng.uniform(0.5, 3))
                    sys.stdout.write(f"{number + 1}/{len(faults)} {fault.__name__} {dict(readers.counts)}\n")
                readers.is_over = True
        for node in nodes:
            await _ranks_of(node)
            await asyncio.to_thread(node.stop)
        _check_ties(model, [tuple(answer.prompt_token_ids) for answer in answers], readers.departed)
        left = [one.pid for one in psutil.process_iter() if _is_rank(one) and str(model) in " ".join(one.cmdline())]
        assert not left, f"ranks are left: {left}"
        async with connect(redis.url) as connection:
            assert await audit(AdminBroker(connection), POOL) == []
    finally:
        for node in nodes:
            node._process.kill()
        redis.kill()
    facts: dict[str, Measurement] = {**counts, "jobs": readers.counts["jobs"], "tokens": readers.counts["tokens"]}
    facts |= {"minutes": (time.monotonic() - began_s) / 60, "longest gap, median s": quantile(readers.gaps_s, 0.5)}
    if runner.name == "torch":
        facts["left the path at a tie"] = len(readers.departed)
    shape = "two nodes of two ranks" if runner.num_stages == 1 else f"two nodes of 2 x {runner.num_stages} ranks"
    row = shape if runner.name == "native" else f"{shape}, runner torch"
    record("Ranks", row, facts | {"longest gap s": max(readers.gaps_s)})


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runner", choices=("native", "torch"), default="native")
    parser.add_argument("--stages", type=int, default=1, help="of the torch runner, with two ranks each")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for models and logs, kept at the end")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(
            run(Runner(args.runner, args.stages), args.kills, args.stops, args.seed, args.folder or Path(folder))
        )


if __name__ == "__main__":
    main()
