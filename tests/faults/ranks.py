"""`python -m faults.ranks`: ranks of two nodes are killed and stopped under load, rank 0 included, in each shape.

Each job's tokens must equal those of one rank in peace. Those of the torch runner may differ from the place on where
two logits are almost equal. A node must not gain descriptors or ports when its ranks start again. At the end no process
and no port may be left, and Redis must be consistent.
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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import psutil
from fakes.ties import num_departures
from fakes.waiting import wait_until
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
GUARD_S = 15.0
"""After a node has ended; a second on a machine whose cores are free."""
PATIENCE_S = 200.0
"""Longer than a node waits for a rank that is stopped while it starts."""
RANKS = {f"penstock.gpu_node.model.loading.{name}" for name in ("rank_process", "torch_rank_process")}


@dataclass(frozen=True, slots=True)
class Runner:
    """What the nodes compute with."""

    name: str
    tensor_size: int
    num_stages: int

    @property
    def num_ranks(self) -> int:
        return self.tensor_size * self.num_stages

    @property
    def row(self) -> str:
        """How the results name it."""
        ranks = "two ranks" if self.num_stages == 1 else f"{self.tensor_size} x {self.num_stages} ranks"
        return f"two nodes of {ranks}" + ("" if self.name == "native" else f", runner {self.name}")

    @property
    def settings(self) -> dict[str, Any]:
        """Those that one rank has too."""
        dtype = "bfloat16" if self.name == "native" else "float32"
        return {"runner": self.name, "dtype": dtype, "num_kv_blocks": 256}

    def params(self, number: int) -> dict[str, Any]:
        """How a job samples. Tokens of the torch runner can be compared at ties only if they are the likeliest ones."""
        temperature = 1.0 if self.name == "native" else 0.0
        return {"temperature": temperature, "seed": number, "max_tokens": MAX_TOKENS, "ignore_eos": True}


SHAPES = {
    "native-2": Runner("native", 2, 1),
    "torch-2": Runner("torch", 2, 1),
    "torch-1x2": Runner("torch", 1, 2),
    "torch-2x2": Runner("torch", 2, 2),
}
"""Ranks of each stage, and stages."""


class RankedNode:
    """A node of several ranks, as `penstock node` starts it."""

    def __init__(self, url: str, model: Path, name: str, log: Path, runner: Runner) -> None:
        self._options = [str(model), "--redis-url", url, "--pool", POOL, "--name", name]
        for setting, value in runner.settings.items():
            self._options += [f"--{setting.replace('_', '-')}", str(value)]
        sizes = {"tensor": runner.tensor_size, "pipeline": runner.num_stages}
        self._options += [word for kind, size in sizes.items() for word in (f"--{kind}-parallel-size", str(size))]
        self._options += ["--num-threads", str(runner.num_ranks), "--rank-stall-s", str(STALL_S)]
        self._options += ["--lease-ms", str(int(LEASE_S * 1000)), "--drain-s", "1", "--avoid-ms", "200"]
        self._options += ["--max-losses", "1000"]
        self._log = log
        self._num_others = runner.num_ranks - 1
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
        """The processes of its other ranks; none while some of them are still to be started."""
        if self.has_ended:
            return []
        found = [one for one in psutil.Process(self.pid).children(recursive=True) if _is_rank(one)]
        return found if len(found) == self._num_others else []

    def ports(self) -> set[int]:
        """The ports at which it and its ranks listen."""
        return {port for one in (psutil.Process(self.pid), *self.ranks()) for port in _ports_of(one)}

    def held(self) -> tuple[int, int]:
        """How many descriptors rank 0 has, and at how many ports it listens."""
        process = psutil.Process(self.pid)
        return process.num_fds(), len(_ports_of(process))

    def stop(self) -> None:
        """Let it drain and end, or end while it still loads the model."""
        self._process.terminate()
        assert self._process.wait(PATIENCE_S) in (0, -signal.SIGTERM)

    def kill(self) -> None:
        """Kill rank 0."""
        self._process.kill()
        self._process.wait()


def _is_rank(process: psutil.Process) -> bool:
    words = _command_of(process)
    return not RANKS.isdisjoint(words) and not any("process_guard" in word for word in words)


def _ports_of(process: psutil.Process) -> set[int]:
    try:
        return {one.laddr.port for one in process.net_connections() if one.status == psutil.CONN_LISTEN}
    except psutil.Error:
        return set()


async def _ranks_of(node: RankedNode) -> list[psutil.Process]:
    """Wait until the ranks of a node run, and return them. A node whose rank is killed while it starts ends itself."""
    async with asyncio.timeout(PATIENCE_S):
        while not (ranks := node.ranks()):
            if node.has_ended:
                node.start()
            await asyncio.sleep(0.05)
    return ranks


async def kill_another_rank(node: RankedNode) -> float:
    """Return the seconds after which all further ranks had ended. So does each fault."""
    return await _harm_another_rank(node, psutil.Process.kill)


async def kill_rank_0(node: RankedNode) -> float:
    ranks = await _ranks_of(node)
    node.kill()
    took_s = await _until_gone(ranks, PATIENCE_S)
    node.start()
    return took_s


async def stop_another_rank(node: RankedNode) -> float:
    return await _harm_another_rank(node, psutil.Process.suspend)


async def _harm_another_rank(node: RankedNode, harm: Callable[[psutil.Process], None]) -> float:
    ranks = await _ranks_of(node)
    harm(random.choice(ranks))
    return await _until_gone(ranks, PATIENCE_S)


async def stop_rank_0(node: RankedNode) -> float:
    """Its ranks end after the lease. Once it runs again, it starts others."""
    ranks = await _ranks_of(node)
    os.kill(node.pid, signal.SIGSTOP)
    took_s = await _until_gone(ranks, PATIENCE_S)
    os.kill(node.pid, signal.SIGCONT)
    return took_s


Fault: TypeAlias = Callable[[RankedNode], Awaitable[float]]
BOUNDS_S: dict[Fault, float] = {
    kill_another_rank: 2.0,
    kill_rank_0: 2.0,
    # The node looks four times a second, and the first step must begin.
    stop_another_rank: STALL_S + 4,
    stop_rank_0: LEASE_S + 4,
}
"""After how long all further ranks have ended, on a machine whose cores are free."""


async def _until_gone(processes: list[psutil.Process], within_s: float) -> float:
    began_s = time.monotonic()
    async with asyncio.timeout(within_s):
        while any(process.is_running() for process in processes):
            await asyncio.sleep(0.02)
    return time.monotonic() - began_s


async def _check_that_nothing_is_gained(node: RankedNode, readers: Readers) -> None:
    """Kill a rank of the only node. Assert that rank 0 has no more descriptors and ports with the next ranks."""
    await _read_from(node, readers)
    before = await _quiet(node)
    await kill_another_rank(node)
    await _read_from(node, readers)
    after = await _quiet(node)
    assert after[0] <= before[0], f"{after[0] - before[0]} descriptors more"
    assert after[1] <= before[1], f"{after[1] - before[1]} ports more"


async def _read_from(node: RankedNode, readers: Readers) -> None:
    """Read a job from the only node, which a fault during its start may have ended."""
    job = asyncio.create_task(readers.read(0))
    async with asyncio.timeout(PATIENCE_S):
        while not (await asyncio.wait([job], timeout=0.2))[0]:
            if node.has_ended:
                node.start()
    await job


async def _quiet(node: RankedNode) -> tuple[int, int]:
    """Return what a node holds once that has not changed for two seconds, such as while its ranks load."""
    held, since_s = node.held(), time.monotonic()
    while time.monotonic() - since_s < 2.0:
        await asyncio.sleep(0.1)
        if (now := node.held()) != held:
            held, since_s = now, time.monotonic()
    return held


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
            try:
                await self.read(rng.randrange(NUM_JOBS))
            except (BusyError, UnavailableError):
                self.counts["refused"] += 1
                await asyncio.sleep(1)

    async def read(self, number: int) -> None:
        """Read a job. Raises BusyError and UnavailableError if the queue does not take it."""
        job = await self._client.submit(_prompt(number), model=POOL, **self._runner.params(number))
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


@dataclass(frozen=True, slots=True)
class Campaign:
    """How many faults, for how long at most, and where models and logs are."""

    num_kills: int
    num_stops: int
    minutes: float
    seed: int
    folder: Path

    def faults(self, rng: random.Random) -> list[Fault]:
        """Return the faults in their order."""
        found: list[Fault] = [rng.choice((kill_rank_0, kill_another_rank)) for _ in range(self.num_kills)]
        found += [rng.choice((stop_rank_0, stop_another_rank)) for _ in range(self.num_stops)]
        rng.shuffle(found)
        return found


class Applied:
    """The faults that were applied, and what they led to."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_late = 0
        """Faults after which ranks ended later than BOUNDS_S says."""
        self.longest_s = dict.fromkeys(BOUNDS_S, 0.0)
        self.ports: set[int] = set()

    async def apply(self, fault: Fault, node: RankedNode) -> None:
        await _ranks_of(node)
        self.ports |= node.ports()
        took_s = await fault(node)
        self.counts[fault.__name__.replace("_", " ")] += 1
        self.num_late += took_s > BOUNDS_S[fault]
        self.longest_s[fault] = max(self.longest_s[fault], took_s)

    def facts(self) -> dict[str, Measurement]:
        """Return what the results say of them."""
        kills, stops = (max(self.longest_s[one] for one in pair) for pair in (_KILLS, _STOPS))
        longest: dict[str, Measurement] = {"ranks gone after a kill, at most s": kills}
        longest |= {"after a stop, at most s": stops, "later than the bound": self.num_late}
        return {**self.counts, **longest}


