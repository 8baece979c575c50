"""Loads that the bare engine and the queue answer in turns; each turn's prompts are new, or they would be cached."""

from __future__ import annotations

from bench.workload import Workload, alike, offline_mix


def load_of(name: str, seed: int) -> Workload:
    """`mix`: 64 requests at once. `single`: 12 of 32 tokens one behind the other, 32 tokens out each."""
    if name == "mix":
        return Workload(offline_mix(seed=1000 + seed))
    return Workload(alike(12, 32, 32, seed=1000 + seed), max_in_flight=1)
