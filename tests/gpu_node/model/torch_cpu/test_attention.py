"""Grouped paged attention against the naive reference, on odd shapes and poisoned pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from fixtures.sampling import rows_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.gpu_node.model.architecture.spec import Attention
from penstock.gpu_node.model.protocol import StepPlan
from penstock.gpu_node.model.torch_cpu.attention import KvCache, PagedAttention
from penstock.kernels.arguments import PagedCache
from penstock.kernels.reference.layers import paged_attention, store_kv


def _plan(counts: list[int], contexts: list[int], block_size: int, rng: np.random.Generator) -> tuple[StepPlan, int]:
    """A plan with blocks dealt at random, and the number of blocks."""
    num_blocks = [-(-context // block_size) for context in contexts]
    total = sum(num_blocks) + 1
    deck = rng.permutation(np.arange(1, total))
    tables = np.zeros((len(counts), max(num_blocks)), dtype=np.int32)
    for i, n in enumerate(num_blocks):
        tables[i, :n], deck = deck[:n], deck[n:]
    positions = [np.arange(context - count, context) for count, context in zip(counts, contexts, strict=True)]
    return StepPlan(
        token_ids=np.zeros(sum(counts), np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=np.array(contexts, np.int32),
        block_tables=tables,
        sample_tokens=np.empty(0, np.int32),
        sampling=rows_of(0),
    ), total


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(
    ("counts", "contexts"),
    [
        ([1], [1]),
        ([1, 1, 1], [200, 3, 33]),
        ([1, 5, 1, 31, 1], [70, 5, 64, 95, 1]),
        ([17], [17]),
        ([2, 1] * 6, list(range(40, 52))),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_equals_the_reference(
    counts: list[int], contexts: list[int], block_size: int, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    heads, kv_heads, head_dim = 6, 2, 16
    plan, total = _plan(counts, contexts, block_size, np.random.default_rng(0))
    spec = Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope=None, qkv=("qkv",), out="out")
    attention, cache = PagedAttention((spec,), total, block_size, dtype), KvCache(spec, total, block_size, dtype)
    cache.k[:, 1:] = torch.randn_like(cache.k[:, 1:])
    cache.v[:, 1:] = torch.randn_like(cache.v[:, 1:])
    k_cache, v_cache = cache.k.clone(), cache.v.clone()
    q = torch.randn(sum(counts), heads, head_dim).to(dtype)
    k, v = torch.randn(2, sum(counts), kv_heads, head_dim).to(dtype).unbind(0)
    slots = attention.targets(plan)[0][kv_heads]
    cache.store(k, v, slots)
    store_kv(k, v, PagedCache(k_cache, v_cache), slots[: sum(counts)])
    assert torch.equal(cache.k, k_cache) and torch.equal(cache.v, v_cache)
    got = attention.attend(q, cache, attention.groups(plan), spec)
    tables = [torch.from_numpy(array) for array in (plan.query_starts, plan.context_lens, plan.block_tables)]
    torch.testing.assert_close(
        got, paged_attention(q, PagedCache(k_cache, v_cache), *tables), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_runs_on_torchs_fast_attention(dtype: torch.dtype) -> None:
    plan, total = _plan([31, 5], [95, 5], 16, np.random.default_rng(0))
    spec = Attention(num_heads=6, num_kv_heads=2, head_dim=16, rope=None, qkv=("qkv",), out="out")
    attention, cache = PagedAttention((spec,), total, 16, dtype), KvCache(spec, total, 16, dtype)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attention.attend(torch.zeros(36, 6, 16, dtype=dtype), cache, attention.groups(plan), spec)


def test_every_sequence_is_in_exactly_one_group() -> None:
    rng = np.random.default_rng(1)
    contexts = rng.integers(1, 900, size=50).tolist()
    counts = [min(int(count), context) for count, context in zip(rng.integers(1, 3, size=50), contexts, strict=True)]
    plan, total = _plan(counts, contexts, 16, rng)
    groups = PagedAttention((), total, 16, torch.float32).groups(plan)
    tokens = torch.cat([group.tokens for group in groups]).sort().values
    assert tokens.tolist() == list(range(sum(counts)))
    assert all(group.tokens.tolist() == sorted(group.tokens.tolist()) for group in groups)


@dataclass(frozen=True)
class _Layer:
    num_kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 24
    scale: float = 0.3
    score_cap: float | None = None
    window: int | None = None
    chunk: int | None = None
    has_position_biases: bool = False


@pytest.mark.parametrize(
    "layer", [_Layer(), _Layer(score_cap=2.0), _Layer(window=7), _Layer(chunk=13), _Layer(value_dim=8, chunk=40)]
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_values_of_another_size_sinks_and_chunks(layer: _Layer, has_sinks: bool) -> None:
    torch.manual_seed(0)
    counts, contexts = [1, 9, 1, 80], [70, 9, 33, 95]
    plan, total = _plan(counts, contexts, 8, np.random.default_rng(0))
    paged, cache = PagedAttention((layer,), total, 8, torch.float32), KvCache(layer, total, 8, torch.float32)
    cache.k[:, 1:] = torch.randn_like(cache.k[:, 1:])
    cache.v[:, 1:] = torch.randn_like(cache.v[:, 1:])
    q, sinks = torch.randn(sum(counts), 6, layer.head_dim), torch.randn(6) if has_sinks else None
    got = paged.attend(q, cache, paged.groups(plan), layer, sinks)
    for seq, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        slots = [plan.block_tables[seq, at // 8] * 8 + at % 8 for at in range(context)]
        k, v = (kept.flatten(1, 2)[:, slots].repeat_interleave(3, 0) for kept in (cache.k, cache.v))
        own = torch.arange(context - count, context)[:, None]
        keys = torch.arange(context)
        seen = keys <= own
        if layer.window is not None:
            seen &= keys > own - layer.window
        if layer.chunk is not None:
            seen &= keys // layer.chunk == own // layer.chunk
        rows = slice(plan.query_starts[seq], plan.query_starts[seq + 1])
        scores = q[rows].transpose(0, 1) @ k.transpose(1, 2) * layer.scale
        if layer.score_cap is not None:
            scores = layer.score_cap * (scores / layer.score_cap).tanh()
        shares = scores.masked_fill(~seen, -torch.inf).exp()
        total_share = shares.sum(-1, keepdim=True)
        if sinks is not None:
            total_share = total_share + sinks.exp()[:, None, None]
        torch.testing.assert_close(got[rows], (shares / total_share @ v).transpose(0, 1), atol=1e-5, rtol=1e-5)