_KILLS, _STOPS = (kill_rank_0, kill_another_rank), (stop_rank_0, stop_another_rank)


async def run(runner: Runner, campaign: Campaign) -> None:
    """Apply all faults, and check everything afterwards."""
    random.seed(campaign.seed)
    rng, model = random.Random(campaign.seed), make_tiny_model(campaign.folder / "tiny")
    answers = await asyncio.to_thread(_expected, model, runner)
    own = set(_commands_with(model))
    """Of the engine of this process, such as that of its chat template."""
    redis = RedisProcess(campaign.folder / "redis")
    redis.start()
    logs = [campaign.folder / f"n{number}.log" for number in range(NUM_NODES)]
    nodes = [RankedNode(redis.url, model, log.stem, log, runner) for log in logs]
    began_s, applied = time.monotonic(), Applied()
    try:
        async with AsyncClient(redis.url, settings=ClientSettings(outage_s=PATIENCE_S)) as client:
            readers = Readers(client, [answer.token_ids for answer in answers], runner)
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(readers.run(random.Random(campaign.seed + number)))
                    for number in range(NUM_READERS)
                ]
                await readers.until_one_more()
                for fault in campaign.faults(rng):
                    if (spent_s := time.monotonic() - began_s) > 60 * campaign.minutes:
                        break
                    await applied.apply(fault, rng.choice(nodes))
                    if runner.name == "torch":
                        # Its start takes longer than the pause, and a fault during a start only ends the node.
                        await readers.until_one_more()
                    await asyncio.sleep(rng.uniform(0.5, 3))
                    said = f"{spent_s:.0f} s, {applied.counts.total()}: {fault.__name__} {dict(readers.counts)}\n"
                    sys.stdout.write(said)
                    sys.stdout.flush()
                readers.is_over = True
                # A fault during a start may have ended both nodes, and readers wait for the rest of their jobs.
                while not all(task.done() for task in tasks):
                    for node in nodes:
                        if node.has_ended:
                            node.start()
                    await asyncio.sleep(0.2)
            minutes = (time.monotonic() - began_s) / 60
            *others, last = nodes
            for node in others:
                await _ranks_of(node)
                await asyncio.to_thread(node.stop)
            await _check_that_nothing_is_gained(last, readers)
        applied.ports |= last.ports()
        await asyncio.to_thread(last.stop)
        _check_ties(model, [tuple(answer.prompt_token_ids) for answer in answers], readers.departed)
        _check_that_nothing_is_left(model, own, applied.ports)
        async with connect(redis.url) as connection:
            assert await audit(AdminBroker(connection), POOL) == []
    finally:
        for node in nodes:
            node.kill()
        redis.kill()
    facts: dict[str, Measurement] = {**applied.counts, "jobs": readers.counts["jobs"]}
    facts |= {"tokens": readers.counts["tokens"], "minutes": minutes}
    facts["longest gap, median s"] = quantile(readers.gaps_s, 0.5)
    if runner.name == "torch":
        facts["left the path at a tie"] = len(readers.departed)
    record("Ranks", runner.row, facts | {"longest gap s": max(readers.gaps_s)} | applied.facts())


def _check_that_nothing_is_left(model: Path, own: set[int], ports: set[int]) -> None:
    """Assert that no other process names the model, such as a rank or its guard, and that no port is in use."""
    # A guard looks every second whether its owner has ended.
    wait_until(lambda: _commands_with(model).keys() - own, lambda left: not left, within_s=GUARD_S)
    listening = {one.laddr.port for one in psutil.net_connections() if one.status == psutil.CONN_LISTEN}
    assert not ports & listening, f"ports are left: {ports & listening}"


def _commands_with(model: Path) -> dict[int, str]:
    """Return the commands that name a model, by process."""
    commands = {one.pid: " ".join(_command_of(one)) for one in psutil.process_iter()}
    return {pid: command for pid, command in commands.items() if str(model) in command}


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kills", type=int, default=50, help="in each shape")
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=60.0, help="after which a shape gets no further fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for models and logs, kept at the end")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.shapes:
            folder = (args.folder or Path(temporary)) / name
            folder.mkdir(parents=True)
            sys.stdout.write(f"{SHAPES[name].row}\n")
            asyncio.run(run(SHAPES[name], Campaign(args.kills, args.stops, args.minutes, args.seed, folder)))


if __name__ == "__main__":
    main()
