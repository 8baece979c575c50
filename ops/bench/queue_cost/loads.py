"""Loads that the bare engine and the queue answer in turns; each turn's prompts are new, or they would be cached."""

from __future__ import annotations

from bench.workload import Workload, alike, by_chance, offline_mix

NUM_BY_CHANCE = 64


def load_of(name: str, seed: int, per_s: float) -> Workload:
    """`mix`: 64 requests at once. `single`: 12 of 32 tokens one behind the other, 32 tokens out each. `chance`: such
    ones that come by chance, `per_s` of them a second on average.
    """
    seed += 1000
    if name == "mix":
        return Workload(offline_mix(seed=seed))
    if name == "single":
        return Workload(alike(12, 32, 32, seed=seed), max_in_flight=1)
    return Workload(by_chance(alike(NUM_BY_CHANCE, 32, 32, seed=seed), per_s=per_s, seed=seed))
