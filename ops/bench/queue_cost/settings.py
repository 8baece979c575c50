"""What is measured with and without the queue: a model on some of the cores, and an engine that is only waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.child import Spec
from bench.engines import penstock, penstock_queue
from bench.engines.penstock import PenstockSession
from bench.engines.penstock_queue import QueuedSession
from bench.queue_cost.clock import POOL, ClockEngine
from bench.queue_cost.processes import node
from penstock.cli.demo_model import demo_model

STEP_MS = 10.0
INT8: dict[str, Any] = {"quantization": "int8", "kv_cache_dtype": "int8"}


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table."""

    name: str
    spec: Spec
    per_s: float
    """Of the load by chance; the engine is busy most of the time, and seldom with many requests."""


def all_settings() -> list[Setting]:
    """First those where the queue's processes share their cores with the model, then those where they do not."""
    model = str(demo_model())
    return [
        Setting("int8 on both cores", Spec("mix", model, INT8), per_s=8),
        Setting("bf16 on both cores", Spec("mix", model, INT8 | {"quantization": "none"}), per_s=3),
        Setting("int8 on one core", Spec("mix", model, INT8 | {"num_threads": 1}), per_s=4),
        Setting(f"steps of {STEP_MS:g} ms elsewhere", Spec("mix", POOL), per_s=20),
    ]


@contextmanager
def open_bare(spec: Spec) -> Iterator[PenstockSession]:
    """The engine alone."""
    if spec.weights == POOL:
        yield PenstockSession(ClockEngine(STEP_MS / 1e3))
        return
    with penstock.open_session(spec) as session:
        yield session


@contextmanager
def open_queued(spec: Spec) -> Iterator[QueuedSession]:
    """The same engine in a node."""
    serve = _serve_clock if spec.weights == POOL else penstock_queue.serve_model
    with penstock_queue.open_session(spec, serve) as session:
        yield session


@contextmanager
def _serve_clock(redis_url: str, _: Spec) -> Iterator[int]:
    with node(redis_url, STEP_MS) as (pid, _said):
        yield pid
