"""`python -m faults.attempts`: jobs with retries, checks and keys, while nodes fail at tokens and everything is killed.

Each job must end once, as itself or as the last of its attempts: with the text that its id gives and that its check
accepts, or with an error after its last attempt. Jobs of a key are never more than its limit, queued or running.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import secrets
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from fakes.processes.reference_engine import reference_tokens, text_of
from faults.tools.backlog_view import audited
from faults.tools.redis_process import RedisProcess
from faults.tools.soak_kills import Fleet
from redis.asyncio import Redis

from penstock.contract.errors import UnavailableError
from penstock.contract.job import SamplingParams
from penstock.contract.output import Result
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.producer.client.settings import ClientSettings
from penstock.queue import keys
from penstock.queue.broker.connection import connect

POOL = "attempts"
PROMPT = "go"
MAX_TOKENS = 16
LIMIT = 3
"""The most jobs of a key."""
ATTEMPTS = 8
CHECK = "[a-m].*"
"""About half of the outputs match."""
_DAY_MS = 86_400_000
_SHOWN = 5
_COUNT = """
local most = 0
for _, key in ipairs(ARGV) do
  local count = 0
  for _, id in ipairs(redis.call('SMEMBERS', KEYS[1] .. ':open')) do
    local state, entry, name = unpack(redis.call('HMGET', KEYS[1] .. ':job:' .. id, 'state', 'entry', 'key'))
    if name == key and (state == 'running' or (state == 'queued' and entry ~= 'delayed')) then count = count + 1 end
  end
  most = math.max(most, count)
end
return most
"""
"""The most jobs of one of these keys that are queued or running, by their records alone."""


class Watch:
    """Looks again and again at how many jobs of each key are queued or running."""

    def __init__(self, url: str, num_keys: int) -> None:
        self._url = url
        self._names = [f"key:{number}" for number in range(num_keys)]
        self.most = 0
        self.num_looks = 0

    async def run(self) -> None:
        """Look until cancelled."""
        async with connect(self._url) as redis:
            while True:
                try:
                    found = await redis.eval(_COUNT, 1, keys.prefix(POOL), *self._names)  # type: ignore[misc]
                    self.most, self.num_looks = max(self.most, found), self.num_looks + 1
                except (OSError, Exception):
                    await asyncio.sleep(0.1)
                await asyncio.sleep(0.02)


def problem_of(first: AsyncJob, result: Result) -> str:
    """Return what is wrong with the end of a job; an empty text if nothing is."""
    code = result.outcome.code
    if result.state == "succeeded":
        params = SamplingParams(max_tokens=MAX_TOKENS)
        if result.text != text_of(reference_tokens(result.job_id, params, list(PROMPT.encode()))):
            return f"{result.job_id} has another text"
        return "" if re.fullmatch(CHECK, result.text) else f"{result.job_id} has a text that its check refuses"
    return "" if code in ("output_rejected", "model_error") else f"{first.id} ended as {result.state}: {code}"


async def chain_of(client: AsyncClient, job_id: str) -> list[Any]:
    """Return the states of a job and of those that took its place."""
    found = [await client.status(job_id)]
    while found[-1].retried_as is not None:
        found.append(await client.status(found[-1].retried_as))
    return found


async def problems_of_chain(client: AsyncClient, job: AsyncJob, result: Result) -> list[str]:
    """Return what is wrong with the records of a job's attempts."""
    chain = await chain_of(client, job.id)
    found = []
    if chain[-1].job_id != result.job_id:
        found.append(f"{job.id} leads to {chain[-1].job_id}, and its result is of {result.job_id}")
    if result.state != "succeeded" and chain[-1].attempt < ATTEMPTS:
        found.append(f"{job.id} ended with {result.outcome.code} after {chain[-1].attempt} attempts")
    if any(one.attempt >= other.attempt for one, other in pairwise(chain)):
        found.append(f"{job.id} counts no further attempt: {[one.attempt for one in chain]}")
    tokens = sum(one.ledger.usage.completion_tokens for one in chain if one.ledger.usage is not None)
    if result.usage is not None and result.usage.completion_tokens != tokens:
        found.append(f"{job.id} has {result.usage.completion_tokens} tokens, its attempts have {tokens}")
    return found


