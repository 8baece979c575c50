"""Steps of a runner alone: decode over batch and context, prefill, mixed steps, and a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench_gpu.measure import Clock, fraction
from bench_gpu.models import Model, parts_of
from bench_gpu.plans import decode_plan, plan_of, random_tables
from penstock.gpu_node.model.protocol import StepPlan

_WARM = 3


def step_ms(model: Model, plan_after: Callable[[int], StepPlan], count: int) -> float:
    """Return the median distance between the ends of steps, with as many in flight as the runner takes.

    So the host packs a step while the one ahead of it runs, as it does in serving. plan_after: the plan of step i.
    """
    in_flight: deque[Any] = deque()
    ended: list[Any] = []
    for i in range(count + _WARM):
        in_flight.append(model.runner.submit(plan_after(i)))
        if len(in_flight) == model.runner.max_in_flight:
            ended.append(in_flight.popleft())
            ended[-1].result()
    while in_flight:
        ended.append(in_flight.popleft())
        ended[-1].result()
    pairs = zip(ended[_WARM - 1 :], ended[_WARM:], strict=False)
    return float(median(later.ms_since(earlier) for earlier, later in pairs))


def _always(plan: StepPlan, first: StepPlan | None = None) -> Callable[[int], StepPlan]:
    """Return what gives `plan` for each step, and `first` for the first one."""
    return lambda step: first if first is not None and step == 0 else plan


def decode(
    model: Model, clock: Clock, ceilings: dict[str, Any], grid: list[tuple[int, int]], **rules: Any
) -> Iterator[dict[str, Any]]:
    """Yield the time of a replayed step at each (batch, context), and what reading weights and cache alone takes."""
    for batch, context in grid:
        tables = random_tables(model, batch, context)
        if tables is None or batch > model.max_num_seqs or context > model.max_model_len or clock.left_s < 0:
            yield {"batch": batch, "context": context, "skipped": "it does not fit, or the stage's time is over"}
            continue
        first, later = (
            decode_plan(ids, context, tables, **rules)
            for ids in (np.ones(batch, np.int32), -1 - np.arange(batch, dtype=np.int32))
        )
        ms = step_ms(model, _always(later, first), 12 if clock.is_gpu else 2)
        needed = model.weight_bytes + batch * context * model.kv_token_bytes
        share = fraction(ceilings, ms, needed, 2 * batch * model.matrix_weights, "bf16_tflop_s")
        yield {"batch": batch, "context": context, "ms": ms, "tokens_s": batch / ms * 1e3, "fraction": share}


def prefill(
    model: Model, clock: Clock, ceilings: dict[str, Any], grid: list[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Yield the time of a step with prompts of (count, tokens)."""
    spec = model.spec
    for count, tokens in grid:
        tables = random_tables(model, count, tokens)
        if tables is None or tokens > model.max_model_len or clock.left_s < 0:
            yield {"count": count, "tokens": tokens, "skipped": "it does not fit, or the stage's time is over"}
            continue
        plan = plan_of([np.ones(tokens, np.int32)] * count, np.zeros(count, np.int64), tables, np.arange(count))
        ms = step_ms(model, _always(plan), 4 if clock.is_gpu else 1)
        scores = 2 * sum(parts_of(layer)[0].queries for layer in spec.layers) * count * tokens**2
        operations = 2 * model.matrix_weights * count * tokens + scores
        share = fraction(ceilings, ms, model.weight_bytes, operations, "bf16_tflop_s")
        yield {"count": count, "tokens": tokens, "ms": ms, "tokens_s": count * tokens / ms * 1e3, "fraction": share}


def mixed(model: Model, clock: Clock, batch: int, context: int, chunk: int) -> dict[str, Any]:
    """Measure a step of `batch` decoding sequences and a prompt's chunk, and both alone: what is lost by mixing."""
    tables = random_tables(model, batch + 1, max(context, chunk))
    if tables is None:
        return {"batch": batch, "chunk": chunk, "skipped": "the cache is too small"}
    rows, ids = np.arange(batch), [np.ones(1, np.int32)] * batch
    starts, prompt = np.full(batch, context - 1), np.ones(chunk, np.int32)
    both = plan_of([*ids, prompt], np.append(starts, 0), tables, rows)
    alone = plan_of(ids, starts, tables[:-1], rows), plan_of([prompt], np.zeros(1, np.int64), tables[-1:], rows[:0])
    count = 8 if clock.is_gpu else 1
    mixed_ms, decode_ms, prefill_ms = (step_ms(model, _always(plan), count) for plan in (both, *alone))
    times = {"mixed_ms": mixed_ms, "decode_ms": decode_ms, "prefill_ms": prefill_ms}
    return {"batch": batch, "context": context, "chunk": chunk, **times, "gain": (decode_ms + prefill_ms) / mixed_ms}


def submit_ms(model: Model, clock: Clock, batch: int, context: int) -> dict[str, float]:
    """Return the host's time for `submit`, packing and launches included, and the step's without a graph."""
    tables = random_tables(model, batch, context)
    assert tables is not None
    plan, times = decode_plan(np.ones(batch, np.int32), context, tables), []
    for _ in range(8):
        started: list[Any] = []
        times.append(clock.wall_ms(partial(_submit, model, plan, started)))
        started[0].result()
    model.runner.replays = False
    eager_ms = step_ms(model, _always(plan), 8 if clock.is_gpu else 1)
    model.runner.replays = True
    return {"batch": batch, "submit_and_run_ms": median(times), "eager_ms": eager_ms}


def _submit(model: Model, plan: StepPlan, started: list[Any]) -> None:
    started.append(model.runner.submit(plan))


def trace(model: Model, path: Path, batch: int, context: int) -> str:
    """Write a profiler's trace of three decode steps and a prompt; return the operations that take most."""
    tables = random_tables(model, batch, context)
    if tables is None:
        return "the cache is too small for it"
    plan = decode_plan(np.ones(batch, np.int32), context, tables)
    prompt = plan_of([np.ones(context, np.int32)], np.zeros(1, np.int64), tables[:1], np.zeros(1, np.int64))
    with torch.profiler.profile() as profiler:
        for one in (plan, plan, plan, prompt):
            model.runner.submit(one).result()
    profiler.export_chrome_trace(str(path))
    column = "cuda_time_total" if torch.cuda.is_available() else "cpu_time_total"
    return str(profiler.key_averages().table(sort_by=column, row_limit=25))
