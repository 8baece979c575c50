"""Thousands of short jobs a second: `python -m bench.studies.short_jobs queue whole peers` prints tables.

`queue`: Redis's CPU time per job and script, over tenants and jobs that wait, without an engine; with `--nodes 2` each
round of jobs is for two nodes. `whole`: jobs a second
from the client to its results, and the CPU time of each process, with an engine that is a clock and with the tiny
model. `peers`: empty tasks through Celery, taskiq, dramatiq and arq, as far as `make bench-peers` installed them.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

from redis.asyncio import Redis
from uuid_utils import uuid7

from bench.peers import interpreter
from bench.queue_cost.processes import CpuMeter, child, cpu_us, node, redis_pid
from penstock import AsyncClient
from penstock.contract.job import JobDef, SamplingParams
from penstock.contract.output import Choice, Chunk, Outcome, Usage
from penstock.contract.pool import NodePressure, PoolRecord
from penstock.contract.priority import NUM_LEVELS
from penstock.gpu_node.settings import NodeSettings
from penstock.queue.broker.connection import connect
from penstock.queue.broker.node import Capacity, Emission, JobEnd, NodeBroker, Taken, UsedTokens
from penstock.queue.broker.producer import ProducerBroker, Submission
from penstock.queue.results import encode_result
from penstock.queue.wire import encode_chunk
from penstock.runtime.embedded_redis import EmbeddedRedis

POOL = "short"
PROMPT_TOKENS = 30
TAKEN = 32
"""Jobs of a round: as many as a take gives of background work."""
CASES = ((1, 1), (10, 1), (100, 1), (1000, 1), (1, 1_000), (100, 10_000), (1, 100_000), (1000, 100_000))
"""Numbers of tenants, and of jobs that wait during the rounds."""
SCRIPTS = ("submit", "take", "finish", "ack")


class RedisMeter:
    """CPU microseconds of Redis by the phase that it served: scripts, connections and the append-only file."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self._pid = redis_pid(server)
        self.spent_us = Counter[str]()

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Count the block under a name."""
        before_us = cpu_us(self._pid)
        yield
        self.spent_us[phase] += round(cpu_us(self._pid) - before_us)


class BareQueue:
    """A pool whose nodes have no engines: rounds of submissions, takes and ends through the real brokers."""

    def __init__(self, redis: Redis, num_tenants: int, num_nodes: int = 1) -> None:
        self._nodes = [NodeBroker(redis, POOL, f"n{number}", "r1") for number in range(num_nodes)]
        self._producer = ProducerBroker(redis)
        self._tenants = [f"t{number}" for number in range(num_tenants)]
        self._num_calls = self._num_submitted = 0

    async def join(self) -> None:
        """Let the nodes join the pool."""
        settings = NodeSettings(model=POOL, redis_url="redis://").pool_config
        for number, broker in enumerate(self._nodes):
            await broker.join({**settings, "max_open_jobs": 10**7, "max_queued_cost": 10**12}, PoolRecord(POOL, POOL))
            record = NodePressure(f"n{number}", revision="r1", max_num_seqs=256, drain_cost_per_s=1000.0)
            record = replace(record, kv_blocks_total=1 << 16, block_size=16)
            await broker.heartbeat(record, free=1 << 20, answered_call=0, held=None)

    async def submit(self, count: int) -> None:
        """Submit jobs, of the tenants in turn."""
        await asyncio.gather(*(self._producer.submit(self._submission(), "reader") for _ in range(count)))

    def _submission(self) -> Submission:
        tenant = self._tenants[self._num_submitted % len(self._tenants)]
        self._num_submitted += 1
        job = JobDef(
            id=f"{POOL}.{uuid7()}",
            tenant=tenant,
            prompt_token_ids=[5] * PROMPT_TOKENS,
            params=SamplingParams(max_tokens=1),
            needs_reader=True,
            background=True,
        )
        return Submission(job, PROMPT_TOKENS + 1)

    async def take(self) -> list[tuple[Taken, ...]]:
        """Let each node take once. Return the jobs of each."""
        self._num_calls += 1
        whole = Capacity((1 << 20,) * NUM_LEVELS, (TAKEN,) * NUM_LEVELS, 1 << 20, 256)
        return [(await broker.take(self._num_calls, "nonce", whole)).jobs for broker in self._nodes]

    async def finish(self, taken: Sequence[tuple[Taken, ...]]) -> None:
        """End the jobs of each node with a token each."""
        for broker, jobs in zip(self._nodes, taken, strict=True):
            answers = await broker.finish_many(list(map(_end_of, jobs))) if jobs else []
            assert set(answers) <= {"OK"}, answers

    async def ack(self, taken: Sequence[tuple[Taken, ...]]) -> None:
        """Free the results of jobs, as their readers do."""
        await asyncio.gather(*(self._producer.ack([job.job_id], job.tenant) for jobs in taken for job in jobs))


def _end_of(taken: Taken) -> JobEnd:
    usage = Usage(PROMPT_TOKENS, 1)
    chunk = encode_chunk(Chunk(taken.job_id, 0, 0, 0, (7,), "a", "length", usage, num_prompt_tokens=PROMPT_TOKENS))
    result = encode_result((Choice(0, "a", (7,), "length"),), usage, [(0, 1, 1)])
    used = UsedTokens(kv_token_ms=40.0, usage=usage, log_bytes=len(chunk))
    return JobEnd(Emission(taken.job_id, taken.lease, 0, (chunk,)), Outcome("succeeded"), result, used)


@contextmanager
def durable_redis() -> Iterator[EmbeddedRedis]:
    """A server with an append-only file that is written each second."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(data_dir=Path(folder), maxmemory_mib=4096) as server:
        yield server


async def queue_row(num_tenants: int, num_waiting: int, num_jobs: int, num_nodes: int = 1) -> str:
    """Return the row of the table of scripts: microseconds of Redis per job."""
    with durable_redis() as server:
        async with connect(server.url) as redis:
            queue, meter = BareQueue(redis, num_tenants, num_nodes), RedisMeter(server)
            await queue.join()
            for _ in range(0, num_waiting - 1, 500):
                await queue.submit(min(500, num_waiting - 1))
            await _round(queue, RedisMeter(server))
            num_done = 0
            while num_done < num_jobs:
                num_done += await _round(queue, meter)
    spent_us = [meter.spent_us[name] / num_done for name in SCRIPTS]
    cells = " | ".join(f"{us:.0f}" for us in (*spent_us, sum(spent_us)))
    return f"| {num_tenants:,} | {num_waiting:,} | {cells} |"


async def _round(queue: BareQueue, meter: RedisMeter) -> int:
    with meter.of("submit"):
        await queue.submit(TAKEN)
    with meter.of("take"):
        taken = await queue.take()
    with meter.of("finish"):
        await queue.finish(taken)
    with meter.of("ack"):
        await queue.ack(taken)
    return sum(map(len, taken))


QUEUE_HEAD = """
| tenants | waiting | {scripts} | all |
|---|---|---|---|---|---|---|
"""


async def measure_queue(num_jobs: int, cases: Sequence[tuple[int, int]], num_nodes: int) -> None:
    """Print the table of scripts."""
    print(QUEUE_HEAD.format(scripts=" | ".join(SCRIPTS)).rstrip())
    for num_tenants, num_waiting in cases:
        print(await queue_row(num_tenants, num_waiting, num_jobs, num_nodes), flush=True)


WHOLE_HEAD = """
| engine | jobs/s | client ms | node loop ms | engine ms | Redis ms |
|---|---|---|---|---|---|"""


def measure_whole(num_jobs: int, kinds: Sequence[str]) -> None:
    """Print the rows of whole jobs: prompts of 30 tokens, with an output token or an embedding each.

    The client has a process of its own, which imports what a user's process would. What else this process has imported
    would make Python's garbage collection slower.
    """
    print(WHOLE_HEAD)
    for row in kinds:
        kind, _, task = row.partition(",")
        with durable_redis() as server, _node(server.url, kind) as pid:
            what = "embed" if task else "generate"
            argv = [sys.executable, "-m", __spec__.name, what, "--url", server.url, "--jobs", str(num_jobs)]
            with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
                assert client.stdin is not None and client.stdout is not None and client.stdout.readline()
                pids = {"redis": redis_pid(server), "node": pid, "client": client.pid}
                with CpuMeter(pids) as meter:
                    print("begin", file=client.stdin, flush=True)
                    client.stdout.readline()
                client.stdin.close()
        ms = {name: us / num_jobs / 1e3 for name, us in meter.spent_us.items()}
        cells = " | ".join(f"{ms[name]:.2f}" for name in ("client", "node loop", "node engine", "redis"))
        print(f"| {row} | {num_jobs / meter.wall_s:,.0f} | {cells} |", flush=True)


async def run_client(what: str, url: str, num_jobs: int) -> None:
    """Say when the client is warm. After a line of input, send the jobs, say so, and wait for the end of input."""
    async with AsyncClient(url) as client:
        run = _generate if what == "generate" else _embed
        await run(client, _prompts(200))
        prompts = _prompts(num_jobs)
        print("warm", flush=True)
        sys.stdin.readline()
        await run(client, prompts)
        print("done", flush=True)
        sys.stdin.read()


