"""The loads that policies are compared on: lengths are log-uniform, arrivals random, all of it fixed by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from bench.policies.node import SimulatedJob

DESCRIPTIONS = {
    "lengths": "400 jobs of one class in 10 s, limits log-uniform over 16–1024 tokens, of which 30–100 % are written",
    "two kinds": "400 jobs of one class in 20 s, limit 1024; 7 of 10 write 10–80 tokens, the others 300–1000",
    "classes": "100 batch jobs of one tenant from the start; beside them 3 interactive and 2 standard jobs a second",
    "tenants": "four tenants' jobs at once, 40 of each, and in front of them 160 more of one of them",
    "flood": "150 interactive jobs of one tenant at once, 50 more a second; beside them 1 standard job a second",
}


def _job(rng: random.Random, number: int, tenant: str, priority: int, submitted_s: float, most: int) -> SimulatedJob:
    max_tokens = round(16 * (most / 16) ** rng.random())
    return SimulatedJob(
        job_id=f"{number:05}",
        tenant=tenant,
        level=priority,
        submitted_ms=round(1000 * submitted_s),
        num_prompt=round(16 * 32 ** rng.random()),
        max_tokens=max_tokens,
        num_output=max(1, round(max_tokens * rng.uniform(0.3, 1.0))),
    )


def lengths(seed: int) -> list[SimulatedJob]:
    rng = random.Random(seed)
    return [_job(rng, number, "one", 1, rng.uniform(0, 10), 1024) for number in range(400)]


def two_kinds(seed: int) -> list[SimulatedJob]:
    rng = random.Random(seed)
    jobs = [_job(rng, number, "one", 1, rng.uniform(0, 20), 1024) for number in range(400)]
    for job in jobs:
        job.max_tokens = 1024
        job.num_output = rng.randint(10, 80) if rng.random() < 0.7 else rng.randint(300, 1000)
    return jobs


def classes(seed: int) -> list[SimulatedJob]:
    rng = random.Random(seed)
    batch = [_job(rng, number, "bulk", 2, 0, 1024) for number in range(100)]
    interactive = [_job(rng, 1000 + number, "people", 0, number / 3 + rng.random(), 256) for number in range(150)]
    standard = [_job(rng, 2000 + number, "service", 1, number / 2 + rng.random(), 512) for number in range(100)]
    return batch + interactive + standard


def tenants(seed: int) -> list[SimulatedJob]:
    rng = random.Random(seed)
    greedy = [_job(rng, number, "greedy", 1, 0, 256) for number in range(200)]
    others = [_job(rng, 1000 + number, "abc"[number % 3], 1, 0, 256) for number in range(120)]
    return greedy + others


def flood(seed: int) -> list[SimulatedJob]:
    rng = random.Random(seed)
    times_s = [0.0] * 150 + [number / 50 for number in range(1000)]
    streams = [_job(rng, number, "flood", 0, at_s, 256) for number, at_s in enumerate(times_s)]
    return streams + [_job(rng, 2000 + number, "neighbour", 1, number + 0.5, 256) for number in range(20)]


LOADS: dict[str, Callable[[int], list[SimulatedJob]]] = {
    "lengths": lengths,
    "two kinds": two_kinds,
    "classes": classes,
    "tenants": tenants,
    "flood": flood,
}
