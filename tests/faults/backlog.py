"""`python -m faults.backlog [WHAT]`: long backlogs of jobs are accepted, and each job ends exactly once.

`doors` sends requests through each way into the queue. `due` lets delayed jobs fall due in one second beside chats.
`kills` kills clients, readers of completions, gateways, nodes and Redis over a backlog. `memory` lets results fill
Redis until a reader frees them, and `states` measures what a job takes. Each prints what it measured and what was
violated.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from fakes.processes.node_process import NodeProcess
from faults.tools.backlog_due import Chats, submit_delayed
from faults.tools.backlog_entries import ENTRIES, Requests
from faults.tools.backlog_kills import FeedReader, run_with_kills
from faults.tools.backlog_memory import (
    LargeJobs,
    Peaks,
    ended_jobs,
    rewrite,
    until_ended,
    until_taking_stops,
    used_memory,
)
from faults.tools.backlog_view import SlowCommands, audited, problems_of, shown, view_of
from faults.tools.processes import GatewayProcess
from faults.tools.redis_process import RedisProcess
from faults.tools.report import Measurement, quantile, record
from faults.tools.soak_kills import Fleet

from penstock.cli.demo_model import demo_model
from penstock.producer.client import AsyncClient
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.runtime.embedded_redis import EmbeddedRedis

POOL = "backlog"
SECTIONS = {
    "doors": "Backlogs, by the way into the queue",
    "due": "Delayed jobs that fall due together",
    "kills": "Kills during a backlog",
    "memory": "Results that fill Redis",
    "states": "Bytes of Redis a job, by state",
}
WARM_UP_TOKENS = 100
WARM_UP_S = 60
STEP_S = 0.002
DAY_MS = 86_400_000
SHORT_LOG_MS, LONG_LOG_MS = 3000, 30_000
LONG_LEASE_MS = 60_000
TAKEN_SHARE, MOST_SHARE = 0.81, 0.85
"""Of Redis's memory: used when no more background work is taken, and used at any time."""
BUFFERS_MIB = 2
"""What answers to the reader and to the nodes take for a moment."""
WHOLE = (["doors"], ["doors", "--demo", "--requests", "4000"], ["due"], ["kills"], ["memory"], ["states"])
"""The campaigns that run if none is named."""


async def warm_up(url: str, pool: str, *, num_jobs: int) -> None:
    """Let the pool's nodes work through a short backlog, until they know their pace."""
    async with AsyncClient(url) as client:
        knows = asyncio.Event()

        async def run() -> None:
            while not knows.is_set():
                await (await client.submit([1, 2, 3], model=pool, max_tokens=WARM_UP_TOKENS)).result()

        # A pace counts time in which jobs wait without a break.
        async with asyncio.timeout(WARM_UP_S):
            running = [asyncio.create_task(run()) for _ in range(num_jobs)]
            while not any(node.drain_cost_per_s for node in (await client.pressure(pool)).nodes):
                await asyncio.sleep(0.1)
            knows.set()
            await asyncio.gather(*running)


@asynccontextmanager
async def serving(pool: str, args: argparse.Namespace) -> AsyncIterator[str]:
    """Yield the URL of a Redis with a node of the pool that knows its pace."""
    with running_node(pool, redis_mib=args.redis_mib, with_demo_model=args.demo) as url:
        await warm_up(url, pool, num_jobs=200)
        yield url


@contextmanager
def running_node(pool: str, *, redis_mib: int, with_demo_model: bool) -> Iterator[str]:
    """Yield the URL of a Redis with a node of the pool."""
    settings: dict[str, Any] = {"pool": pool, "log_jobs": False}
    settings |= {"model": str(demo_model()), "num_threads": 2} if with_demo_model else {"max_num_seqs": 64}
    with EmbeddedRedis(maxmemory_mib=redis_mib) as server, NodeProcess(server.url, step_s=STEP_S, **settings):
        yield server.url


async def run_entry(url: str, name: str, args: argparse.Namespace) -> list[str]:
    """Send the requests through one way into the queue of a served pool. Return what is wrong."""
    requests = Requests(POOL, args.requests, max_tokens=8, is_reference=not args.demo)
    with tempfile.TemporaryDirectory(prefix="backlog-") as folder:
        async with connect(url) as redis:
            slow, before = SlowCommands(redis), await view_of(redis, POOL)
            await slow.start()
            answers = await ENTRIES[name](url, requests, Path(folder))
            found = answers.problems(requests)
            found += problems_of(before, await view_of(redis, POOL), args.requests, job_ids=answers.job_ids)
            blocked = shown(await slow.read())
            found += await audited(redis, POOL)
    measurements: dict[str, Measurement] = {"jobs": args.requests, "jobs/s": round(args.requests / answers.took_s)}
    if answers.accepted_s:
        measurements["accepted/s"] = round(args.requests / answers.accepted_s)
    if answers.mib:
        measurements["caller MiB"] = round(answers.mib)
    measurements |= {"refused": sum(answers.refusals.values()), "slow in Redis": blocked}
    told(f"{'demo model' if args.demo else 'reference engine'}, {name}", measurements, found, args)
    return found


