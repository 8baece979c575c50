"""A Celery group of short generations: `python -m bench.studies.celery_groups --tasks 1000 --turns 5` prints a table.

It compares the group's time with that of an empty group of as many tasks and of `client.generate` of as many prompts,
one after the other. The engine is a clock that does not wait, so that what the queues cost shows.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from celery import Celery, group

from bench.queue_cost.processes import CELERY_REDIS, celery_worker, node
from penstock import Client
from penstock.celery import PenstockTasks, install
from penstock.runtime.embedded_redis import EmbeddedRedis

EMPTY = "bench.empty"


def empty() -> None:
    """Do nothing."""


def make_app(redis_url: str) -> tuple[Celery, PenstockTasks]:
    """Return a user's app with an empty task and those of penstock."""
    url = redis_url.replace("unix://", "redis+socket://", 1)
    made = Celery("bench", broker=url, backend=url)
    made.task(name=EMPTY)(empty)
    return made, install(made, redis_url=redis_url)


if CELERY_REDIS in os.environ:
    app = make_app(os.environ[CELERY_REDIS])[0]  # For `celery -A`.


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the seconds that `work` takes."""
    begun_s = time.monotonic()
    work()
    return time.monotonic() - begun_s


def measure(num_tasks: int, num_turns: int, pool: str, concurrency: int) -> None:
    """Print the medians of all turns, and the ratio that they should keep."""
    prompts = [[3 + number % 200] * 30 for number in range(num_tasks)]
    found: dict[str, list[float]] = {"empty": [], "generate": [], "group": []}
    with EmbeddedRedis() as server, node(server.url, 0.0), celery_worker(__spec__.name, server.url, pool, concurrency):
        made, tasks = make_app(server.url)
        with Client(server.url) as client:
            signatures = [tasks.generate(prompt, max_tokens=1, ignore_eos=True) for prompt in prompts]
            works: dict[str, Callable[[], Any]] = {
                "empty": lambda: group(made.signature(EMPTY) for _ in prompts).apply_async().get(timeout=600),
                "generate": lambda: client.generate(prompts, max_tokens=1, ignore_eos=True),
                "group": lambda: group(signatures).apply_async().get(timeout=600),
            }
            works["empty"]()
            works["group"]()
            for _ in range(num_turns):
                for name, work in works.items():
                    found[name].append(seconds_of(work))
    empty_s, generate_s, group_s = (median(found[name]) for name in works)
    print(f"| pool | tasks | empty group s | generate s | group of generations s | ratio |\n|{'---|' * 6}")
    cells = (pool, f"{num_tasks:,}", *(f"{spent_s:.2f}" for spent_s in (empty_s, generate_s, group_s)))
    print(f"| {' | '.join(cells)} | {group_s / (empty_s + generate_s):.2f} |")


def main() -> None:
    """Measure what is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pool", default="threads")
    parser.add_argument("--concurrency", type=int, default=64)
    options = parser.parse_args()
    measure(options.tasks, options.turns, options.pool, options.concurrency)


if __name__ == "__main__":
    main()
