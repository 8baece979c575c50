"""Find a decoder's tensors by their role, independent of their names and of fusion: whole, or the part of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.mlp import Experts, Mlp
from penstock.gpu_node.model.architecture.recurrent import DeltaRule, Parts, ShortConvolution, StateSpace
from penstock.gpu_node.model.architecture.spec import Attention, ModelSpec
from penstock.gpu_node.model.checkpoint.expert_stacks import transposed
from penstock.gpu_node.model.checkpoint.row_orders import gate_orders, halves_orders, input_order, rows_by_part
from penstock.gpu_node.model.checkpoint.stored_kinds import Stored, StoredTensor
from penstock.gpu_node.model.checkpoint.stored_layer import (
    StoredHeads,
    StoredLayer,
    StoredLinear,
    StoredMixture,
    StoredNorm,
    StoredRecurrence,
    StoredRouting,
    StoredScan,
    StoredTokenGate,
    StoredTokenInputs,
)
from penstock.gpu_node.model.checkpoint.stored_tensors import Checkpoint
from penstock.gpu_node.model.protocol import MatrixName


class DecoderTensors:
    """Finds the tensors of a decoder. Methods raise ConfigError for a missing tensor or a shape unlike the config's."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        self._checkpoint = checkpoint
        self._spec = spec

    def fault_in(self, is_enough: Callable[[], bool]) -> None:
        """Map the checkpoint's file pages, until `is_enough`."""
        self._checkpoint.fault_in(is_enough)

    def release(self) -> None:
        """Release the checkpoint's file pages that were read."""
        self._checkpoint.release()

    def embedding(self) -> Stored:
        """Return the token embedding, [vocab, hidden]."""
        return self._table(self._spec.embedding)

    def head(self) -> Stored:
        """Return the LM head, [vocab, hidden]; the embedding if the two are tied."""
        return self.embedding() if self._spec.tied_head else self._table(self._spec.head)

    def position_embedding(self) -> Stored | None:
        """Return the vectors of positions, [max_position, hidden]; None if the model has none."""
        spec, name = self._spec, self._spec.position_embedding
        if name is None:
            return None
        first = 0 if spec.encoder is None else spec.encoder.first_position
        stored = self._checkpoint.get(f"{name}.weight", first + spec.max_position, spec.hidden_size)
        return stored.span(first, first + spec.max_position) if first else stored

    def token_types(self) -> Stored | None:
        """Return the embeddings of types of tokens, [types, hidden]; None if the model has none."""
        encoder = self._spec.encoder
        if encoder is None or encoder.token_types is None:
            return None
        return self._checkpoint.get(f"{encoder.token_types}.weight", encoder.num_token_types, self._spec.hidden_size)

    def embedding_norm(self) -> StoredNorm | None:
        """Return the norm of the sum of a token's embeddings; None if there is none."""
        name = None if self._spec.encoder is None else self._spec.encoder.embedding_norm
        return None if name is None else self._stored_norm(name)

    def final_norm(self) -> StoredNorm:
        """Return the norm of the hidden state before the head."""
        return self._stored_norm(self._spec.final_norm)

    def layer(self, layer: int) -> StoredLayer:
        """Return all tensors of a layer."""
        return StoredLayer(
            attention_norm=self.attention_norm(layer),
            qkv=self.qkv(layer),
            head_norms=self.head_norms(layer),
            out=self.out(layer),
            post_attention_norm=self.post_attention_norm(layer),
            mlp_norm=self.mlp_norm(layer),
            router=self.router(layer),
            experts=tuple(self.experts(layer)),
            post_mlp_norm=self.post_mlp_norm(layer),
            recurrence=self.recurrence(layer),
            routing=self.routing(layer),
            sinks=self.sinks(layer),
            head_gate=self.head_gate(layer),
            mixer_out=self.mixer_out(layer),
            mixture=self.mixture(layer),
            token_gate=self.token_gate(layer),
            output_scale=self.output_scale(layer),
        )

    def attention_norm(self, layer: int) -> StoredNorm | None:
        """Return the norm of the hidden state before the attention; None if there is none."""
        return self._norm(self._spec.layers[layer].attention_norm, layer)

    def sum_norms(self, layer: int) -> tuple[StoredNorm | None, StoredNorm | None]:
        """Return the norms of the hidden state behind the attention and behind the MLP; None where there is none."""
        spec = self._spec.layers[layer]
        return self._norm(spec.attention_sum_norm, layer), self._norm(spec.mlp_sum_norm, layer)

    def post_attention_norm(self, layer: int) -> StoredNorm | None:
        """Return the norm of the attention's output; None if there is none."""
        return self._norm(self._spec.layers[layer].post_attention_norm, layer)

    def mlp_norm(self, layer: int) -> StoredNorm | None:
        """Return the norm of the hidden state before the MLP; None if the MLP shares the attention's norm."""
        return self._norm(self._spec.layers[layer].mlp_norm, layer)

    def post_mlp_norm(self, layer: int) -> StoredNorm | None:
        """Return the norm of the MLP's output; None if there is none."""
        return self._norm(self._spec.layers[layer].post_mlp_norm, layer)

    def head_norms(self, layer: int) -> tuple[Stored, Stored | None] | None:
        """Return the norm weights of queries and keys, of one head or of all heads; None if heads are not normed.

        A layer that reads the keys of another one has none for keys.
        """
        attention, get = self._spec.layers[layer].attention, self._checkpoint.get
        if attention is None or attention.q_norm is None:
            return None
        dim = attention.head_dim
        of_queries, of_keys = (attention.queries, attention.keys) if attention.joint_head_norms else (dim, dim)
        k_norm = None if attention.k_norm is None else get(f"{attention.k_norm.format(layer=layer)}.weight", of_keys)
        return get(f"{attention.q_norm.format(layer=layer)}.weight", of_queries), k_norm

    def token_gate(self, layer: int) -> StoredTokenGate | None:
        """Return what adds a token's own embedding for a layer; None if there is none."""
        gate, inputs, get = self._spec.layers[layer].token_gate, self._spec.token_inputs, self._checkpoint.get
        if gate is None or inputs is None:
            return None
        hidden = self._spec.hidden_size
        return StoredTokenGate(
            StoredLinear((get(f"{gate.gate.format(layer=layer)}.weight", inputs.size, hidden),)),
            StoredLinear((get(f"{gate.out.format(layer=layer)}.weight", hidden, inputs.size),)),
            self._stored_norm(gate.norm.format(layer=layer)),
        )

    def output_scale(self, layer: int) -> Stored | None:
        """Return the factor of the hidden state behind a layer, [1]; None if there is none."""
        name = self._spec.layers[layer].output_scale
        return None if name is None else self._checkpoint.get(name.format(layer=layer), 1)

    def token_inputs(self) -> StoredTokenInputs | None:
        """Return the embeddings of tokens for each layer; None if the model has none."""
        inputs, get = self._spec.token_inputs, self._checkpoint.get
        if inputs is None:
            return None
        width = self._spec.num_layers * inputs.size
        return StoredTokenInputs(
            get(f"{inputs.table}.weight", inputs.vocab_size, width),
            StoredLinear((get(f"{inputs.projection}.weight", width, self._spec.hidden_size),)),
            get(f"{inputs.norm}.weight", inputs.size),
        )

    def sinks(self, layer: int) -> Stored | None:
        """Return the scores of heads that have no value, [num_heads]; None if there are none."""
        attention = self._spec.layers[layer].attention
        if attention is None or attention.sinks is None:
            return None
        return self._checkpoint.get(attention.sinks.format(layer=layer), attention.num_heads)

    def head_gate(self, layer: int) -> Stored | None:
        """Return the matrix of the gates of heads' outputs, [num_heads, hidden]; None if there is none."""
        attention = self._spec.layers[layer].attention
        if attention is None or attention.head_gate is None:
            return None
        name = f"{attention.head_gate.format(layer=layer)}.weight"
        return self._checkpoint.get(name, attention.num_heads, self._spec.hidden_size)

    def qkv(self, layer: int) -> StoredLinear | None:
        """Return queries [num_heads * head_dim, hidden], keys and values [num_kv_heads * head_dim, hidden].

        Of a recurrent mixer: its input projections; of two mixers: all of them. None: the layer has no mixer.
        """
        of_attention, of_recurrence = self._attention_inputs(layer), self._recurrence_inputs(layer)
        if of_attention is None or of_recurrence is None:
            return of_attention or of_recurrence
        if of_attention.biases or of_recurrence.biases:
            raise ConfigError("projections of two mixers in one layer have biases, which is not supported")
        return StoredLinear(of_attention.weights + of_recurrence.weights)

    def _recurrence_inputs(self, layer: int) -> StoredLinear | None:
        mixer = self._spec.layers[layer].recurrence
        if mixer is None:
            return None
        if isinstance(mixer, DeltaRule) and mixer.split_inputs is not None:
            first, second = (f"{name.format(layer=layer)}.weight" for name in mixer.split_inputs)
            hidden, get = self._spec.hidden_size, self._checkpoint.get
            return StoredLinear((get(first, mixer.channels, hidden), get(second, mixer.outputs, hidden)))
        stored = self._linears(mixer.input_parts, self._spec.hidden_size, layer, has_bias=mixer.has_bias)
        if isinstance(mixer, DeltaRule) and mixer.is_fused:
            [fused] = stored.weights
            order = input_order(mixer)
            return StoredLinear((fused.take_rows(order, len(order), *fused.shape[1:]),))
        return stored

    def _attention_inputs(self, layer: int) -> StoredLinear | None:
        attention = self._spec.layers[layer].attention
        if attention is None:
            return None
        stored = self._linears(attention.input_parts, self._spec.hidden_size, layer, has_bias=attention.qkv_bias)
        if attention.interleaved:
            return _in_halves(stored, attention)
        if not attention.is_fused:
            return stored
        parts = rows_by_part(attention)
        return StoredLinear(
            tuple(part for weight in stored.weights for part in _rows_of(weight, parts)),
            tuple(part for bias in stored.biases for part in _rows_of(bias, parts)),
        )

    def out(self, layer: int) -> StoredLinear | None:
        """Return the output projection of the mixer, [hidden, its outputs]; of two, that of the attention.

        None: the layer has no mixer.
        """
        attention, recurrence = self._spec.layers[layer].attention, self._spec.layers[layer].recurrence
        if attention is not None:
            return self._linear("out", layer, has_bias=attention.out_bias)
        return None if recurrence is None else self._linear("out", layer, has_bias=recurrence.has_bias)

    def mixer_out(self, layer: int) -> StoredLinear | None:
        """Return the output projection of a recurrent mixer that stands beside attention; None without one."""
        spec = self._spec.layers[layer]
        if spec.attention is None or spec.recurrence is None:
            return None
        return self._linear("mixer_out", layer, has_bias=spec.recurrence.has_bias)

    def recurrence(self, layer: int) -> StoredRecurrence | None:
        """Return the small tensors of a recurrent mixer; None if the layer has none."""
        mixer, get = self._spec.layers[layer].recurrence, self._checkpoint.get
        if mixer is None:
            return None
        convolution = mixer.convolution.format(layer=layer)
        heads: StoredHeads | StoredScan | None = None
        factors: tuple[tuple[int, float], ...] = ()
        if isinstance(mixer, DeltaRule):
            count = mixer.num_value_heads
            heads = StoredHeads(
                gates=self._gates(mixer, layer),
                decay_log=get(mixer.decay_log.format(layer=layer), count),
                decay_bias=get(mixer.decay_bias.format(layer=layer), count),
                norm=get(f"{mixer.norm.format(layer=layer)}.weight", mixer.value_dim),
            )
        if isinstance(mixer, StateSpace):
            size = mixer.num_groups * mixer.state_size
            factors = tuple(zip((mixer.outputs, size, size), mixer.input_factors[1:4], strict=True))
            norm = None if mixer.norm is None else get(f"{mixer.norm.format(layer=layer)}.weight", mixer.outputs)
            heads = StoredScan(
                duration_bias=get(mixer.duration_bias.format(layer=layer), mixer.num_heads),
                decay_log=get(mixer.decay_log.format(layer=layer), mixer.num_heads),
                skip=get(mixer.skip.format(layer=layer), mixer.num_heads),
                norm=norm,
            )
        return StoredRecurrence(
            convolution=get(f"{convolution}.weight", mixer.channels, 1, mixer.taps),
            bias=get(f"{convolution}.bias", mixer.channels) if mixer.has_convolution_bias else None,
            heads=heads,
            has_rates=not isinstance(mixer, ShortConvolution) and mixer.has_rates,
            factors=factors,
        )

    def _gates(self, mixer: DeltaRule, layer: int) -> tuple[Stored, Stored]:
        """Return the matrices of both gates of a delta rule, [value heads, hidden] each."""
        get, count, hidden = self._checkpoint.get, mixer.num_value_heads, self._spec.hidden_size
        learning, decay = (name.format(layer=layer) for name in (mixer.learning_gate, mixer.decay_gate))
        if learning != decay:
            return get(f"{learning}.weight", count, hidden), get(f"{decay}.weight", count, hidden)
        fused, (order,) = get(f"{learning}.weight", 2 * count, hidden), gate_orders(mixer)
        first, second = (fused.take_rows(rows, count, hidden) for rows in (order[:count], order[count:]))
        return first, second

    def router(self, layer: int) -> Stored | None:
        """Return the matrix that scores the experts, [num_experts, hidden]; None if there are no experts."""
        if (experts := self._routed(layer)) is None:
            return None
        name = experts.router.format(layer=layer)
        return self._checkpoint.get(f"{name}.weight", experts.count, self._spec.hidden_size)

    def _routed(self, layer: int) -> Experts | None:
        """Return the experts of a layer, in place of its MLP or beside it."""
        return next((mlp.experts for mlp in self._spec.layers[layer].mlps if mlp.experts is not None), None)

    def experts(self, layer: int) -> Iterator[tuple[StoredLinear, StoredLinear]]:
        """Yield the input and output projections of each expert, or of the one MLP; nothing without an MLP.

        Inputs are [intermediate, hidden] each: gate and up, or a single one. The output is [hidden, intermediate].
        """
        mlp = self._spec.layers[layer].mlp
        if mlp is not None:
            yield from self._experts_of(mlp, "mlp_in", "mlp_out", layer)
        if mlp is not None and mlp.experts is not None and mlp.experts.num_shared:
            yield from self._shared_experts(layer)

    def mixture(self, layer: int) -> StoredMixture | None:
        """Return the experts beside a layer's MLP, and the norms around both; None without them."""
        mixture = self._spec.layers[layer].mixture
        if mixture is None:
            return None
        return StoredMixture(
            norm=self._stored_norm(mixture.norm.format(layer=layer)),
            output_norm=self._stored_norm(mixture.output_norm.format(layer=layer)),
            dense_norm=self._stored_norm(mixture.dense_norm.format(layer=layer)),
            experts=tuple(self._experts_of(mixture.mlp, "expert_in", "expert_out", layer)),
        )

    def _experts_of(
        self, mlp: Mlp, first: MatrixName, second: MatrixName, layer: int
    ) -> Iterator[tuple[StoredLinear, StoredLinear]]:
        for expert in range(mlp.num_experts - (0 if mlp.experts is None else mlp.experts.num_shared)):
            inner = self._linear(first, layer, has_bias=mlp.bias, expert=expert)
            out = self._linear(second, layer, has_bias=mlp.bias or mlp.out_bias, expert=expert)
            yield (_split_gate(inner, mlp) if mlp.fused_gate and mlp.split_gate is None else inner), out

    def _shared_experts(self, layer: int) -> Iterator[tuple[StoredLinear, StoredLinear]]:
        """Yield the parts of the MLP that every token has, each of an expert's size."""
        mlp, hidden = self._spec.layers[layer].mlp, self._spec.hidden_size
        if mlp is None or mlp.experts is None or (shared := mlp.experts.shared) is None:
            return
        size, get = mlp.intermediate_size, self._checkpoint.get
        whole, names = shared.count * size, [f"{name.format(layer=layer)}.weight" for name in shared.mlp_in]
        rows = 2 * whole if mlp.is_gated else whole
        matrices = [get(name, rows // len(names), hidden) for name in names]
        # A single tensor of a gated MLP has both, the gates first.
        is_fused = mlp.is_gated and len(names) == 1
        inner = [matrices[0].span(0, whole), matrices[0].span(whole, rows)] if is_fused else matrices
        out = get(f"{shared.mlp_out.format(layer=layer)}.weight", hidden, whole)
        for start in range(0, shared.count * size, size):
            parts = tuple(matrix.span(start, start + size) for matrix in inner)
            yield StoredLinear(parts), StoredLinear((out.columns(start, start + size),))

    def routing(self, layer: int) -> StoredRouting | None:
        """Return what a router has beside its matrix; None without experts."""
        experts, get, hidden = self._routed(layer), self._checkpoint.get, self._spec.hidden_size
        if experts is None:
            return None

        def small(name: str | None, size: int) -> Stored | None:
            return None if name is None else get(name.format(layer=layer), size)

        gate = None if experts.shared is None else experts.shared.gate
        return StoredRouting(
            bias=small(f"{experts.router}.bias" if experts.router_bias else None, experts.count),
            choice_bias=small(experts.choice_bias, experts.count),
            shared_gate=None if gate is None else get(f"{gate.format(layer=layer)}.weight", 1, hidden),
            norm=small(experts.router_norm, hidden),
            norm_factor=experts.router_factor,
            factors=small(experts.factors, experts.count),
        )

    def _table(self, name: str) -> Stored:
        return self._checkpoint.get(f"{name}.weight", self._spec.vocab_size, self._spec.hidden_size)

    def _norm(self, name: str | None, layer: int) -> StoredNorm | None:
        return None if name is None else self._stored_norm(name.format(layer=layer))

    def _stored_norm(self, name: str) -> StoredNorm:
        weight = self._checkpoint.get(f"{name}.weight", self._spec.hidden_size)
        if self._spec.norm == "rms":
            return StoredNorm(weight, None)
        if not self._spec.norm_bias:
            zeros = np.zeros((1, self._spec.hidden_size), np.float32)
            return StoredNorm(weight, StoredTensor(f"{name}.bias", "float32", weight.shape, zeros.view(np.uint8)))
        return StoredNorm(weight, self._checkpoint.get(f"{name}.bias", self._spec.hidden_size))

    def _linear(self, matrix: MatrixName, layer: int, *, has_bias: bool, expert: int = 0) -> StoredLinear:
        spec = self._spec.layers[layer]
        columns, parts = self._spec.columns_of(spec, matrix), self._spec.parts_of(spec, matrix)
        if (mlp := spec.mlp_of(matrix)) is not None and mlp.split_gate is not None and matrix.endswith("in"):
            parts = tuple((name, mlp.intermediate_size) for name in mlp.split_gate)
        return self._linears(parts, columns, layer, has_bias=has_bias, expert=expert)

    def _linears(self, named: Parts, columns: int, layer: int, *, has_bias: bool, expert: int = 0) -> StoredLinear:
        parts = [(name.format(layer=layer, expert=expert), rows) for name, rows in named]
        return StoredLinear(
            tuple(self._matrix(f"{name}.weight", rows, columns) for name, rows in parts),
            tuple(self._checkpoint.get(f"{name}.bias", rows) for name, rows in parts if has_bias),
        )

    def _matrix(self, name: str, rows: int, columns: int) -> Stored:
        if not self._spec.transposed:
            return self._checkpoint.get(name, rows, columns)
        stored = self._checkpoint.get(name, columns, rows)
        if not isinstance(stored, StoredTensor):
            raise ConfigError(f"tensor {name} is quantized and stored transposed, which is not supported")
        return transposed(stored, name)


def _in_halves(stored: StoredLinear, attention: Attention) -> StoredLinear:
    """Return queries, keys and values in the order in which the channels of a turned pair lie half a head apart."""
    orders = halves_orders(attention)

    def ordered(parts: tuple[Stored, ...]) -> tuple[Stored, ...]:
        turned = (part.take_rows(order, *part.shape) for part, order in zip(parts, orders, strict=False))
        return *turned, *parts[len(orders) :]

    return StoredLinear(ordered(stored.weights), ordered(stored.biases))


def _split_gate(fused: StoredLinear, mlp: Mlp) -> StoredLinear:
    """Return the gate and up projections of a fused tensor."""
    halves = np.arange(fused.weights[0].shape[0], dtype=np.int32).reshape(2, -1)
    if mlp.up_first:
        halves = halves[::-1]
    return StoredLinear(
        tuple(part for weight in fused.weights for part in _rows_of(weight, halves)),
        tuple(part for bias in fused.biases for part in _rows_of(bias, halves)),
    )


def _rows_of(fused: Stored, parts: Iterable[NDArray[np.int32]]) -> tuple[Stored, ...]:
    """Return the parts of a fused tensor. Consecutive rows of a matrix stay mapped from the file."""
    return tuple(
        fused.span(int(rows[0]), int(rows[-1]) + 1)
        if len(fused.shape) > 1 and (np.diff(rows) == 1).all()
        else fused.take_rows(rows, len(rows), *fused.shape[1:])
        for rows in parts
    )
