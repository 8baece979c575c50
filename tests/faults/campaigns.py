"""`python -m faults.campaigns`: kill nodes 200 times with the reference engine, 20 times with a model."""

from __future__ import annotations

import argparse
import asyncio
import secrets

from faults.tools.real_takeover import run_real_takeovers
from faults.tools.report import quantile, record
from faults.tools.takeover import Takeovers, run_takeovers

from penstock.queue.broker.connection import connect
from penstock.runtime.embedded_redis import EmbeddedRedis

MAX_BEHIND_LEASE_S = 3.0


def note(row: str, takeovers: Takeovers, lease_ms: int) -> None:
    """Record a campaign's measurements. Raise if takeovers took too long."""
    seconds = [hit.seconds for hit in takeovers.hits]
    p99 = quantile(seconds, 0.99)
    measurements = {
        "kills that hit": len(seconds),
        "too late": takeovers.num_missed,
        "machine stood still": takeovers.num_disturbed,
        "mean place of the kill": sum(hit.drawn / hit.num_tokens for hit in takeovers.hits) / len(seconds),
        "takeover p50 s": quantile(seconds, 0.5),
        "p99 s": p99,
        "longest s": max(seconds),
    }
    print(row, measurements, flush=True)
    assert p99 <= lease_ms / 1000 + MAX_BEHIND_LEASE_S
    record("Takeover: from the kill to the first new token", row, measurements)


async def run(args: argparse.Namespace) -> None:
    """Run the requested campaigns."""
    with EmbeddedRedis() as server:
        redis = connect(server.url)
        for lease_ms in args.lease_ms:
            await redis.flushall()
            kills = await run_takeovers(
                redis, server.url, args.kills, lanes=args.lanes, lease_ms=lease_ms, seed=args.seed
            )
            note(f"reference engine, lease {lease_ms / 1000:g} s", kills, lease_ms)
        if args.real_kills:
            await redis.flushall()
            kills = await run_real_takeovers(redis, server.url, args.real_kills, seed=args.seed)
            note("SmolLM2-135M, native runner, lease 3 s", kills, 3000)
        await redis.aclose()


def main() -> None:
    """Parse the arguments and run the campaigns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--lanes", type=int, default=8, help="pools at once, each with two nodes")
    parser.add_argument("--lease-ms", type=int, nargs="*", default=[3000, 15000])
    parser.add_argument("--real-kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
