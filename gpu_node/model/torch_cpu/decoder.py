"""The forward pass of a decoder over one packed step, with the LoRA adapters of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Self, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.architecture.mlp import Activation, Experts, Mlp
from penstock.gpu_node.model.architecture.rank_part import RankPart
from penstock.gpu_node.model.architecture.rope import Rope
from penstock.gpu_node.model.architecture.spec import Attention, LayerSpec, ModelSpec, QueryGrowth
from penstock.gpu_node.model.protocol import NO_ADAPTER, Adapter, LowRank, MatrixName, StepPlan
from penstock.gpu_node.model.torch_common.exchanges import Exchanges, PlannedExchange
from penstock.gpu_node.model.torch_common.layers import (
    DecoderWeights,
    HeadWeights,
    LayerWeights,
    Norm,
    RecurrentWeights,
    TokenGateWeights,
)
from penstock.gpu_node.model.torch_common.positions import query_factors, rope_angles
from penstock.gpu_node.model.torch_cpu.attention import AttentionGroup, KvCache, PagedAttention
from penstock.gpu_node.model.torch_cpu.recurrent import RecurrentLayers, StateSteps


@dataclass(frozen=True, slots=True)
class _Part:
    """A low-rank term that is added to the outputs from `first` on. down: [rank, in]; up: [rows, rank]."""

    first: int
    down: Tensor
    up: Tensor


_Weights: TypeAlias = dict[tuple[int, MatrixName], tuple[_Part, ...]]


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The adapter of each row of a step."""

    groups: tuple[tuple[_Weights, Tensor], ...]

    def add(self, layer: int, matrix: MatrixName, x: Tensor, out: Tensor) -> Tensor:
        """Add the adapters' products to the rows that have one, in place. x: [rows, in]; out: [rows, out]."""
        for weights, rows in self.groups:
            for part in weights.get((layer, matrix), ()):
                more = (x[rows] @ part.down.T) @ part.up.T
                out[rows, part.first : part.first + len(part.up)] += more
        return out

    def at(self, tokens: Tensor) -> Self:
        """Return the adapters of only the given tokens, [num_tokens]."""
        left = ((weights, torch.isin(tokens, rows).nonzero().flatten()) for weights, rows in self.groups)
        return type(self)(tuple(left))


