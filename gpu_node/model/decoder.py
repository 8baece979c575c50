"""The forward pass of a decoder over one packed step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock.gpu_node.model.attention import KvCache, PagedAttention
from penstock.gpu_node.model.protocol import StepPlan
from penstock.gpu_node.model.rope import rope_angles
from penstock.gpu_node.model.spec import ModelSpec
from penstock.gpu_node.model.weights import DecoderWeights, LayerWeights


class Decoder:
    """A model's weights and the arithmetic over them; the caller owns the caches."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, num_positions: int) -> None:
        self._spec = spec
        self._weights = weights
        # Both halves of a head turn by the same angles.
        self._cos, self._sin = (
            torch.from_numpy(table).repeat(1, 2).to(weights.embedding.dtype)
            for table in rope_angles(spec, num_positions)
        )

    def logits(self, plan: StepPlan, caches: list[KvCache], attention: PagedAttention) -> Tensor:
        """Store the step's keys and values; the logits of its sampling rows, [num_samples, vocab] in float32."""
        groups, slots = attention.groups(plan), attention.slots(plan)
        positions = torch.from_numpy(plan.positions)
        sampling = torch.from_numpy(plan.query_starts[plan.sample_seqs + 1] - 1)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        # The residual stream stays in float32: rounded after each layer, SmolLM2's bfloat16 logits err twice as much.
        x = functional.embedding(torch.from_numpy(plan.token_ids), self._weights.embedding).float()
        for layer, cache in zip(self._weights.layers, caches, strict=True):
            q, k, v = self._qkv(x, layer, cos, sin)
            cache.store(k, v, slots)
            attended = attention.attend(q, cache, groups)
            if layer is self._weights.layers[-1]:
                # Behind the last attention a token matters only where something is sampled from it.
                x, attended = x[sampling], attended[sampling]
            x += layer.o(attended.flatten(1))
            x += self._mlp(x, layer)
        return self._weights.head(self._norm(x, self._weights.final_norm)).float()

    def _qkv(self, x: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [num_tokens, num_heads, head_dim], keys and values [num_tokens, num_kv_heads, head_dim]."""
        spec = self._spec
        fused = layer.qkv(self._norm(x, layer.attention_norm)).view(len(x), -1, spec.head_dim)
        num_rotated = spec.num_heads + spec.num_kv_heads
        rotated = _rotate(fused[:, :num_rotated], cos, sin)
        return rotated[:, : spec.num_heads].contiguous(), rotated[:, spec.num_heads :], fused[:, num_rotated:]

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(functional.silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, eps=self._spec.norm_eps).to(weight.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of each token. x: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, 1, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin
