"""The forward pass of a decoder on Triton kernels, as its spec describes it. The caller owns the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.architecture.rank_part import RankPart
from penstock.gpu_node.model.architecture.recurrent import DeltaRule
from penstock.gpu_node.model.architecture.rope import Rope
from penstock.gpu_node.model.architecture.spec import Attention, LayerSpec, ModelSpec
from penstock.gpu_node.model.gpu.adapters import NOT_ADAPTED, AdaptedTiles
from penstock.gpu_node.model.gpu.experts import GpuExperts, activated, clamp_of, scale_halves
from penstock.gpu_node.model.gpu.inputs import StepInputs
from penstock.gpu_node.model.gpu.linear import EmbeddingTable, ScaledLinear
from penstock.gpu_node.model.gpu.recurrent import StatePool, head_gates_of, mix
from penstock.gpu_node.model.protocol import MatrixName
from penstock.gpu_node.model.torch_common.layers import DecoderWeights, LayerWeights, MixtureWeights, Norm, Product
from penstock.gpu_node.model.torch_common.positions import alibi_biases, query_factors, rope_angles
from penstock.gpu_node.model.torch_common.ranks import ONE_RANK, Communicator
from penstock.kernels.arguments import Addend, PagedCache, StateRows
from penstock.kernels.triton.decode_attention import decode_attention
from penstock.kernels.triton.invariant import multiply_invariant
from penstock.kernels.triton.launches import prefill_rows
from penstock.kernels.triton.layers import bound_logits, embed, rotate_and_store
from penstock.kernels.triton.norms import add_norm, norm_all_heads
from penstock.kernels.triton.prefill_attention import prefill_attention


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRows:
    """Which kernel computes which queries of a step. A backend with one kernel for all of them ignores it."""

    decoding: Tensor
    """[num_decoding] int32: sequences with one query in the step; -1 marks a padding row, which has no output."""
    tiles: Tensor
    """[num_tiles, 2] int32: query tiles of all other sequences, from `prefill_tiles`; sequence -1 marks padding."""
    splits: int
    """The number of parts that each context of a decoding sequence is split into."""
    query_rows: int
    """Queries of a tile."""


class AttentionBackend(Protocol):
    """Computes the attention of a step. Under a CUDA graph it must not wait for the GPU or read tensors on the host."""

    def attend(
        self,
        out: Tensor,
        q: Tensor,
        cache: PagedCache,
        starts: Tensor,
        contexts: Tensor,
        tables: Tensor,
        rows: AttentionRows,
        *,
        scale: float,
        window: int | None,
        biases: Tensor | None,
        cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Write each query's attention over its paged context to its row of `out`; causal within a sequence.

        q, out: [num_tokens, num_heads, head_dim].
        starts: [num_seqs + 1], first query of each sequence.
        contexts: [num_seqs], tokens in the cache, the step's included. A padding sequence has no query and context 0.
        tables: [num_seqs, max_blocks].
        window: tokens that a query sees, itself included; None: all.
        biases: [num_heads, num_positions] float32, added to scaled scores by the key's position.
        cap: of scaled scores, before biases: a score s becomes cap * tanh(s / cap).
        sinks: [num_heads] float32, a score of each head that takes a share of the attention and has no value.
        """


class TritonAttention:
    """The default: one kernel for decode rows, one for prefill chunks."""

    def attend(
        self,
        out: Tensor,
        q: Tensor,
        cache: PagedCache,
        starts: Tensor,
        contexts: Tensor,
        tables: Tensor,
        rows: AttentionRows,
        *,
        scale: float,
        window: int | None,
        biases: Tensor | None,
        cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Implement `AttentionBackend.attend`."""
        given = out, q, cache, starts, contexts, tables
        rules: dict[str, Any] = {"scale": scale, "window": window or 0, "biases": biases, "cap": cap, "sinks": sinks}
        if len(rows.decoding):
            decode_attention(*given, rows.decoding, rows.splits, **rules)
        if len(rows.tiles):
            prefill_attention(*given, rows.tiles, **rules, rows=rows.query_rows)


_Matrix: TypeAlias = tuple[int, MatrixName, Product]
"""A layer, the name of one of its matrices, and the matrix."""


@dataclass(frozen=True, slots=True)
class GpuWeights(DecoderWeights):
    """The weights of a decoder on a GPU, whose kernels read the embedding table themselves."""

    embedding: EmbeddingTable
    experts: Sequence[GpuExperts | None] = ()
    """By layer; None where it has none. Empty: no layer has any. Without a mixture beside an MLP, their `LayerWeights`
    have no MLP."""


class _Mixed(NamedTuple):
    """What the mixers of a layer have computed for some tokens, before it is projected."""

    by_matrix: dict[MatrixName, Tensor]
    normed: Tensor | None
    """The rows that they read, where an MLP reads them, too."""


class GpuDecoder:
    """A model's weights and its forward pass."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: GpuWeights,
        num_positions: int,
        attention: AttentionBackend | None = None,
        part: RankPart | None = None,
        ranks: Communicator = ONE_RANK,
    ) -> None:
        """spec: of the part that this rank computes; attention: None for Triton's kernels.

        part: None for the whole model; ranks: the ranks that compute it together.
        """
        self._attention: AttentionBackend = attention or TritonAttention()
        self.part = part or RankPart(spec)
        self._ranks = ranks
        self._first_row = self.part.vocab.start if self.part.size > 1 else None
        self.spec = spec
        self.num_positions = num_positions
        self._weights = weights
        device = weights.device
        self._layers = spec.layers
        counts = accumulate((layer.attention is not None for layer in spec.layers), initial=0)
        self._cache_at = tuple(counts)[: spec.num_layers]
        """By layer: how many caches the layers before it have."""
        # A tile that fits the widest heads fits all.
        self.query_rows = prefill_rows(max(one.head_dim for one in spec.attentions), weights.dtype, device)
        """Queries per tile of prefill attention, for `pack_step`."""
        self.num_kv_heads = max(one.num_kv_heads for one in spec.attentions)
        """Of the layer with the most."""
        self._angles = {rope: _angles(rope, num_positions, device) for rope in {one.rope for one in spec.attentions}}
        self._growths = {
            growth: torch.from_numpy(query_factors(growth, num_positions)).to(device, weights.dtype)
            for growth in spec.query_growths
        }
        self._biases, biased = None, self.part.whole.biased_attention
        if biased is not None:
            heads, biases = self.part.heads(biased), alibi_biases(biased, num_positions)
            self._biases = torch.from_numpy(biases[heads.start : heads.stop]).to(device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and logits."""
        return self._weights.dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, [len(hidden), vocab]: a view without those of the head's padding."""
        spec, outputs = self.spec, self._weights.head(hidden)
        # Each rank has its part of the vocabulary.
        gathered = self._ranks.all_gather(outputs).view(self._ranks.size, *outputs.shape)
        logits = gathered.transpose(0, 1).reshape(len(outputs), -1)
        if spec.logit_scale != 1 or spec.logit_cap is not None:
            bound_logits(logits, spec.logit_scale, spec.logit_cap)
        return logits[:, : spec.vocab_size]

    def hidden(
        self,
        step: StepInputs[Tensor],
        sampled: Tensor,
        layers: list[PagedCache],
        splits: int,
        adapted: AdaptedTiles = NOT_ADAPTED,
        states: StatePool | None = None,
    ) -> Tensor:
        """Store the step's keys, values and states; return the hidden states of its sampling tokens, normed.

        sampled: the tokens that the rows of the previous step sampled; layers: the caches of those with attention;
        splits: the number of parts that each context of a decoding sequence is split into.
        """
        spec, weights = self.spec, self._weights
        # The residual stream stays in float32, as the torch runner's does.
        table = weights.embedding.weight
        embedded = embed(step.token_ids, sampled, table, spec.embedding_scale, self._first_row)
        residual = self._ranks.sum(embedded)
        if weights.positions is not None:
            residual = residual + weights.positions[step.positions].float()
        delta: Addend | None = None
        slots = step.slots
        for i, layer in enumerate(weights.layers):
            spec_of_layer, mixed = self._layers[i], _Mixed({}, None)
            if spec_of_layer.mixer is not None:
                matrix: _Matrix = i, "qkv", layer.qkv
                normed, projected = self._normed_product(residual, delta, layer.attention_norm, matrix, adapted)
                delta, mixed = None, self._mixed(step, normed, projected, layers, layer, i, splits, states, adapted)
            if i == spec.num_layers - 1:
                # After the last attention, only the wanted tokens need the rest of the layer.
                residual, delta, mixed = _at_samples(step.sampling, residual, delta, mixed)
                adapted = adapted.at_samples()
                slots = slots if self._experts_of(i) is None else slots[step.sampling]
            delta = self._after_mixers(residual, delta, mixed, i, layer, adapted, slots)
        return add_norm(residual, delta, weights.final_norm)

    def _mixed(
        self,
        step: StepInputs[Tensor],
        normed: Tensor | None,
        projected: Tensor,
        caches: list[PagedCache],
        layer: LayerWeights,
        at: int,
        splits: int,
        states: StatePool | None,
        adapted: AdaptedTiles,
    ) -> _Mixed:
        """Compute the mixers of layer `at`, and store its keys, values and states.

        normed: [num_tokens, hidden]; projected: its product with the mixers' first matrix.
        """
        spec, by_matrix = self._layers[at], dict[MatrixName, Tensor]()
        if spec.attention is not None:
            first = sum(rows for _, rows in spec.attention.input_parts)
            own, projected = projected[:, :first], projected[:, first:]
            by_matrix["out"] = self._attended(step, own, normed, caches[self._cache_at[at]], layer, at, splits)
        if spec.recurrence is not None:
            held = None if states is None else states.layers[at]
            if held is None or layer.recurrence is None:
                raise InvariantError(f"layer {at} has no states")
            gates = None if normed is None else head_gates_of(layer.recurrence, normed)
            if normed is not None and gates is not None:
                adapted.add(at, "gates", normed, gates)
            rows = mix(spec.recurrence, layer.recurrence, gates, projected, held, _state_rows(step))
            by_matrix["mixer_out" if by_matrix else "out"] = rows
        return _Mixed(by_matrix, normed if spec.parallel_residual else None)

    def _attended(
        self,
        step: StepInputs[Tensor],
        projected: Tensor,
        normed: Tensor | None,
        cache: PagedCache,
        layer: LayerWeights,
        at: int,
        splits: int,
    ) -> Tensor:
        """Return the outputs of the attention of layer `at`, [num_tokens, queries], with their gates and factor."""
        spec, gates = self._attention_of(at), None
        if spec.output_gate:
            # Each head of the queries has a gate behind it.
            heads = projected.view(len(projected), -1, spec.head_dim)
            gates, first_key = heads[:, 1 : 2 * spec.num_heads : 2], 2 * spec.num_heads
            projected = torch.cat((heads[:, :first_key:2], heads[:, first_key:]), dim=1).flatten(1)
        attended = self._attend(step, projected, cache, layer, at, splits)
        if layer.head_gate is not None:
            if normed is None:
                raise InvariantError(f"the gates of the heads of layer {at} have nothing to read")
            gates = multiply_invariant(normed.float(), layer.head_gate, None).unsqueeze(-1)
        if gates is not None:
            attended = attended * torch.sigmoid(gates).to(attended.dtype)
        if spec.output_factor != 1:
            attended = attended * spec.output_factor
        return attended.flatten(1)

    def _attention_of(self, at: int) -> Attention:
        attention = self._layers[at].attention
        if attention is None:
            raise InvariantError(f"layer {at} has no attention")
        return attention

    def _attend(
        self, step: StepInputs[Tensor], qkv: Tensor, cache: PagedCache, layer: LayerWeights, at: int, splits: int
    ) -> Tensor:
        """Return the attention of layer `at`, [num_tokens, num_heads, head_dim]."""
        spec, attention = self.spec, self._attention_of(at)
        options: dict[str, Any] = {"offset": spec.norm_offset, "value_norm": attention.value_norm}
        if layer.head_norms is not None:
            q_norm, k_norm = layer.head_norms
            if attention.joint_head_norms:
                self._norm_all_heads(qkv, q_norm, k_norm)
            else:
                options |= {"q_norm": q_norm.weight, "k_norm": k_norm.weight}
        angles = step.positions, step.slots, *self._angles[attention.rope]
        q = rotate_and_store(qkv, cache, *angles, eps=spec.norm_eps, **options)
        if (growth := attention.query_growth) is not None:
            q = q * self._growths[growth][step.positions].view(-1, 1, 1)
        out = torch.empty_like(q)
        self._attention.attend(
            *(out, q, cache, step.query_starts, step.context_lens, step.block_tables),
            AttentionRows(step.decoding, step.tiles, splits, self.query_rows),
            scale=attention.scale,
            window=attention.window,
            biases=self._biases if attention.has_position_biases else None,
            cap=attention.score_cap,
            sinks=layer.sinks,
        )
        return out

    def _norm_all_heads(self, qkv: Tensor, q_norm: Norm, k_norm: Norm) -> None:
        """Norm each token's queries of all ranks as one vector, and its keys, in place."""
        if self._ranks.size == 1:
            norm_all_heads(qkv, q_norm, k_norm)
            return
        queries, keys, _ = qkv.tensor_split((len(q_norm.weight), len(q_norm.weight) + len(k_norm.weight)), dim=1)
        squares = torch.stack([x.float().square().mean(dim=-1) for x in (queries, keys)], dim=-1)
        means = self._ranks.sum(squares) / self._ranks.size
        queries.copy_(q_norm.of_mean_square(queries, means[:, :1]))
        keys.copy_(k_norm.of_mean_square(keys, means[:, 1:]))

    def _normed_product(
        self, residual: Tensor, delta: Addend | None, norm: Norm, matrix: _Matrix, adapted: AdaptedTiles
    ) -> tuple[Tensor | None, Tensor]:
        """Add `delta` to `residual`; return its norm, or None where nothing else reads it, and the norm's product."""
        at, name, product = matrix
        is_read = self._layers[at].parallel_residual or (name == "qkv" and _reads_normed(self._layers[at]))
        if isinstance(product, ScaledLinear) and adapted.tiles is None and not is_read:
            return None, product.of_normed(residual, delta, norm)
        normed = add_norm(residual, delta, norm)
        return normed, adapted.add(at, name, normed, product(normed))

    def _after_mixers(
        self,
        residual: Tensor,
        delta: Addend | None,
        mixed: _Mixed,
        at: int,
        layer: LayerWeights,
        adapted: AdaptedTiles,
        slots: Tensor,
    ) -> Addend | None:
        """Compute the rest of a layer; return what remains to be added to the residual stream.

        delta: what remained before. Without a parallel residual, all before the MLP is added to `residual` in place.
        slots: of the rows; those of padding are negative.
        """
        spec, scale = self._layers[at], self.spec.residual_scale
        parts = [
            adapted.add(at, matrix, rows, layer.out(rows) if matrix == "out" else layer.mixer_out(rows))
            for matrix, rows in mixed.by_matrix.items()
        ]
        added = None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]
        if spec.parallel_residual and added is not None:
            normed = mixed.normed
            if normed is None or layer.mlp_norm is not layer.attention_norm:
                normed = add_norm(residual, None, layer.mlp_norm)
            inner = adapted.add(at, "mlp_in", normed, layer.mlp_in(normed))
            return Addend(self._ranks.sum(added + self._mlp(inner, at, layer, adapted)), None, scale)
        if added is not None:
            delta = Addend(self._ranks.sum(added), layer.post_attention_norm, scale)
        if spec.mlp is None:
            return delta
        experts = self._experts_of(at)
        if experts is not None and layer.mixture is None:
            normed = add_norm(residual, delta, layer.mlp_norm)
            outputs = self._ranks.sum(experts.mix(normed, residual, slots, self._ranks))
        else:
            matrix: _Matrix = at, "mlp_in", layer.mlp_in
            _, inner = self._normed_product(residual, delta, layer.mlp_norm, matrix, adapted)
            outputs = self._ranks.sum(self._mlp(inner, at, layer, adapted))
        if layer.mixture is not None and experts is not None:
            outputs = self._beside(outputs, residual, layer.mixture, experts, slots)
        if layer.output_scale is not None:
            # The norm of what is added has this factor already.
            residual *= layer.output_scale
        return Addend(outputs, layer.post_mlp_norm, scale)

    def _beside(
        self, outputs: Tensor, residual: Tensor, mixture: MixtureWeights, experts: GpuExperts, slots: Tensor
    ) -> Tensor:
        """Return the normed outputs of a layer's MLP plus those of the mixture of experts beside it."""
        routed = experts.mix(add_norm(residual, None, mixture.norm), residual, slots, self._ranks)
        dense, others = add_norm(outputs.float(), None, mixture.dense_norm), add_norm(routed, None, mixture.output_norm)
        return dense.float() + others.float()

    def _experts_of(self, at: int) -> GpuExperts | None:
        return self._weights.experts[at] if self._weights.experts else None

    def _mlp(self, inner: Tensor, at: int, layer: LayerWeights, adapted: AdaptedTiles) -> Tensor:
        """Return the MLP's output. inner: the product with its first matrix."""
        mlp, product = self._layers[at].mlp, layer.mlp_out
        if mlp is None:
            raise InvariantError(f"layer {at} has no MLP")
        if isinstance(product, ScaledLinear) and adapted.tiles is None:
            scale_halves(inner, mlp)
            return product.of_activated(inner, mlp.activation, gated=mlp.is_gated, clamp=clamp_of(mlp))
        gated = activated(inner, mlp)
        return adapted.add(at, "mlp_out", gated, product(gated))


