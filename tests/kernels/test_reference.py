"""The references against torch's own operations."""

from __future__ import annotations

import torch
from torch.nn import functional

from penstock.kernels.arguments import PagedCache
from penstock.kernels.reference.layers import gate_mul, paged_attention, rms_norm, rope, store_kv


def test_paged_attention_equals_dense_causal_attention() -> None:
    torch.manual_seed(0)
    block_size, heads, kv_heads, head_dim, length = 8, 6, 2, 16, 29
    k, v = torch.randn(2, length, kv_heads, head_dim).unbind(0)
    q = torch.randn(length, heads, head_dim)
    cache = PagedCache(*torch.full((2, kv_heads, 9, block_size, head_dim), torch.nan).unbind(0))
    table = torch.tensor([[5, 2, 8, 1]])
    slots = torch.tensor([int(table[0, i // block_size]) * block_size + i % block_size for i in range(length)])
    store_kv(k, v, cache, slots)
    want = functional.scaled_dot_product_attention(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    whole = paged_attention(q, cache, torch.tensor([0, length]), torch.tensor([length]), table)
    torch.testing.assert_close(whole, want)
    chunk = paged_attention(q[20:], cache, torch.tensor([0, 9]), torch.tensor([length]), table)
    torch.testing.assert_close(chunk, want[20:])


def test_rms_norm_equals_torch() -> None:
    x, weight = torch.randn(5, 32), torch.randn(32)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), functional.rms_norm(x, (32,), weight, 1e-5))


def test_rope_rotates_pairs_and_keeps_lengths() -> None:
    x = torch.randn(3, 2, 8)
    angles = torch.randn(3, 4)
    turned = rope(x, angles.cos(), angles.sin())
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    complex_x = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    torch.testing.assert_close(turned, torch.cat((complex_x.real, complex_x.imag), dim=-1))


def test_gate_mul_equals_torch() -> None:
    gate_up = torch.randn(4, 10)
    torch.testing.assert_close(gate_mul(gate_up, "silu"), functional.silu(gate_up[:, :5]) * gate_up[:, 5:])
