"""Steps of a runner alone: decode over batch and context, prefill, and a trace of some of both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from bench_gpu.measure import Clock
from bench_gpu.models import BLOCK_SIZE, Model
from penstock.gpu_node.model.protocol import SamplingRows, StepPlan

_NOTHING = np.zeros(0, np.int32)


def sampling_rows(positions: np.ndarray) -> SamplingRows:
    """Rows that draw from the whole softmax."""
    count = len(positions)
    ones, zeros, none = np.ones(count, np.float32), np.zeros(count, np.float32), np.zeros(count, np.int32)
    return SamplingRows(
        temperature=ones,
        top_k=none,
        top_p=ones,
        min_p=zeros,
        repetition_penalty=ones,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        seed=np.arange(count, dtype=np.uint64),
        choice=none,
        position=positions.astype(np.int32),
        seen=(_NOTHING,) * count,
        num_seen_prompt=none,
        banned=(_NOTHING,) * count,
        biased=(_NOTHING,) * count,
        biases=(zeros[:0],) * count,
    )


def plan_of(ids: list[np.ndarray], starts: np.ndarray, tables: np.ndarray, sampled: np.ndarray) -> StepPlan:
    """Sequences that each compute `ids[i]` behind `starts[i]` tokens."""
    counts = np.array([len(tokens) for tokens in ids])
    contexts = (starts + counts).astype(np.int32)
    width = -(-int(contexts.max()) // BLOCK_SIZE)
    query_starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
    return StepPlan(
        token_ids=np.concatenate(ids).astype(np.int32),
        positions=positions.astype(np.int32),
        query_starts=query_starts,
        context_lens=contexts,
        block_tables=np.ascontiguousarray(tables[:, :width]),
        sample_tokens=(query_starts[sampled + 1] - 1).astype(np.int32),
        sampling=sampling_rows(contexts[sampled]),
    )


def _tables(model: Model, batch: int, tokens: int) -> np.ndarray | None:
    """Blocks dealt at random, or None where the cache does not hold them."""
    width = -(-tokens // BLOCK_SIZE)
    if batch * width > model.sizes.num_device_blocks:
        return None
    blocks = np.random.default_rng(0).permutation(model.sizes.num_device_blocks)[: batch * width] + 1
    return blocks.astype(np.int32).reshape(batch, width)


def decode(model: Model, clock: Clock, copy_gb_s: float, grid: list[tuple[int, int]]) -> list[dict[str, float]]:
    """One replayed step at each (batch, context): its time on the device, and what reading alone would take."""
    rows = []
    for batch, context in grid:
        tables = _tables(model, batch, context)
        if tables is None or batch > model.max_num_seqs or context > model.max_model_len or clock.left_s < 0:
            continue
        starts = np.full(batch, context - 1)
        plan = plan_of([np.ones(1, np.int32)] * batch, starts, tables, np.arange(batch))
        steps = [model.runner.submit(plan).result().forward_ms for _ in range(12 if clock.is_card else 3)]
        ms = float(np.median(steps[2:]))
        needed = model.weight_bytes + batch * context * model.kv_token_bytes
        limit_ms = needed / copy_gb_s / 1e6
        fraction = limit_ms / ms
        rows.append({"batch": batch, "context": context, "ms": ms, "tokens_s": batch / ms * 1e3, "fraction": fraction})
    return rows


def prefill(model: Model, clock: Clock, product_tflop_s: float, grid: list[tuple[int, int]]) -> list[dict[str, float]]:
    """Prompts of (count, tokens) in one step."""
    rows = []
    for count, tokens in grid:
        tables = _tables(model, count, tokens)
        if tables is None or tokens > model.max_model_len or clock.left_s < 0:
            continue
        plan = plan_of([np.ones(tokens, np.int32)] * count, np.zeros(count, np.int64), tables, np.arange(count))
        ms = float(
            np.median([model.runner.submit(plan).result().forward_ms for _ in range(4 if clock.is_card else 2)][1:])
        )
        spec = model.spec
        products = 2 * (model.num_weights - spec.vocab_size * spec.hidden_size) * count * tokens
        scores = 2 * spec.num_layers * spec.num_heads * spec.head_dim * count * tokens**2
        limit_ms = (products + scores) / product_tflop_s / 1e9
        rows.append(
            {
                "count": count,
                "tokens": tokens,
                "ms": ms,
                "tokens_s": count * tokens / ms * 1e3,
                "fraction": limit_ms / ms,
            }
        )
    return rows


def trace(model: Model, path: Path, batch: int, context: int) -> str:
    """A profiler's trace of three decode steps and one prompt, for chrome://tracing; the operations that take most."""
    tables = _tables(model, batch, context)
    if tables is None:
        return "the cache is too small for it"
    plan = plan_of([np.ones(1, np.int32)] * batch, np.full(batch, context - 1), tables, np.arange(batch))
    prompt = plan_of([np.ones(context, np.int32)], np.zeros(1, np.int64), tables[:1], np.zeros(1, np.int64))
    with torch.profiler.profile() as profiler:
        for one in (plan, plan, plan, prompt):
            model.runner.submit(one).result()
    profiler.export_chrome_trace(str(path))
    on_card = torch.cuda.is_available()
    return str(profiler.key_averages().table(sort_by=f"{'cuda' if on_card else 'cpu'}_time_total", row_limit=25))