def _reads_normed(layer: LayerSpec) -> bool:
    """Return whether gates of a layer's mixers read the normed rows beside the first matrix."""
    has_head_gate = layer.attention is not None and layer.attention.head_gate is not None
    return has_head_gate or isinstance(layer.recurrence, DeltaRule)


def _state_rows(step: StepInputs[Tensor]) -> StateRows:
    of_seqs = step.query_starts, step.state_reads, step.state_writes
    return StateRows(step.owners, *of_seqs, step.save_starts, step.state_saves)


def _at_samples(
    samples: Tensor, residual: Tensor, delta: Addend | None, mixed: _Mixed
) -> tuple[Tensor, Addend | None, _Mixed]:
    """Return the rows of the wanted tokens."""
    by_matrix = {matrix: rows[samples] for matrix, rows in mixed.by_matrix.items()}
    normed = None if mixed.normed is None else mixed.normed[samples]
    left = None if delta is None else replace(delta, rows=delta.rows[samples])
    return residual[samples], left, _Mixed(by_matrix, normed)


def _angles(rope: Rope | None, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines by position, each [num_positions, rope.dim / 2]; of width 0 without RoPE."""
    if rope is None:
        nothing = torch.zeros(num_positions, 0, device=device)
        return nothing, nothing
    cos, sin = (torch.from_numpy(table).to(device) for table in rope_angles(rope, num_positions))
    return cos, sin