async def submit(client: AsyncClient, number: int, num_keys: int) -> AsyncJob:
    """Submit a job, as often as Redis is away."""
    options: dict[str, Any] = {"concurrency_key": f"key:{number % num_keys}", "max_concurrency": LIMIT}
    while True:
        try:
            return await client.submit(
                PROMPT,
                max_tokens=MAX_TOKENS,
                max_attempts=ATTEMPTS,
                retry_backoff_s=0.05,
                check_output={"regex": CHECK},
                idempotency_key=f"job {number}",
                **options,
            )
        except UnavailableError:
            await asyncio.sleep(0.2)


async def kill(fleet: Fleet, rng: random.Random, args: argparse.Namespace) -> Counter[str]:
    """Kill one process after another."""
    killed = Counter[str]()
    for _ in range(args.kills):
        await asyncio.sleep(rng.uniform(0.3, 1.7) * args.every)
        kind = rng.choice(("node", "node", "node", "redis"))
        await getattr(fleet, f"kill_{kind}")(rng)
        killed[kind] += 1
    return killed


async def left_of(redis: Redis) -> list[str]:
    """Return the keys of limits that are left although no job is open."""
    names = [name.decode() async for name in redis.scan_iter(f"{keys.prefix(POOL)}:*")]
    return [f"{name} is left" for name in names if ":keyed:" in name or ":awaiting" in name or ":keys:" in name]


async def run(args: argparse.Namespace) -> list[str]:
    """Run all jobs. Return what is wrong."""
    rng, found = random.Random(args.seed), list[str]()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="attempts-") as name, RedisProcess(Path(name) / "redis") as server:
        shape = {"log_jobs": False, "step_s": args.step_s, "result_ttl_ms": _DAY_MS, "error_share": args.error_share}
        fleet = Fleet(server, POOL, num_nodes=2, num_gateways=0, idem_ttl_ms=_DAY_MS, avoid_ms=0, **shape)
        try:
            await fleet.start()
            found += await _run_jobs(args, fleet, rng)
            async with connect(server.url) as redis:
                found += await audited(redis, POOL) + await left_of(redis)
        finally:
            fleet.close()
    print("\n".join(f"  VIOLATION {problem}" for problem in found) or "  nothing violated", flush=True)
    return found


async def _run_jobs(args: argparse.Namespace, fleet: Fleet, rng: random.Random) -> list[str]:
    watch, began_s = Watch(fleet.redis.url, args.keys), time.monotonic()
    watching = asyncio.create_task(watch.run())
    settings = ClientSettings(outage_s=args.patience_s)
    async with AsyncClient(fleet.redis.url, settings=settings) as client:
        jobs = await asyncio.gather(*(submit(client, number, args.keys) for number in range(args.jobs)))
        kills = asyncio.create_task(kill(fleet, rng, args))
        async with asyncio.timeout(args.patience_s):
            results = await asyncio.gather(*(job.result(check=False) for job in jobs))
        killed = await kills
        found = [one for one in map(problem_of, jobs, results) if one][:_SHOWN]
        chains = await asyncio.gather(*(problems_of_chain(client, *one) for one in zip(jobs, results, strict=True)))
        found += [problem for problems in chains for problem in problems][:_SHOWN]
        attempts = [(await client.status(result.job_id)).attempt for result in results]
    watching.cancel()
    if watch.most > LIMIT:
        found.append(f"{watch.most} jobs of a key were queued or running; the limit is {LIMIT}")
    ends = Counter(result.outcome.code or result.state for result in results)
    print(
        f"{args.jobs} jobs of {args.keys} keys in {time.monotonic() - began_s:.0f} s: {dict(ends)}, "
        f"{sum(attempts)} attempts, killed {dict(killed)}; most jobs of a key in {watch.num_looks} looks: {watch.most}",
        flush=True,
    )
    return found


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    one = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one.add_argument("--jobs", type=int, default=2000)
    one.add_argument("--keys", type=int, default=20)
    one.add_argument("--kills", type=int, default=20)
    one.add_argument("--every", type=float, default=4.0, help="seconds between two kills, on average")
    one.add_argument("--patience-s", type=float, default=900.0)
    one.add_argument("--step-s", type=float, default=0.01)
    one.add_argument("--error-share", type=float, default=0.02, help="of the tokens at which an engine fails")
    one.add_argument("--seed", type=int, default=secrets.randbits(32))
    return one


def main() -> None:
    """Run the campaign. The exit status tells whether anything was violated."""
    found = asyncio.run(run(parser().parse_args()))
    sys.exit(f"{len(found)} violations" if found else 0)


if __name__ == "__main__":
    main()
