"""`python -m faults.backlog WHAT`: long backlogs of jobs are accepted, and each job ends exactly once.

`doors` sends 20,000 requests through each way into the queue.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fakes.processes.node_process import NodeProcess
from faults.tools.backlog_entries import ENTRIES, Requests, each
from faults.tools.backlog_view import SlowCommands, audited, problems_of, shown, view_of
from faults.tools.report import Measurement, record

from penstock.cli.demo_model import demo_model
from penstock.producer.client import AsyncClient
from penstock.queue.broker.connection import connect
from penstock.runtime.embedded_redis import EmbeddedRedis

POOL = "backlog"
SECTION = "Backlogs"
WARM_UP_TOKENS = 100
STEP_S = 0.002
Run = Callable[[argparse.Namespace], Awaitable[list[str]]]


async def warm_up(url: str, pool: str, *, num_jobs: int) -> None:
    """Let the pool's nodes work through a short backlog, until they know their pace."""
    async with AsyncClient(url) as client:

        async def run(_: int) -> None:
            await (await client.submit([1, 2, 3], model=pool, max_tokens=WARM_UP_TOKENS)).result()

        for _ in range(20):
            await each(num_jobs, run, at_once=num_jobs)
            if any(node.drain_cost_per_s for node in (await client.pressure(pool)).nodes):
                return
    raise AssertionError("no node knows its pace")


@asynccontextmanager
async def serving(pool: str, args: argparse.Namespace) -> AsyncIterator[str]:
    """Yield the URL of a Redis with a node of the pool that knows its pace."""
    settings: dict[str, Any] = {"pool": pool, "log_jobs": False}
    settings |= {"model": str(demo_model()), "num_threads": 2} if args.demo else {"max_num_seqs": 64}
    with EmbeddedRedis(maxmemory_mib=args.redis_mib) as server, NodeProcess(server.url, step_s=STEP_S, **settings):
        await warm_up(server.url, pool, num_jobs=200)
        yield server.url


async def run_entry(name: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """Send the requests through one way into the queue. Return what is wrong."""
    requests = Requests(POOL, args.requests, max_tokens=8, is_reference=not args.demo)
    async with serving(POOL, args) as url, connect(url) as redis:
        slow, before = SlowCommands(redis), await view_of(redis, POOL)
        await slow.start()
        answers = await ENTRIES[name](url, requests, folder)
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
        record(SECTION, row, measurements)


async def doors(args: argparse.Namespace) -> list[str]:
    """Send the requests through each way into the queue."""
    found: list[str] = []
    for name in args.only or ENTRIES:
        with tempfile.TemporaryDirectory(prefix="backlog-") as folder:
            found += await run_entry(name, args, Path(folder))
    return found


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(description=__doc__)
    top.add_argument("--record", action="store_true", help="write the measurements to ops/bench/results/faults.md")
    commands = top.add_subparsers(required=True)
    one = commands.add_parser("doors", help="each way into the queue")
    one.add_argument("--requests", type=int, default=20_000)
    one.add_argument("--demo", action="store_true", help="with the demo model")
    one.add_argument("--only", nargs="*", choices=ENTRIES)
    one.add_argument("--redis-mib", type=int, default=512)
    one.set_defaults(run=doors)
    return top


def main() -> None:
    """Run one campaign. The exit status tells whether anything was violated."""
    args = parser().parse_args()
    found = asyncio.run(args.run(args))
    sys.exit(f"{len(found)} violations" if found else 0)


if __name__ == "__main__":
    main()
