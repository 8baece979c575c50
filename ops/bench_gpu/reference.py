"""A decoder in float64 by plain torch operations, from the same weights as the runner's: what its logits should be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench_gpu.models import parts_of
from penstock.gpu_node.model.architecture.mlp import Mlp
from penstock.gpu_node.model.architecture.spec import Attention, ModelSpec
from penstock.gpu_node.model.torch_common.layers import DecoderWeights, LayerWeights, Norm
from penstock.gpu_node.model.torch_common.positions import alibi_biases, rope_angles
from penstock.kernels.reference.layers import ACTIVATIONS


@torch.inference_mode()
def reference_logits(spec: ModelSpec, weights: DecoderWeights, token_ids: Tensor) -> Tensor:
    """Return the logits after each token of one sequence, [num_tokens, vocab] in float64.

    weights: unquantized (`PlainLinear`); token_ids: [num_tokens], on the device of the weights.
    """
    residual = weights.embedding(token_ids).double() * spec.embedding_scale
    for kind, layer in zip(spec.layers, weights.layers, strict=True):
        attention, mlp_spec = parts_of(kind)
        normed = _norm(residual, layer.attention_norm)
        attended = _linear(_attention(attention, layer, _linear(normed, layer.qkv)), layer.out)
        if layer.post_attention_norm is not None:
            attended = _norm(attended, layer.post_attention_norm)
        other, scale = residual, spec.residual_scale
        residual = residual + scale * attended
        inner = other if kind.parallel_residual else residual
        mlp = _mlp(mlp_spec, layer, _norm(inner, layer.mlp_norm))
        residual = residual + scale * (mlp if layer.post_mlp_norm is None else _norm(mlp, layer.post_mlp_norm))
    logits = _linear(_norm(residual, weights.final_norm), weights.head)[:, : spec.vocab_size] * spec.logit_scale
    return _capped(logits, spec.logit_cap)


def _attention(spec: Attention, layer: LayerWeights, qkv: Tensor) -> Tensor:
    num_tokens, device = len(qkv), qkv.device
    rope, window = spec.rope, spec.window
    heads = qkv.view(num_tokens, -1, spec.head_dim)
    q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    if layer.head_norms is not None:
        first = 1 if spec.joint_head_norms else 2
        both = zip((q, k), layer.head_norms, strict=True)
        q, k = (_norm(x.flatten(first), norm).view(x.shape) for x, norm in both)
    at = torch.arange(num_tokens, device=device)
    scores_more = torch.zeros(spec.num_heads, 1, num_tokens, dtype=torch.float64, device=device)
    if spec.has_position_biases:
        scores_more = torch.from_numpy(alibi_biases(spec, num_tokens)).to(device).double().unsqueeze(1)
    if rope is not None:
        cos, sin = (torch.from_numpy(table).to(device).double() for table in rope_angles(rope, num_tokens))
        q, k = (_rotated(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k))
    group = spec.num_heads // spec.num_kv_heads
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = _capped(torch.einsum("qhd,khd->hqk", q, k) * spec.scale, spec.score_cap) + scores_more
    hidden = at[None, :] > at[:, None]
    if window is not None:
        hidden |= at[None, :] <= at[:, None] - window
    shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, v).flatten(1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, kept = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, kept), dim=-1)


def _mlp(spec: Mlp, layer: LayerWeights, x: Tensor) -> Tensor:
    inner, activation = _linear(x, layer.mlp_in), ACTIVATIONS[spec.activation]
    if not spec.is_gated:
        return _linear(activation(inner), layer.mlp_out)
    gate, up = inner.chunk(2, dim=-1)
    return _linear(activation(gate) * up, layer.mlp_out)


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def _norm(x: Tensor, norm: Norm) -> Tensor:
    if not norm.weight.numel():
        return x
    weight = norm.weight.double() + norm.offset
    if norm.bias is None:
        return functional.rms_norm(x, weight.shape, weight, norm.eps)
    return functional.layer_norm(x, weight.shape, weight, norm.bias.double(), norm.eps)


def _linear(x: Tensor, product: Any) -> Tensor:
    return functional.linear(x, product.weight.double(), None if product.bias is None else product.bias.double())