def told(row: str, measurements: dict[str, Measurement], found: list[str], args: argparse.Namespace) -> None:
    """Print what was measured and what is wrong. Record the measurements if nothing is."""
    print(f"{time.strftime('%H:%M:%S')} {row}: {measurements}", flush=True)
    print("\n".join(f"  VIOLATION {problem}" for problem in found) or "  nothing violated", flush=True)
    if args.record and not found:
        record(SECTIONS[args.run.__name__], row, measurements)


async def due(args: argparse.Namespace) -> list[str]:
    """Let many delayed jobs fall due in one second beside chats."""
    async with serving(POOL, args) as url:
        return await run_due(url, args)


async def run_due(url: str, args: argparse.Namespace) -> list[str]:
    """Let delayed jobs of a served pool fall due. Return what is wrong."""
    requests = Requests(POOL, args.requests, max_tokens=4, is_reference=not args.demo)
    job_ids, refused = list[str](), Counter[str]()
    async with connect(url) as redis:
        gateway = await asyncio.to_thread(GatewayProcess(url).wait_ready)
        chats = Chats(gateway.url, POOL, args.chats)
        slow, memory, clock = SlowCommands(redis), await used_memory(redis), time.monotonic
        before = await view_of(redis, POOL)
        async with chats.running():
            await asyncio.sleep(args.part_s)
        await slow.start()
        due_s = clock() + args.after
        await submit_delayed(url, requests, due_s, job_ids, refused)
        submitted_s = args.after - (due_s - clock())
        assert clock() < due_s - 2 * args.part_s, f"all were submitted after {submitted_s:.0f} s: raise --after"
        state_bytes = (await used_memory(redis) - memory) / args.requests
        blocked = {"submitting": shown(await slow.read())}
        async with chats.running():
            for part, until_s in (("waiting", due_s), ("due", due_s + args.part_s)):
                await slow.start()
                chats.part = part
                await asyncio.sleep(until_s - clock())
                blocked[part] = shown(await slow.read())
            released = await ended_jobs(redis, POOL) - before.counts["ended_succeeded"]
        await until_ended(redis, POOL)
        took_s = clock() - due_s
        num_chats = sum(map(len, chats.first_ms.values()))
        after, found = await view_of(redis, POOL), [f"chats refused: {dict(chats.refused)}"] if chats.refused else []
        found += [f"jobs refused: {dict(refused)}"] if refused else []
        found += problems_of(before, after, args.requests + num_chats)
        if lost := set(job_ids) - after.states.keys():
            found.append(f"{len(lost)} delayed jobs are lost")
        found += await audited(redis, POOL)
        gateway.close()
    for part in ("waiting", "due"):
        if quantile(chats.first_ms[part], 0.5) > quantile(chats.first_ms["alone"], 0.5) + args.later_ms:
            found.append(f"chats {part}: {chats.shown(part)} ms to the first token, alone {chats.shown('alone')}")
    measurements: dict[str, Measurement] = {"jobs": args.requests, "accepted/s": round(args.requests / submitted_s)}
    measurements |= {f"TTFT {part} ms": chats.shown(part) for part in ("alone", "waiting", "due")}
    measurements |= {"chats": num_chats, "bytes a job": round(state_bytes), "all ended after s": round(took_s)}
    measurements |= {"ended/s beside chats": round(released / args.part_s)}
    measurements |= {f"slow in Redis, {part}": what for part, what in blocked.items()}
    model = ", demo model" if args.demo else ""
    told(f"{args.requests} delayed jobs due in one second{model}", measurements, found, args)
    return found


