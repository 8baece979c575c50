"""Whole steps of the GPU runner against what they should be; each check stops at the first wrong result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench_gpu.models import Model, Options, make_model
from bench_gpu.plans import Ints, decode_plan, plan_of, random_tables
from bench_gpu.reference import reference_logits
from bench_gpu.verdict import Bound, judge, judge_equal
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.graphs import bucket_sizes
from penstock.gpu_node.model.protocol import StepPlan, StepResult

Rows = list[dict[str, float | str]]
BOUNDS = {torch.float32: Bound(2e-5, 1e-4), torch.bfloat16: Bound(0.04, 0.1)}
"""Of logits after a few layers, by the dtype of activations: every layer adds roundings."""
NUM_LOGPROBS = 5
PROMPTS_AT_ONCE = 4


def check_logits(name: str, spec: ModelSpec, device: Device, dtype: torch.dtype, num_tokens: int) -> Rows:
    """Compare a sequence in chunks, beside another one, and then token by token, with the decoder in float64."""
    options = Options(dtype=dtype, max_num_seqs=4, max_model_len=2 * num_tokens + 8, num_blocks=num_tokens)
    model = make_model(name, spec, device, options)
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, num_tokens + 2).astype(np.int32)
    want = reference_logits(spec, model.weights, torch.from_numpy(ids.astype(np.int64)).to(device.torch))
    tables, none = random_tables(model, 2, len(ids)), np.zeros(0, np.int64)
    assert tables is not None
    cut = num_tokens // 3
    got = [model.runner.logits(plan_of([ids[:cut]], np.array([0]), tables[:1], none))]
    both = plan_of([ids[::-1][: cut + 1], ids[cut:num_tokens]], np.array([0, cut]), tables[::-1], none)
    got.append(model.runner.logits(both)[cut + 1 :])
    got += [
        model.runner.logits(plan_of([ids[at : at + 1]], np.array([at]), tables[:1], none))
        for at in (num_tokens, num_tokens + 1)
    ]
    return [judge(f"{name} {dtype} logits", torch.from_numpy(np.concatenate(got)), want.cpu(), BOUNDS[dtype])]


def check_graphs(model: Model, context: int) -> Rows:
    """Compare each graph, full and with padding rows, with the same step computed without it: equal to the last bit."""
    rows: Rows = []
    runner, sizes = model.runner, bucket_sizes(model.max_num_seqs)
    tables = random_tables(model, model.max_num_seqs, context)
    assert tables is not None
    _fill(model, tables, context - 1)
    for size in sizes:
        for batch in sorted({size, max(1, size - 3)} & set(range(model.max_num_seqs + 1))):
            plan = _with_logprobs(decode_plan(_ids(batch, model), context, tables[:batch], temperature=0.7))
            results = {}
            for replays in (False, True):
                runner.replays = replays
                results[replays] = runner.submit(plan).result()
            runner.replays = True
            rows += _judge_results(f"{model.name} graph of {size}, {batch} rows", results[True], results[False])
    return rows


def check_in_flight(model: Model, batch: int, context: int, num_steps: int = 6) -> Rows:
    """Compare tokens of steps that are submitted two at a time, before tokens are known, with those of single steps."""
    tables = random_tables(model, batch, context + num_steps)
    assert tables is not None
    said: dict[bool, list[Ints]] = {}
    for is_ahead in (False, True):
        _fill(model, tables, context - 1)
        ids, handles, tokens = _ids(batch, model), [], []
        for step in range(num_steps):
            plan = decode_plan(ids, context + step, tables, temperature=0.7)
            handles.append(model.runner.submit(plan))
            if is_ahead:
                ids = -1 - np.arange(batch, dtype=np.int32)
                if len(handles) == model.runner.max_in_flight:
                    tokens.append(handles.pop(0).result().tokens)
            else:
                ids = handles.pop().result().tokens
                tokens.append(ids)
        said[is_ahead] = tokens + [handle.result().tokens for handle in handles]
    got, want = (torch.from_numpy(np.stack(said[is_ahead])) for is_ahead in (True, False))
    return [judge_equal(f"{model.name} two steps in flight", got, want)]


def check_equal(name: str, model: Model, other: Model, context: int) -> Rows:
    """Compare the steps of two runners of the same weights: equal to the last bit."""
    rows: Rows = []
    tables = random_tables(model, model.max_num_seqs, context)
    assert tables is not None
    for one in (model, other):
        _fill(one, tables, context - 1)
    for batch in sorted({1, model.max_num_seqs}):
        plan = _with_logprobs(decode_plan(_ids(batch, model), context, tables[:batch], temperature=0.7))
        got, want = (one.runner.submit(plan).result() for one in (model, other))
        rows += _judge_results(f"{name}, {batch} rows", got, want)
    return rows


def check_company(model: Model, context: int) -> Rows:
    """Compare a row alone and in a full batch; equal to the last bit with `deterministic`."""
    batch = model.max_num_seqs
    tables = random_tables(model, batch, context)
    assert tables is not None
    _fill(model, tables, context - 1)
    ids = _ids(batch, model)
    whole = model.runner.submit(_with_logprobs(decode_plan(ids, context, tables))).result()
    alone = model.runner.submit(_with_logprobs(decode_plan(ids[:1], context, tables[:1]))).result()
    return _judge_results(f"{model.name} deterministic", alone, _first(whole))


def _fill(model: Model, tables: Ints, num_tokens: int) -> None:
    """Compute a prompt for each sequence, so that contexts hold keys and values. No token is drawn."""
    rng = np.random.default_rng(1)
    for first in range(0, len(tables), PROMPTS_AT_ONCE):
        some = tables[first : first + PROMPTS_AT_ONCE]
        prompts = list(rng.integers(0, model.spec.vocab_size, (len(some), num_tokens)).astype(np.int32))
        plan = plan_of(prompts, np.zeros(len(some), np.int64), some, np.zeros(0, np.int64))
        model.runner.submit(plan).result()


def _ids(count: int, model: Model) -> Ints:
    return np.random.default_rng(2).integers(0, model.spec.vocab_size, count).astype(np.int32)


def _with_logprobs(plan: StepPlan) -> StepPlan:
    wanted = np.full(len(plan.sample_tokens), NUM_LOGPROBS, np.int32)
    return replace(plan, sampling=replace(plan.sampling, num_logprobs=wanted))


def _first(result: StepResult) -> StepResult:
    assert result.logprobs is not None
    values = replace(result.logprobs, token_ids=result.logprobs.token_ids[:1], values=result.logprobs.values[:1])
    return replace(result, tokens=result.tokens[:1], logprobs=values)


def _judge_results(name: str, got: StepResult, want: StepResult) -> Rows:
    def tensors(result: StepResult) -> list[Any]:
        assert result.logprobs is not None
        return [torch.from_numpy(x) for x in (result.tokens, result.logprobs.token_ids, result.logprobs.values)]

    parts = zip(("tokens", "best tokens", "logprobs"), tensors(got), tensors(want), strict=True)
    return [judge_equal(f"{name}: {part}", mine, theirs) for part, mine, theirs in parts]
