"""What readers pay for `token_durability`: `python -m bench.studies.token_durability --turns 5` prints a table.

One client reads many streams at once, at each level by turns. The engine is a clock, and Redis, its replica, the node
and the readers share one machine, so what shows is the wait for the disk or for the replica. The times at which first
tokens come differ more between turns than between levels; how long each one was held, after it had come, does not.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from unittest import mock

from redis import Redis as SyncRedis

from bench.queue_cost.durability import redis_pair
from bench.queue_cost.processes import POOL, node
from penstock import AsyncClient
from penstock.contract.durability import FSYNC, MEMORY, REPLICATED, Durability
from penstock.contract.errors import UnsupportedDurabilityError
from penstock.producer.client.confirmed_reads import ConfirmedReads
from penstock.producer.client.mailbox import MessageOrigin
from penstock.runtime.embedded_redis import EmbeddedRedis, ServerVersion, find_redis_server

REPLICA = "everysec, a replica"
LEVELS: dict[str, Sequence[Durability]] = {
    "always": (MEMORY, FSYNC),
    "everysec": (MEMORY, FSYNC),
    REPLICA: (MEMORY, REPLICATED),
}


@dataclass
class LevelRuns:
    """What the turns of one level gave."""

    tokens_per_s: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    """Of all streams, from the call to their first token."""
    held_ms: list[float] = field(default_factory=list)
    """Of all streams, from the arrival of their first token until it was confirmed."""


_held: ContextVar[list[float]] = ContextVar("_held")
"""Where the reader of this task notes for how long tokens were held."""


@contextmanager
def holds_are_timed() -> Iterator[None]:
    """Note meanwhile how long each hold of a reader takes."""
    hold = ConfirmedReads.hold

    async def timed(reads: ConfirmedReads, pool: str, mark: MessageOrigin) -> bool:
        begun_s = time.monotonic()
        is_safe = await hold(reads, pool, mark)
        _held.get().append(1000 * (time.monotonic() - begun_s))
        return is_safe

    with mock.patch.object(ConfirmedReads, "hold", timed):
        yield


@contextmanager
def server(setting: str) -> Iterator[str]:
    """Run Redis with a setting, and yield its URL."""
    with ExitStack() as stack:
        if setting == REPLICA:
            yield stack.enter_context(redis_pair())
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        one = stack.enter_context(EmbeddedRedis(data_dir=folder))
        with SyncRedis.from_url(one.url) as redis:
            redis.config_set("appendfsync", setting)
        yield one.url


async def read(client: AsyncClient, level: Durability, num_tokens: int, runs: LevelRuns, in_s: float) -> int:
    """Read one stream that begins `in_s` later, and return how many tokens it had."""
    held_ms: list[float] = []
    _held.set(held_ms)
    await asyncio.sleep(in_s)
    asked_s, num_read = time.monotonic(), 0
    job = await client.submit("hello", model=POOL, max_tokens=num_tokens, ignore_eos=True, token_durability=level)
    async for chunk in job.chunks():
        if chunk.token_ids and not num_read:
            runs.first_ms.append(1000 * (time.monotonic() - asked_s))
            runs.held_ms += held_ms[:1]
        num_read += len(chunk.token_ids)
    return num_read


async def measure(url: str, setting: str, args: argparse.Namespace) -> dict[str, LevelRuns]:
    """Read streams at each level by turns. A level that Redis cannot give is left out."""
    found: dict[str, LevelRuns] = {}
    async with AsyncClient(url) as client:
        for turn in range(args.turns + 1):
            for level in list(LEVELS[setting])[:: -1 if turn % 2 else 1]:
                runs = LevelRuns()
                begun_s = time.monotonic()
                try:
                    starts_s = (number * args.apart_ms / 1000 for number in range(args.streams))
                    reads = (read(client, level, args.tokens, runs, in_s) for in_s in starts_s)
                    num_tokens = sum(await asyncio.gather(*reads))
                except UnsupportedDurabilityError:
                    continue
                if turn:  # The first one opens connections and loads scripts.
                    turns = found.setdefault(level, LevelRuns())
                    turns.tokens_per_s.append(num_tokens / (time.monotonic() - begun_s))
                    turns.first_ms += runs.first_ms
                    turns.held_ms += runs.held_ms
    return found


def show(setting: str, found: dict[str, LevelRuns]) -> None:
    """Print a row for each level."""
    at_memory = found[MEMORY]
    for level in (level for level in LEVELS[setting] if level in found):
        turns = found[level]
        ratio = median(ours / theirs for ours, theirs in zip(turns.tokens_per_s, at_memory.tokens_per_s, strict=True))
        p50, p99 = median(turns.first_ms), quantiles(turns.first_ms, n=100)[98]
        later = p50 - median(at_memory.first_ms)
        rate = f"{median(turns.tokens_per_s):,.0f} | {ratio:.3f}"
        held = f"{median(turns.held_ms):.1f}, {quantiles(turns.held_ms, n=100)[98]:.1f}" if turns.held_ms else ""
        print(f"| {setting} | `{level}` | {rate} | {p50:.1f}, {p99:.1f} | {later:+.1f} | {held} |", flush=True)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=20.0, help="milliseconds of a step of the engine")
    parser.add_argument("--apart-ms", type=float, default=0.0, help="milliseconds between two streams that begin")
    parser.add_argument("--settings", nargs="+", choices=[*LEVELS], default=[*LEVELS])
    args = parser.parse_args()
    load = f"{args.streams} streams, begun {args.apart_ms:g} ms apart, a token each {args.step_ms:g} ms"
    print(f"{ServerVersion.of(find_redis_server())}, {load}\n")
    print("| `appendfsync` | level | tokens/s | of `memory` | first token p50, p99 (ms) | later (ms) | held (ms) |")
    print("|---|---|---|---|---|---|---|")
    for setting in args.settings:
        with server(setting) as url, node(url, args.step_ms), holds_are_timed():
            show(setting, asyncio.run(measure(url, setting, args)))


if __name__ == "__main__":
    main()