class TorchAdapters:
    """The adapters that are loaded into a runner's adapter slots."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        """spec: of the rank's part."""
        self._spec = spec
        self._dtype = dtype
        self._weights: dict[int, _Weights] = {}

    def set(self, adapter_slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot."""
        self._weights[adapter_slot] = {
            (at, matrix): tuple(self._part(layer, matrix, part) for part in adapter.low_ranks(at, matrix))
            for at, layer in enumerate(self._spec.layers)
            for matrix in layer.adapted_matrices
        }

    def rows_of(self, plan: StepPlan) -> AdaptedRows:
        """Return the adapter of each row of a step."""
        if plan.adapters is None:
            return AdaptedRows(())
        slots = np.repeat(plan.adapters, np.diff(plan.query_starts))
        present = sorted({*slots.tolist()} - {NO_ADAPTER})
        return AdaptedRows(tuple((self._weights[at], torch.from_numpy(np.flatnonzero(slots == at))) for at in present))

    def _part(self, layer: LayerSpec, matrix: MatrixName, part: LowRank) -> _Part:
        firsts = list(accumulate((rows for _, rows in self._spec.parts_of(layer, matrix)), initial=0))
        return _Part(firsts[part.part], *(torch.from_numpy(half).to(self._dtype) for half in (part.down, part.up)))


_HALF_IN_SQUARE = 0.5**0.5
_SHARES_EPS = 1e-6
"""Added to the sum by which sigmoid shares are divided."""
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}


@dataclass(frozen=True, slots=True)
class _Step:
    """What the layers of a step share."""

    attention: PagedAttention
    caches: list[KvCache | None]
    groups: list[AttentionGroup]
    slots: Mapping[int, Tensor]
    begun: list[int]
    states: StateSteps | None
    growths: Mapping[QueryGrowth, Tensor]
    angles: Mapping[Rope, tuple[Tensor, ...]]


class Decoder:
    """A model's weights, its recurrent states and its forward pass. The caller owns the KV caches."""

    def __init__(
        self,
        part: RankPart,
        weights: DecoderWeights,
        num_positions: int,
        exchanges: Exchanges | None = None,
        *,
        state_slots: int = 0,
    ) -> None:
        """exchanges: with the other ranks, None for one rank."""
        spec = part.spec
        self.exchanges = exchanges or Exchanges()
        self._part = part
        self._spec = spec
        self._weights = weights
        self.adapters = TorchAdapters(spec, weights.dtype)
        self.recurrent = RecurrentLayers.of(spec, state_slots)
        self._growths = {
            growth: torch.from_numpy(query_factors(growth, num_positions)).to(weights.dtype)
            for growth in spec.query_growths
        }
        self._rotations = {rope: _rotation(rope, num_positions, weights.dtype) for rope in spec.ropes}

    def outputs(self, hidden: Tensor) -> Tensor:
        """Return this rank's outputs of the head, [len(hidden), its part of the vocabulary] in float32."""
        return self._weights.head(hidden).float()

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits of the outputs of all ranks, [num_rows, vocab]."""
        spec, logits = self._spec, outputs[:, : self._spec.vocab_size] * self._spec.logit_scale
        return logits if spec.logit_cap is None else spec.logit_cap * torch.tanh(logits / spec.logit_cap)

    def planned_exchanges(self, num_tokens: int, num_wanted: int) -> list[PlannedExchange]:
        """Return the exchanges of `hidden` in order, for a step of `num_tokens`, of which `num_wanted` are wanted."""
        spec = self._spec
        planned = [PlannedExchange("sum" if self._part.is_first else "receive", num_tokens, spec.hidden_size)]
        for i, layer in enumerate(spec.layers):
            rows = num_wanted if self._is_end(i) else num_tokens
            if layer.attention is not None:
                if layer.attention.joint_head_norms:
                    planned.append(PlannedExchange("sum", num_tokens, 2))
                planned.append(PlannedExchange("sum", rows, spec.hidden_size))
            if layer.mlp is not None:
                if layer.mlp.experts is not None:
                    planned.append(PlannedExchange("from_first", rows, layer.mlp.experts.count))
                planned.append(PlannedExchange("sum", rows, spec.hidden_size))
        return planned if self._part.is_last else [*planned, PlannedExchange("send", num_tokens, spec.hidden_size)]

    def hidden(
        self, plan: StepPlan, caches: list[KvCache | None], attention: PagedAttention, tokens: Tensor
    ) -> Tensor | None:
        """Store the step's keys and values and return the hidden states of `tokens` after the final norm.

        caches: of each layer, None without attention; tokens: indices of the step's tokens. A stage before the last one
        returns None.
        """
        adapted = self.adapters.rows_of(plan)
        step = self._step_of(plan, caches, attention)
        # The residual stream stays in float32: rounding it per layer doubles the error of SmolLM2's bfloat16 logits.
        x = self._first_residual(plan)
        own = self._token_inputs(x, plan)
        for i, (spec, layer) in enumerate(zip(self._spec.layers, self._weights.layers, strict=True)):
            mixed = self._mixed(x, i, spec, layer, step, adapted)
            if self._is_end(i):
                # After the last attention, only the wanted tokens need the rest of the layer.
                x, adapted, own = x[tokens], adapted.at(tokens), None if own is None else own[tokens]
                mixed = {matrix: rows[tokens] for matrix, rows in mixed.items()}
            x = self._after_mixers(x, mixed, i, spec, layer, adapted)
            if own is not None and layer.token_gate is not None:
                x = x + _of_token(x, own[:, i], spec, layer.token_gate)
            if layer.output_scale is not None:
                x = x * layer.output_scale
        if self._part.is_last:
            return self._weights.final_norm(x)
        self.exchanges.to_next_stage(x)
        return None

    def _step_of(self, plan: StepPlan, caches: list[KvCache | None], attention: PagedAttention) -> _Step:
        positions = torch.from_numpy(plan.positions)
        slots, begun = attention.targets(plan)
        return _Step(
            attention,
            caches,
            attention.groups(plan),
            slots,
            begun,
            self.recurrent.steps_of(plan),
            {growth: table[positions].view(-1, 1, 1) for growth, table in self._growths.items()},
            {
                rope: tuple(table[positions].unsqueeze(1) for table in tables)
                for rope, tables in self._rotations.items()
            },
        )

    def _mixed(
        self, x: Tensor, at: int, spec: LayerSpec, layer: LayerWeights, step: _Step, adapted: AdaptedRows
    ) -> dict[MatrixName, Tensor]:
        """Return the outputs of a layer's mixers by the matrix that projects them; continue keys, values and states."""
        if spec.mixer is None:
            return {}
        normed, mixed = layer.attention_norm(x), dict[MatrixName, Tensor]()
        projected = adapted.add(at, "qkv", normed, layer.qkv(normed))
        if spec.attention is not None:
            first = sum(rows for _, rows in spec.attention.input_parts)
            own, projected = projected[:, :first], projected[:, first:]
            mixed["out"] = self._attended(own, normed, at, spec.attention, layer, step)
        if spec.recurrence is not None and layer.recurrence is not None and step.states is not None:
            gates = self._gates(at, layer.recurrence, normed, adapted)
            rows = self.recurrent.mix(at, spec.recurrence, layer.recurrence, gates, projected, step.states)
            mixed["mixer_out" if mixed else "out"] = rows.to(normed.dtype)
        return mixed

    @staticmethod
    def _gates(at: int, weights: RecurrentWeights, normed: Tensor, adapted: AdaptedRows) -> Tensor | None:
        """Return the gates of a delta rule's value heads before their functions, [num_tokens, 2 * value heads]."""
        if not isinstance(weights.heads, HeadWeights):
            return None
        return adapted.add(at, "gates", normed, normed.float() @ weights.heads.gates.T)

    def _attended(
        self, projected: Tensor, normed: Tensor, at: int, spec: Attention, layer: LayerWeights, step: _Step
    ) -> Tensor:
        """Store the keys and values of a layer, and return what its queries see.

        normed: [num_tokens, hidden]; projected: its product with the attention's first matrix.
        """
        angles = None if spec.rope is None else step.angles[spec.rope]
        q, gates, k, v = self._qkv(projected, spec, layer, angles)
        if (growth := spec.query_growth) is not None:
            q = q * step.growths[growth]
        cache = step.caches[at if spec.source is None else spec.source]
        if cache is None:
            raise InvariantError(f"layer {at} has no keys to attend to")
        if spec.source is None:
            if step.begun:
                cache.zero(step.begun)
            cache.store(k, v, step.slots[spec.num_kv_heads])
        attended = step.attention.attend(q, cache, step.groups, spec, layer.sinks)
        if gates is None and layer.head_gate is not None:
            gates = (normed.float() @ layer.head_gate.T).unsqueeze(-1)
        attended = attended if gates is None else attended * torch.sigmoid(gates).to(attended.dtype)
        return attended if spec.output_factor == 1 else attended * spec.output_factor

    def _first_residual(self, plan: StepPlan) -> Tensor:
        if not self._part.is_first:
            return self.exchanges.from_stage_before(len(plan.token_ids), self._spec.hidden_size)
        embedded = self.exchanges.sum(self._weights.embedding(torch.from_numpy(plan.token_ids)))
        scaled = embedded.float() * self._spec.embedding_scale
        vectors = self._weights.positions
        return scaled if vectors is None else scaled + vectors[torch.from_numpy(plan.positions)].float()

    def _token_inputs(self, x: Tensor, plan: StepPlan) -> Tensor | None:
        """Return the embeddings of the step's tokens for each layer, [num_tokens, layers, size], in float32.

        x: what enters the first layer. None if the model has no such embeddings.
        """
        spec, weights = self._spec.token_inputs, self._weights.token_inputs
        if spec is None or weights is None:
            return None
        shape = len(x), self._spec.num_layers, spec.size
        projected = weights.projection(x.to(self._weights.dtype)).float() * spec.projection_scale
        embedded = weights.rows(torch.from_numpy(plan.token_ids)).float() * spec.scale
        return (weights.norm(projected.view(shape)).float() + embedded.view(shape)) * _HALF_IN_SQUARE

    def _is_end(self, layer: int) -> bool:
        """Return whether a layer is the model's last one."""
        return self._part.is_last and layer == self._spec.num_layers - 1

    def _qkv(
        self, projected: Tensor, spec: Attention, layer: LayerWeights, angles: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return queries and their output gates, keys and values.

        Queries and gates: [num_tokens, num_heads, head_dim]; the others: [num_tokens, num_kv_heads, head_dim], or
        without heads if the layer reads those of another one.
        """
        gates, fused = None, projected.reshape(len(projected), -1, spec.head_dim)
        first_key = spec.query_rows // spec.head_dim
        q, k, v = fused.tensor_split((first_key, first_key + spec.projected_keys // spec.head_dim), dim=1)
        if spec.value_norm:
            v = functional.rms_norm(v.float(), (spec.head_dim,), eps=self._spec.norm_eps).to(v.dtype)
        if spec.output_gate:
            q, gates = q[:, ::2], q[:, 1::2]
        if layer.head_norms is not None:
            q, k = self._normed_heads(q, k, layer.head_norms, is_joint=spec.joint_head_norms)
        if angles is not None:
            q, k = (_rotate(heads, *angles) for heads in (q, k))
        return q.contiguous(), gates, k, v

    def _normed_heads(self, q: Tensor, k: Tensor, norms: tuple[Norm, Norm], *, is_joint: bool) -> tuple[Tensor, Tensor]:
        q_norm, k_norm = norms
        if not is_joint:
            return q_norm(q), k_norm(k)
        # A norm over all heads of a token has the weights of all of them.
        queries, keys = q.flatten(1), k.flatten(1)
        size = self.exchanges.size
        if size == 1:
            return q_norm(queries).view(q.shape), k_norm(keys).view(k.shape)
        squares = torch.stack([x.float().square().mean(dim=-1) for x in (queries, keys)], dim=-1)
        q_mean, k_mean = torch.split(self.exchanges.sum(squares) / size, 1, dim=-1)
        return q_norm.of_mean_square(queries, q_mean).view(q.shape), k_norm.of_mean_square(keys, k_mean).view(k.shape)

    def _after_mixers(
        self,
        x: Tensor,
        mixed: Mapping[MatrixName, Tensor],
        at: int,
        spec: LayerSpec,
        layer: LayerWeights,
        adapted: AdaptedRows,
    ) -> Tensor:
        """Compute the rest of a layer.

        x: its input, [num_tokens, hidden]; mixed: as `_mixed` returns it.
        """
        scale, after = self._spec.residual_scale, x
        for matrix, outputs in mixed.items():
            rows, product = outputs.flatten(1), layer.out if matrix == "out" else layer.mixer_out
            added = self.exchanges.sum(adapted.add(at, matrix, rows, product(rows)))
            after = torch.add(after, _normed(layer.post_attention_norm, added), alpha=scale)
        if spec.mlp is None:
            return after
        read = x if spec.parallel_residual else after
        mlp = self.exchanges.sum(self._mlp(read, at, spec.mlp, layer, adapted))
        if spec.mixture is not None and layer.mixture is not None:
            normed = layer.mixture.norm(read)
            routed = _routed(normed, spec.mixture.mlp, layer, self._scores(read, normed, layer))
            mlp = layer.mixture.dense_norm(mlp).float() + layer.mixture.output_norm(routed).float()
        return torch.add(after, _normed(layer.post_mlp_norm, mlp), alpha=scale)

    def _mlp(self, x: Tensor, at: int, spec: Mlp, layer: LayerWeights, adapted: AdaptedRows) -> Tensor:
        normed = layer.mlp_norm(x)
        if spec.experts is not None:
            return _routed(normed, spec, layer, self._scores(x, normed, layer))
        gated = _gated(adapted.add(at, "mlp_in", normed, layer.mlp_in(normed)), spec)
        return adapted.add(at, "mlp_out", gated, layer.mlp_out(gated))

    def _scores(self, x: Tensor, normed: Tensor, layer: LayerWeights) -> Tensor:
        """Return the router's scores, [num_tokens, num_experts]. normed: what the experts read."""
        if layer.router is None:
            raise InvariantError("a layer has experts but no router")
        read = normed if layer.router_norm is None else layer.router_norm(x)
        return self.exchanges.from_first(layer.router(read).float())


def _of_token(x: Tensor, own: Tensor, spec: LayerSpec, weights: TokenGateWeights) -> Tensor:
    """Return what a layer adds of its tokens' own embeddings. x: [num_tokens, hidden]; own: [num_tokens, size]."""
    if spec.token_gate is None:
        raise InvariantError("a layer has the weights of a gate that its spec does not have")
    dtype = weights.norm.weight.dtype
    gated = _ACTIVATIONS[spec.token_gate.activation](weights.gate(x.to(dtype)).float()) * own
    return weights.norm(weights.out(gated.to(dtype))).float()


def _gated(inner: Tensor, spec: Mlp) -> Tensor:
    activation = _ACTIVATIONS[spec.activation]
    if not spec.is_gated:
        return _times(activation(inner), spec.output_factor)
    gate, up = inner.chunk(2, dim=-1)
    gate = _times(gate, spec.gate_factor)
    if (clamp := spec.clamped_gate) is None:
        return _times(activation(gate) * up, spec.output_factor)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return _times(gate * torch.sigmoid(clamp.slope * gate) * (up + 1), spec.output_factor)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _routed(normed: Tensor, spec: Mlp, layer: LayerWeights, scores: Tensor) -> Tensor:
    """Add the outputs of each token's experts. scores: [num_tokens, num_experts]."""
    experts = spec.experts
    if experts is None:
        raise InvariantError("a layer has a router, but its spec has no experts")
    shares, chosen = _chosen(experts, layer, scores)
    if layer.expert_factors is not None:
        shares = shares * layer.expert_factors[chosen]
    if experts.shared is not None:
        every = torch.arange(experts.count, experts.count + experts.num_shared).expand(len(normed), -1)
        gate = torch.ones(len(normed), 1)
        if layer.shared_gate is not None:
            gate = torch.sigmoid(normed.float() @ layer.shared_gate.T)
        shares, chosen = torch.cat((shares, gate.expand(every.shape)), dim=-1), torch.cat((chosen, every), dim=-1)
    out = torch.zeros(normed.shape)
    for index in sorted(set(chosen.flatten().tolist())):
        rows, ranks = (chosen == index).nonzero(as_tuple=True)
        mlp_in, mlp_out = layer.expert(index)
        out[rows] += mlp_out(_gated(mlp_in(normed[rows]), spec)).float() * shares[rows, ranks].unsqueeze(1)
    return out


def _chosen(experts: Experts, layer: LayerWeights, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights and the indices of each token's experts."""
    if not experts.by_sigmoid:
        shares, chosen = torch.softmax(scores, dim=-1).topk(experts.per_token)
        return (shares / shares.sum(dim=-1, keepdim=True) if experts.normalized else shares), chosen
    shares = torch.sigmoid(scores)
    chosen = (shares if layer.choice_bias is None else shares + layer.choice_bias).topk(experts.per_token).indices
    shares = shares.gather(-1, chosen)
    if experts.normalized:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + _SHARES_EPS)
    return shares * experts.scale, chosen


def _rotation(rope: Rope, num_positions: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return cosines and sines by position. Both halves of the rotated channels have the same angles."""
    return tuple(torch.from_numpy(table).repeat(1, 2).to(dtype) for table in rope_angles(rope, num_positions))


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to the first `dim` channels of each head.

    x: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, 1, dim].
    """
    dim = cos.shape[-1]
    channels, half = x[..., :dim], dim // 2
    crossed = torch.cat((-channels[..., half:], channels[..., :half]), dim=-1)
    rotated = channels * cos + crossed * sin
    return rotated if dim == x.shape[-1] else torch.cat((rotated, x[..., dim:]), dim=-1)