async def memory(args: argparse.Namespace) -> list[str]:
    """Let results fill Redis until no more is taken. Then read and free them, and rewrite the file meanwhile."""
    jobs = LargeJobs(POOL, args.requests)
    limits: dict[str, Any] = {"maxmemory": f"{args.redis_mib}mb", "auto-aof-rewrite-percentage": 0}
    with tempfile.TemporaryDirectory(prefix="backlog-") as name, RedisProcess(Path(name) / "redis", **limits) as server:
        async with connect(server.url) as redis, AsyncExitStack() as nodes, asyncio.TaskGroup() as tasks:
            with large_node(server.url):
                before = await view_of(redis, POOL)
            slow, empty = SlowCommands(redis), await used_memory(redis)
            await slow.start()
            peaks = Peaks(redis, {"reader": os.getpid()})
            watching = tasks.create_task(peaks.watch())
            await jobs.submit(server.url)
            queued_bytes = (await used_memory(redis) - empty) / args.requests
            print(f"{time.strftime('%H:%M:%S')} all submitted: {queued_bytes:.0f} bytes a job", flush=True)
            for number in range(2):
                node = nodes.enter_context(large_node(server.url))
                peaks.pids[f"node {number}"] = node.pid
            ended, share = await until_taking_stops(redis, POOL, still_s=args.still_s)
            print(f"{time.strftime('%H:%M:%S')} taking stopped: {ended} ended, {share:.1%} of memory", flush=True)
            found = [] if ended < args.requests else ["taking never stopped: all jobs fit"]
            still = await rewrite(redis)
            reading = tasks.create_task(jobs.read_and_free(server.url))
            await asyncio.sleep(1)
            busy = await rewrite(redis)
            await reading
            await until_ended(redis, POOL)
            watching.cancel()
            found += problems_of(before, await view_of(redis, POOL), args.requests, job_ids=jobs.ids)
            found += [f"{what}: {number} jobs" for what, number in jobs.wrong.items()]
            found += await audited(redis, POOL)
            left_bytes = (await used_memory(redis) - empty) / args.requests
            blocked = shown(await slow.read())
    if share > TAKEN_SHARE or peaks.most["used"] > args.redis_mib * MOST_SHARE + BUFFERS_MIB:
        found.append(f"memory: {share:.1%} when taking stopped, {peaks.most['used']:.0f} MiB at most")
    measurements: dict[str, Measurement] = {"jobs": args.requests, "ended when taking stopped": ended}
    measurements |= {"memory used then": f"{share:.1%}", "bytes a queued job": round(queued_bytes)}
    measurements |= {"bytes an acknowledged job": round(left_bytes)}
    measurements |= {f"most MiB: {what}": round(size) for what, size in peaks.most.items()}
    measurements |= {f"rewrite, idle: {what}": round(size, 1) for what, size in still.items()}
    measurements |= {f"rewrite, reading: {what}": round(size, 1) for what, size in busy.items()}
    told(f"{args.requests} results without a reader", measurements | {"slow in Redis": blocked}, found, args)
    return found


def large_node(url: str, **settings: Any) -> NodeProcess:
    """Return a node that gives 100 tokens a step. A log lives so shortly that results, not logs, fill Redis."""
    settings = {"log_ttl_ms": SHORT_LOG_MS, "max_num_seqs": 64, "lease_ms": LONG_LEASE_MS, **settings}
    return NodeProcess(url, pool=POOL, tokens_per_step=100, step_s=STEP_S, log_jobs=False, **settings)


async def states(args: argparse.Namespace) -> list[str]:
    """Measure what a job of 1,000 characters and 500 tokens takes of Redis in each state."""
    sizes: dict[str, Measurement] = {"jobs": args.requests}
    with EmbeddedRedis(maxmemory_mib=512) as server:
        async with connect(server.url) as redis:
            for state, options in (("delayed", {"not_before_s": 3600}), ("queued", {})):
                await redis.flushall()
                with large_node(server.url, log_ttl_ms=LONG_LOG_MS):
                    pass
                jobs, empty = LargeJobs(POOL, args.requests), await used_memory(redis)
                await jobs.submit(server.url, **options)
                sizes[state] = round((await used_memory(redis) - empty) / args.requests)
            with large_node(server.url, log_ttl_ms=LONG_LOG_MS):
                await until_ended(redis, POOL)
                sizes["ended"] = round((await used_memory(redis) - empty) / args.requests)
                while [key async for key in redis.scan_iter(f"{keys.prefix(POOL)}:log:*", count=1000)]:
                    await asyncio.sleep(1)
                sizes["ended, its log expired"] = round((await used_memory(redis) - empty) / args.requests)
                await jobs.read_and_free(server.url)
                sizes["acknowledged"] = round((await used_memory(redis) - empty) / args.requests)
    found = [f"{what}: {number} jobs" for what, number in jobs.wrong.items()]
    told("bytes of Redis a job: prompt of 1,000 bytes, answer of 500 tokens in 5 chunks", sizes, found, args)
    return found


