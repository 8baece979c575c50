"""Triton's paged attention against the reference: decode rows and chunks together, whatever their lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fakes.paged import make_scene

from penstock.kernels.arguments import PagedCache
from penstock.kernels.reference import layers as reference
from penstock.kernels.triton.decode_attention import decode_attention, longest_first
from penstock.kernels.triton.prefill_attention import prefill_attention, prefill_tiles

from . import mixed_attention
from .conftest import TOLERANCES

PATHS = (mixed_attention, reference)
SHORT_FLOATS = (torch.float16, torch.bfloat16)
COUNTS, CONTEXTS = [1, 5, 1, 70, 1, 1], [1, 5, 300, 95, 64, 129]
SHAPES: dict[str, dict[str, Any]] = {
    "groups of 3": {"heads": 6, "kv_heads": 2, "head_dim": 16},
    "window and biases, odd head": {"heads": 2, "kv_heads": 2, "head_dim": 24, "window": 37, "biased": True},
    "capped": {"heads": 4, "kv_heads": 2, "head_dim": 16, "window": 37, "cap": 0.5},
    "one key head for 20": {"heads": 20, "kv_heads": 1, "head_dim": 32, "block_size": 8},
    "sinks": {"heads": 6, "kv_heads": 2, "head_dim": 16, "sunk": True},
    "sinks beside windows": {"heads": 4, "kv_heads": 2, "head_dim": 24, "window": 37, "sunk": True},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in SHAPES), *(("groups of 3", dtype) for dtype in SHORT_FLOATS)],
)
def test_equals_the_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    shape = {"block_size": 16, "window": None, "biased": False, "cap": None, "sunk": False} | SHAPES[name]
    scene = make_scene(
        *(COUNTS, CONTEXTS),
        block_size=shape["block_size"],
        num_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        dtype=dtype,
        device=device,
    )
    q = torch.randn(sum(COUNTS), shape["heads"], shape["head_dim"], device=device).to(dtype)
    biases = torch.randn(shape["heads"], 301, device=device) if shape["biased"] else None
    # As large as the largest scores, so that they take a good share.
    sinks = 2 + torch.randn(shape["heads"], device=device) if shape["sunk"] else None
    rules: dict[str, Any] = {"scale": 0.3, "window": shape["window"], "biases": biases, "cap": shape["cap"]}
    rules["sinks"] = sinks
    got, want = (module.paged_attention(q, scene.cache, *scene.tables, **rules) for module in PATHS)
    torch.testing.assert_close(got, want, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize(("kept", "cap"), [(torch.int8, 2.0), (torch.float8_e4m3fn, None)], ids=str)
def test_quantized_caches_mean_what_the_reference_reads(
    kept: torch.dtype, cap: float | None, device: torch.device
) -> None:
    torch.manual_seed(0)
    scene = make_scene(COUNTS, CONTEXTS, block_size=32, num_heads=1, head_dim=16, dtype=kept, device=device)
    q = torch.randn(sum(COUNTS), 4, 16, device=device)
    got, want = (module.paged_attention(q, scene.cache, *scene.tables, cap=cap) for module in PATHS)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_queries_in_bfloat16_over_a_cache_in_float8_lose_no_more_than_their_own_rounding(device: torch.device) -> None:
    """The products are in float16: queries above its largest number, and scales of values that differ by 10^6."""
    torch.manual_seed(0)
    kept = torch.float8_e4m3fn
    scene = make_scene(COUNTS, CONTEXTS, block_size=64, num_heads=1, head_dim=16, dtype=kept, device=device)
    assert scene.cache.k_scales is not None and scene.cache.v_scales is not None
    scene.cache.k_scales.mul_(1e-6)
    scene.cache.v_scales[:, ::2].mul_(1e6)
    q = (1e6 * torch.randn(sum(COUNTS), 4, 16, device=device)).bfloat16()
    got, want = (
        module.paged_attention(given, scene.cache, *scene.tables)
        for module, given in ((mixed_attention, q), (reference, q.float()))
    )
    error = (got.float() - want).abs() / want.abs().amax(-1, keepdim=True)
    assert error.max() < 2**-7


@pytest.mark.parametrize("rows", [64, 128])
def test_tiles_of_any_number_of_queries_give_the_same(rows: int, device: torch.device) -> None:
    torch.manual_seed(0)
    counts, contexts = [200, 3], [230, 3]
    scene = make_scene(counts, contexts, block_size=64, num_heads=2, head_dim=16, dtype=torch.float16, device=device)
    q = torch.randn(sum(counts), 4, 16, device=device).half()
    tiles = prefill_tiles(scene.query_starts.cpu().numpy(), np.arange(2, dtype=np.int32), rows)
    assert len(tiles) == -(-200 // rows) + 1
    got = torch.empty_like(q)
    prefill_attention(*(got, q, scene.cache, *scene.tables, torch.from_numpy(tiles).to(device)), scale=0.25, rows=rows)
    want = reference.paged_attention(q, scene.cache, *scene.tables, scale=0.25)
    torch.testing.assert_close(got, want, atol=3e-3, rtol=3e-3)


def test_the_longest_context_starts_first() -> None:
    seqs, contexts = np.array([0, 2, 3], np.int32), np.array([5, 99, 7, 6], np.int32)
    assert longest_first(seqs, contexts).tolist() == [2, 3, 0]


@pytest.mark.parametrize("splits", [1, 2, 16])
def test_a_row_is_the_same_alone_and_in_a_batch(splits: int, device: torch.device) -> None:
    torch.manual_seed(0)
    contexts = [1, 700, 3, 257]
    scene = make_scene([1] * 4, contexts, block_size=16, num_heads=2, head_dim=16, dtype=torch.float32, device=device)
    q = torch.randn(4, 4, 16, device=device)

    def decode(*rows: int) -> torch.Tensor:
        out = torch.full_like(q, torch.nan)
        seqs = torch.tensor(rows, dtype=torch.int32, device=device)
        decode_attention(out, q, scene.cache, *scene.tables, seqs, splits, scale=0.25, window=600)
        return out

    together = decode(0, 1, -1, 3)
    assert together[2].isnan().all()
    for row in (0, 1, 3):
        want = reference.paged_attention(
            q[row : row + 1],
            scene.cache,
            torch.tensor([0, 1]),
            *(x[row : row + 1] for x in scene.tables[1:]),
            scale=0.25,
            window=600,
        )
        assert torch.equal(decode(row)[row], together[row])
        torch.testing.assert_close(together[row : row + 1], want, atol=1e-5, rtol=1e-5)


def test_blocks_of_the_host_are_read_where_they_lie(device: torch.device) -> None:
    """One sequence whose last blocks lie in other memory, as a runner's swap space does."""
    torch.manual_seed(0)
    scene = make_scene([3], [90], block_size=16, num_heads=2, head_dim=16, dtype=torch.float32, device=device)
    q, first = torch.randn(3, 4, 16, device=device), 4
    want = reference.paged_attention(q, scene.cache, *scene.tables)
    pool = torch.stack((scene.cache.k.transpose(0, 1), scene.cache.v.transpose(0, 1)), dim=1)
    near, far = pool[:first].clone(), pool[first:].cpu()
    if device.type == "cuda":
        far = far.pin_memory()
    k, v = near.transpose(0, 1).unbind(0)
    jump = far.data_ptr() - near.data_ptr() - near.nbytes
    cache = PagedCache(k.transpose(0, 1), v.transpose(0, 1), host_from=first, host_jump=jump)
    torch.testing.assert_close(mixed_attention.paged_attention(q, cache, *scene.tables), want, atol=1e-5, rtol=1e-5)