@contextmanager
def _node(redis_url: str, kind: str) -> Iterator[int]:
    """Start a node whose engine is a clock that does not wait, or the tiny model. Yield its process id."""
    if kind == "clock":
        with node(redis_url, 0.0) as (pid, _):
            yield pid
        return
    from fixtures.tiny_model import make_tiny_model  # imports transformers

    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder))
        argv = ("penstock", "node", folder, "--redis-url", redis_url, "--dtype", "bfloat16")
        with child(*argv, PENSTOCK_NODE_PROGRESS="json", PENSTOCK_NODE_MAX_NUM_SEQS="256") as (pid, _):
            yield pid


def _prompts(num_jobs: int) -> list[list[int]]:
    random = Random(num_jobs)
    return [[random.randrange(3, 250) for _ in range(PROMPT_TOKENS)] for _ in range(num_jobs)]


async def _generate(client: AsyncClient, prompts: Sequence[Sequence[int]]) -> None:
    results = await client.generate(prompts, max_tokens=1, ignore_eos=True)
    assert all(len(result.choices[0].token_ids) == 1 for result in results)


async def _embed(client: AsyncClient, prompts: Sequence[Sequence[int]]) -> None:
    assert len(await client.embed(prompts)) == len(prompts)


QUEUES = ("celery", "taskiq", "dramatiq", "arq")
PEER_HEAD = """
| queue | jobs/s | Redis ms |
|---|---|---|"""


async def measure_peers(num_jobs: int, num_turns: int) -> None:
    """Print the rows of empty tasks through other task queues and of penstock's short jobs, by turns."""
    python = interpreter("queues")
    if python is None:
        print("The other task queues are not installed: make bench-peers PEERS=queues")
        return
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in ("penstock", *QUEUES)}
    for _ in range(num_turns):
        rates["penstock"].append(await _penstock_rate(num_jobs))
        for name in QUEUES:
            try:
                rates[name].append(_peer_rate(python, name, num_jobs))
            except subprocess.CalledProcessError as error:
                print(f"{name} failed: {error.stderr.splitlines()[-1:]}")
    print(PEER_HEAD)
    for name, found in rates.items():
        if not found:
            continue
        per_s, redis_ms = (median(values) for values in zip(*found, strict=True))
        print(f"| {name} | {per_s:,.0f} | {redis_ms:.2f} |")


async def _penstock_rate(num_jobs: int) -> tuple[float, float]:
    with durable_redis() as server, _node(server.url, "clock"):
        async with AsyncClient(server.url) as client:
            await _generate(client, _prompts(200))
            prompts = _prompts(num_jobs)
            with CpuMeter({"redis": redis_pid(server)}) as meter:
                await _generate(client, prompts)
    return num_jobs / meter.wall_s, meter.spent_us["redis"] / num_jobs / 1e3


def _peer_rate(python: Path, name: str, num_jobs: int) -> tuple[float, float]:
    script = Path(__file__).parents[1] / "task_queues.py"
    with durable_redis() as server:
        pid = redis_pid(server)
        before_us = cpu_us(pid)
        argv = [str(python), str(script), name, server.url.removeprefix("unix://"), str(num_jobs)]
        took_s = float(subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()[-1])
        return num_jobs / took_s, (cpu_us(pid) - before_us) / num_jobs / 1e3


def _case_of(text: str) -> tuple[int, int]:
    num_tenants, num_waiting = map(int, text.split(":"))
    return num_tenants, num_waiting


def main() -> None:
    """Measure what is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["queue"])
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cases", nargs="+", help="tenants:waiting")
    parser.add_argument("--nodes", type=int, default=1, help="of `queue`")
    parser.add_argument("--engines", nargs="+", default=["clock", "tiny", "tiny, embeddings"])
    parser.add_argument("--url", help="of Redis, for `generate` and `embed`, which `whole` starts")
    options = parser.parse_args()
    cases = [_case_of(one) for one in options.cases] if options.cases else CASES
    if options.url:
        asyncio.run(run_client(options.what[0], options.url, options.jobs))
        return
    if "whole" in options.what:
        measure_whole(options.jobs, options.engines)
    if "peers" in options.what:
        asyncio.run(measure_peers(options.jobs, options.turns))
    if "queue" in options.what:
        asyncio.run(measure_queue(options.jobs, cases, options.nodes))


if __name__ == "__main__":
    main()