async def kills(args: argparse.Namespace) -> list[str]:
    """Kill clients, readers of completions, gateways, nodes and Redis while a backlog is submitted, run and read."""
    rng, requests = random.Random(args.seed), Requests(POOL, args.requests, max_tokens=24)
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="backlog-") as name, RedisProcess(Path(name) / "redis") as server:
        settings = {"log_jobs": False, "max_num_seqs": 64, "step_s": args.step_s, "result_ttl_ms": DAY_MS}
        fleet = Fleet(server, POOL, num_nodes=2, num_gateways=2, keeps_ports=True, **settings, idem_ttl_ms=DAY_MS)
        readers = list[FeedReader]()
        try:
            await fleet.start()
            async with connect(server.url) as redis:
                before = await view_of(redis, POOL)
                async with AsyncClient(server.url) as client:
                    cursor = await client.completions_cursor()
                readers += [FeedReader(kind, Path(name), cursor, fleet) for kind in ("python", "http")]
                how = {"num_kills": args.kills, "every_s": args.every, "readers": readers}
                answers, killed = await run_with_kills(fleet, requests, Path(name), rng, **how)
                after, found = await view_of(redis, POOL), answers.problems(requests)
                found += problems_of(before, after, args.requests, job_ids=answers.job_ids)
                num_told = 0
                for reader in readers:
                    await reader.until_has(args.requests)
                    num_told += reader.num_gaps
                    found += reader.problems(after.states.keys() - before.states.keys())
                found += await audited(redis, POOL)
        finally:
            for reader in readers:
                reader.close()
            fleet.close()
    measurements: dict[str, Measurement] = {"jobs": args.requests, "kills": killed.total()}
    measurements |= {"what was killed": ", ".join(f"{number} {kind}" for kind, number in sorted(killed.items()))}
    measurements |= {"seconds": round(answers.took_s), "nodes lost": after.counts["nodes_lost"]}
    measurements |= {"readers of completions told of losses": num_told}
    told(f"{killed.total()} kills, reference engine", measurements, found, args)
    return found


async def doors(args: argparse.Namespace) -> list[str]:
    """Send the requests through each way into the queue."""
    found: list[str] = []
    for name in args.only or ENTRIES:
        async with serving(POOL, args) as url:
            found += await run_entry(url, name, args)
    return found


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(description=__doc__)
    top.add_argument("--record", action="store_true", help="write the measurements to ops/bench/results/faults.md")
    commands = top.add_subparsers(metavar="WHAT")
    one = commands.add_parser("doors", help="each way into the queue")
    one.add_argument("--requests", type=int, default=20_000)
    one.add_argument("--demo", action="store_true", help="with the demo model")
    one.add_argument("--only", nargs="*", choices=ENTRIES)
    one.add_argument("--redis-mib", type=int, default=512)
    one.set_defaults(run=doors)
    one = commands.add_parser("due", help="delayed jobs that fall due in one second, beside chats")
    one.add_argument("--requests", type=int, default=100_000)
    one.add_argument("--after", type=float, default=90.0, help="seconds from the first submit to the second of all")
    one.add_argument("--part-s", type=float, default=30.0, help="seconds of each measured part")
    one.add_argument("--chats", type=float, default=4.0, help="chats a second")
    one.add_argument("--later-ms", type=float, default=25.0, help="by which half of the first tokens may come later")
    one.add_argument("--redis-mib", type=int, default=512)
    one.add_argument("--demo", action="store_true", help="with the demo model")
    one.set_defaults(run=due)
    one = commands.add_parser("memory", help="results fill Redis until a reader frees them")
    one.add_argument("--requests", type=int, default=200_000)
    one.add_argument("--redis-mib", type=int, default=1024)
    one.add_argument("--still-s", type=float, default=10.0, help="seconds without an end that prove a stop")
    one.set_defaults(run=memory)
    one = commands.add_parser("states", help="what a job takes of Redis in each state")
    one.add_argument("--requests", type=int, default=10_000)
    one.set_defaults(run=states)
    one = commands.add_parser("kills", help="random kills over a backlog")
    one.add_argument("--requests", type=int, default=20_000)
    one.add_argument("--kills", type=int, default=20)
    one.add_argument("--every", type=float, default=6.0, help="seconds between two kills, on average")
    one.add_argument("--step-s", type=float, default=0.05)
    one.add_argument("--seed", type=int, default=secrets.randbits(32))
    one.set_defaults(run=kills)
    return top


def main() -> None:
    """Run one campaign, or all of them. The exit status tells whether anything was violated."""
    found: list[str] = []
    given = sys.argv[1:]
    is_whole = not set(given) - {"--record"}
    for words in WHOLE if is_whole else ((),):
        args = parser().parse_args([*given, *words])
        found += asyncio.run(args.run(args))
    sys.exit(f"{len(found)} violations" if found else 0)


if __name__ == "__main__":
    main()
