"""The kernels between the matrix products against float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from bench_gpu.shapes import Sizes, ints, normal
from bench_gpu.verdict import SHORT, Bound, judge, judge_equal, stored_bound
from penstock.gpu_node.model.torch_common.layers import Norm
from penstock.kernels.arguments import Addend
from penstock.kernels.reference.layers import ACTIVATIONS
from penstock.kernels.triton import layers
from penstock.kernels.triton.layers import embed
from penstock.kernels.triton.norms import add_norm, add_norm_quantized, norm_all_heads
from penstock.kernels.triton.products import QuantizedRows

Row = dict[str, float | str]


def check(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Yield the errors of each kernel."""
    for one in (_embeddings, _norms, _norms_of_heads, _activations, _bounds):
        yield from one(sizes, device)


def _embeddings(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    table = normal(sizes.vocab, sizes.hidden, sizes=sizes, device=device)
    ids, sampled = ints([3, -1, 0, -2], device), ints([5, sizes.vocab - 1], device)
    want = table[[3, 5, 0, sizes.vocab - 1]].float() * 2
    yield judge_equal("embed", embed(ids, sampled, table, 2.0), want)


def _norms_of_heads(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """All queries of a token, and all its keys, are normed as one vector."""
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    qkv = normal(sizes.rows, queries + 2 * keys, sizes=sizes, device=device)
    q_norm, k_norm = (Norm(normal(size, sizes=sizes, device=device), None, 1e-5, 1.0) for size in (queries, keys))
    q, k, v = torch.split(qkv.double(), [queries, keys, keys], dim=1)
    parts = (q, q_norm), (k, k_norm)
    normed = [functional.rms_norm(x, x.shape[1:], norm.weight.double() + 1, 1e-5) for x, norm in parts]
    norm_all_heads(qkv, q_norm, k_norm)
    yield judge("norm_all_heads", qkv, torch.cat((*normed, v), dim=1), SHORT)


def _bounds(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    logits = 50 * normal(sizes.rows, sizes.vocab, sizes=sizes, device=device)
    want = 30 * torch.tanh(0.5 * logits.double() / 30)
    layers.bound_logits(logits, 0.5, 30.0)
    yield judge("bound_logits", logits, want, SHORT)


def check_quantized(sizes: Sizes, device: torch.device, kept: torch.dtype) -> Iterator[Row]:
    """Norms and activations that quantize their results in the same pass."""
    name = str(kept).removeprefix("torch.")
    residual = 3 + torch.randn(sizes.rows, sizes.hidden, device=device)
    weight = normal(sizes.hidden, sizes=sizes, device=device)
    want = functional.rms_norm(residual.double(), (sizes.hidden,), weight.double(), 1e-5)
    got = add_norm_quantized(residual, None, Norm(weight, None, 1e-5), kept)
    yield judge(f"add_norm_quantized {name}", widened(got), want, stored_bound(kept, want))
    x = normal(sizes.rows, 2 * sizes.inter, sizes=sizes, device=device)
    gate, up = x.double().chunk(2, dim=-1)
    got = layers.activate_quantized(x, "silu", kept, gated=True)
    want = functional.silu(gate) * up
    yield judge(f"activate_quantized {name}", widened(got), want, stored_bound(kept, want))


def widened(rows: QuantizedRows) -> Tensor:
    """Return the values of quantized rows, in float64."""
    return rows.q.double() * rows.scales.double().unsqueeze(-1)


def _norms(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    residual = 3 + torch.randn(sizes.rows, sizes.hidden, device=device)
    delta, weight, bias = (normal(*shape, sizes=sizes, device=device) for shape in _norm_shapes(sizes))
    total, shape = residual.double() + delta.double(), (sizes.hidden,)
    rms, layer = Norm(weight, None, 1e-5, offset=1.0), Norm(weight, bias, 1e-5)
    want = functional.rms_norm(total, shape, weight.double() + 1, 1e-5)
    mine = residual.clone()
    yield judge("add_norm", add_norm(mine, Addend(delta), rms), want, SHORT)
    yield judge("add_norm, residual", mine, total, Bound(1e-6, 1e-6))
    want = functional.layer_norm(total, shape, weight.double(), bias.double(), 1e-5)
    yield judge("add_norm, centred", add_norm(residual.clone(), Addend(delta), layer), want, SHORT)
    total = residual.double() + 0.3 * functional.rms_norm(delta.double(), shape, weight.double() + 1, 1e-5)
    mine = residual.clone()
    add_norm(mine, Addend(delta, rms, 0.3), rms)
    yield judge("add_norm, normed delta", mine, total, Bound(1e-5, 1e-5))


def _norm_shapes(sizes: Sizes) -> list[tuple[int, ...]]:
    return [(sizes.rows, sizes.hidden), (sizes.hidden,), (sizes.hidden,)]


def _activations(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    x = normal(sizes.rows, 2 * sizes.inter, sizes=sizes, device=device)
    for name in layers.ACTIVATIONS:
        gate, up = x.double().chunk(2, dim=-1)
        yield judge(f"gate_mul {name}", layers.gate_mul(x, name), ACTIVATIONS[name](gate) * up, SHORT)
        yield judge(f"activate {name}", layers.activate(x, name), ACTIVATIONS[name](x.double()), SHORT)
