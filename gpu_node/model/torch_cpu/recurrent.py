"""Recurrent mixers in plain torch: the states of all slots, and the steps that continue them token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.architecture.recurrent import DeltaRule, Recurrence, ShortConvolution, StateSpace
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.protocol import NO_STATE, StepPlan
from penstock.gpu_node.model.torch_common.layers import HeadWeights, RecurrentWeights, ScanWeights

_NORM_EPS = 1e-6
"""Added to the squared length of queries and keys."""


class LayerStates:
    """The states of one layer, by slot, in float32."""

    def __init__(self, mixer: Recurrence, num_slots: int) -> None:
        # What is never written takes no memory: the system provides the pages at their first use.
        self.inputs = torch.empty(num_slots, mixer.taps - 1, mixer.channels)
        """The inputs of the convolution at the last tokens, the oldest first."""
        self.matrices: Tensor | None = None
        """[num_slots, value heads, key_dim, value_dim] of a delta rule, [num_slots, heads, head_dim, state_size] of a
        state-space mixer."""
        if isinstance(mixer, DeltaRule):
            self.matrices = torch.empty(num_slots, mixer.num_value_heads, mixer.key_dim, mixer.value_dim)
        elif isinstance(mixer, StateSpace):
            self.matrices = torch.empty(num_slots, mixer.num_heads, mixer.head_dim, mixer.state_size)


class StateSteps:
    """Where the tokens of a step find the state before them, and where the states after them go."""

    def __init__(self, plan: StepPlan) -> None:
        states = plan.states
        if states is None:
            raise InvariantError("a step of a model with recurrent layers names no states")
        self.counts = np.diff(plan.query_starts)
        self.starts = plan.query_starts[:-1]
        self._states = states
        has_state = states.reads != NO_STATE
        self.readers = torch.from_numpy(np.flatnonzero(has_state))
        self.reads = torch.from_numpy(states.reads[has_state].astype(np.int64))
        self.writes = torch.from_numpy(states.writes.astype(np.int64))
        self.save_tokens = torch.from_numpy(states.saves[:, 0].astype(np.int64))
        self.save_slots = torch.from_numpy(states.saves[:, 1].astype(np.int64))
        self.last_tokens = torch.from_numpy((plan.query_starts[1:] - 1).astype(np.int64))
        owners = np.searchsorted(plan.query_starts, states.saves[:, 0], side="right") - 1
        self.saves_at: dict[int, list[tuple[int, int]]] = {}
        """The sequences whose state is saved after so many tokens before it in the step, with the slots."""
        for owner, (token, slot) in zip(owners.tolist(), states.saves.tolist(), strict=True):
            self.saves_at.setdefault(token - int(self.starts[owner]), []).append((owner, slot))
        self._windows: dict[int, Tensor] = {}

    def before(self, states: Tensor) -> Tensor:
        """Return the state before each sequence's first token. states: by slot."""
        found = torch.zeros(len(self.counts), *states.shape[1:])
        found[self.readers] = states[self.reads]
        return found

    def windows(self, taps: int) -> Tensor:
        """Return [num_tokens, taps]: the tokens that a token's convolution reads, itself last.

        They are indices into the last `taps - 1` inputs of all sequences before the step, and then the step's own.
        """
        if taps not in self._windows:
            known, owners = taps - 1, np.repeat(np.arange(len(self.counts)), self.counts)
            at = np.arange(len(owners)) - self.starts[owners]
            places = at[:, None] - known + np.arange(taps)
            own = len(self.counts) * known + self.starts[owners][:, None] + places
            self._windows[taps] = torch.from_numpy(
                np.where(places < 0, owners[:, None] * known + known + places, own).astype(np.int64)
            )
        return self._windows[taps]


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """The recurrent mixers of a model, and the states of its slots; fields: by index of the layer."""

    states: Mapping[int, LayerStates]
    num_slots: int

    @classmethod
    def of(cls, spec: ModelSpec, num_slots: int) -> RecurrentLayers:
        """Return the layers of a model with that many slots."""
        mixers = ((at, layer.recurrence) for at, layer in enumerate(spec.layers))
        return cls({at: LayerStates(mixer, num_slots) for at, mixer in mixers if mixer is not None}, num_slots)

    def steps_of(self, plan: StepPlan) -> StateSteps | None:
        """Return what a step says of its states; None without recurrent layers."""
        return StateSteps(plan) if self.states else None

    def mix(
        self,
        at: int,
        mixer: Recurrence,
        weights: RecurrentWeights,
        head_gates: Tensor | None,
        projected: Tensor,
        steps: StateSteps,
    ) -> Tensor:
        """Continue the states of a layer by all tokens of a step, and return the mixer's outputs in float32.

        head_gates: [num_tokens, 2 * value heads] of a delta rule, before their functions, as `HeadWeights.gates` has
        them; projected: the products of the tokens with the mixer's first matrix.
        """
        states, projected = self.states[at], projected.float()
        if isinstance(mixer, ShortConvolution):
            first, second, values = projected.chunk(3, dim=-1)
            return second * _convolved(first * values, weights, states, steps)
        if isinstance(mixer, StateSpace):
            return _scan(mixer, weights, projected, states, steps)
        mixed = functional.silu(_convolved(projected[:, : mixer.channels], weights, states, steps))
        if head_gates is None:
            raise InvariantError("a delta rule has no gates of its value heads")
        return _delta_rule(mixer, weights, head_gates, mixed, projected[:, mixer.channels :], states, steps)


def _convolved(inputs: Tensor, weights: RecurrentWeights, states: LayerStates, steps: StateSteps) -> Tensor:
    """Convolve the inputs, [num_tokens, channels], with those of the tokens before them."""
    taps = len(weights.convolution)
    windows, known = steps.windows(taps), torch.cat((steps.before(states.inputs).flatten(0, 1), inputs))
    convolved = known[windows[:, 0]] * weights.convolution[0]
    for tap in range(1, taps):
        convolved += known[windows[:, tap]] * weights.convolution[tap]
    for tokens, slots in ((steps.save_tokens, steps.save_slots), (steps.last_tokens, steps.writes)):
        states.inputs[slots] = known[windows[tokens, 1:]]
    return convolved if weights.bias is None else convolved + weights.bias


def _delta_rule(
    mixer: DeltaRule,
    weights: RecurrentWeights,
    head_gates: Tensor,
    mixed: Tensor,
    gates: Tensor,
    states: LayerStates,
    steps: StateSteps,
) -> Tensor:
    """Return the outputs of the delta rule, [num_tokens, value heads * value_dim].

    head_gates: as `RecurrentLayers.mix` takes them; mixed: queries, keys and values, convolved; gates: of the outputs.
    """
    heads, num_tokens, count = weights.heads, len(mixed), mixer.num_value_heads
    if not isinstance(heads, HeadWeights) or states.matrices is None:
        raise InvariantError("a delta rule has no value heads")
    queries, keys, values = torch.split(mixed, [mixer.keys, mixer.keys, mixer.outputs], dim=-1)
    queries, keys = (
        _of_value_heads(mixer, _unit(one.view(num_tokens, mixer.num_key_heads, mixer.key_dim)))
        for one in (queries, keys)
    )
    queries = queries * mixer.key_dim**-0.5
    values = values.view(num_tokens, count, mixer.value_dim)
    learning, decay = head_gates.chunk(2, dim=-1)
    learning = torch.sigmoid(learning).unsqueeze(-1)
    decay = torch.exp(heads.decay_rates * functional.softplus(decay + heads.decay_biases))
    out = torch.empty(num_tokens, count, mixer.value_dim)

    def advance(tokens: Tensor, current: Tensor) -> None:
        current *= decay[tokens, :, None, None]
        key = keys[tokens].unsqueeze(-2)
        error = (values[tokens].unsqueeze(-2) - key @ current) * learning[tokens].unsqueeze(-2)
        current += key.transpose(-1, -2) * error
        out[tokens] = (queries[tokens].unsqueeze(-2) @ current).squeeze(-2)

    _continue(states.matrices, steps, advance)
    normed_out = functional.rms_norm(out, (mixer.value_dim,), heads.norm, mixer.norm_eps)
    return normed_out.flatten(1) * functional.silu(gates)


def _of_value_heads(mixer: DeltaRule, of_key_heads: Tensor) -> Tensor:
    """Return [num_tokens, value heads, key_dim]: for each value head what its key head has."""
    group = mixer.num_value_heads // mixer.num_key_heads
    if mixer.tiles_values:
        return of_key_heads.repeat(1, group, 1)
    return of_key_heads.repeat_interleave(group, dim=1)


def _scan(
    mixer: StateSpace, weights: RecurrentWeights, projected: Tensor, states: LayerStates, steps: StateSteps
) -> Tensor:
    """Return the outputs of a state-space mixer, [num_tokens, heads * head_dim]."""
    heads, num_tokens, count = weights.heads, len(projected), mixer.num_heads
    if not isinstance(heads, ScanWeights) or states.matrices is None:
        raise InvariantError("a state-space mixer has no heads")
    gates, inputs, durations = torch.split(projected, [mixer.outputs, mixer.channels, count], dim=-1)
    mixed, size = functional.silu(_convolved(inputs, weights, states, steps)), mixer.num_groups * mixer.state_size
    values, writes, reads = torch.split(mixed, [mixer.outputs, size, size], dim=-1)
    values = values.view(num_tokens, count, mixer.head_dim)
    writes, reads = (
        one.view(num_tokens, mixer.num_groups, mixer.state_size).repeat_interleave(count // mixer.num_groups, dim=1)
        for one in (writes, reads)
    )
    durations = functional.softplus(mixer.input_factors[4] * durations + heads.duration_biases)
    decay = torch.exp(durations * heads.decay_rates)
    added = values * durations.unsqueeze(-1)
    out = torch.empty(num_tokens, count, mixer.head_dim)

    def advance(tokens: Tensor, current: Tensor) -> None:
        current *= decay[tokens, :, None, None]
        current += added[tokens].unsqueeze(-1) * writes[tokens].unsqueeze(-2)
        out[tokens] = (current @ reads[tokens].unsqueeze(-1)).squeeze(-1)

    _continue(states.matrices, steps, advance)
    gated = (out + heads.skips.unsqueeze(-1) * values).flatten(1)
    gated *= functional.silu(mixer.input_factors[0] * gates)
    if heads.norm is not None:
        by_group = gated.view(num_tokens, mixer.num_groups, -1)
        gated = functional.rms_norm(by_group, by_group.shape[-1:], eps=mixer.norm_eps).flatten(1) * heads.norm
    return gated * mixer.output_factor


def _continue(matrices: Tensor, steps: StateSteps, advance: Callable[[Tensor, Tensor], None]) -> None:
    """Continue the matrices of all sequences token by token, and keep those that the step names.

    matrices: by slot. `advance` changes some sequences' matrices in place, given a token of each.
    """
    # Sequences with more tokens come first, so that those that have a token left are always the first ones.
    order = np.argsort(-steps.counts, kind="stable")
    current = steps.before(matrices)[torch.from_numpy(order)]
    place = {int(seq): i for i, seq in enumerate(order)}
    firsts, counts = steps.starts[order].astype(np.int64), np.sort(steps.counts)
    for at in range(int(counts.max(initial=0))):
        num_seqs = len(counts) - int(np.searchsorted(counts, at, side="right"))
        advance(torch.from_numpy(firsts[:num_seqs] + at), current[:num_seqs])
        for seq, slot in steps.saves_at.get(at, ()):
            matrices[slot] = current[place[seq]]
    matrices[steps.writes[torch.from_numpy(order)]] = current


def _unit(rows: Tensor) -> Tensor:
    """Return rows of length 1."""
    return rows * torch.rsqrt(rows.square().sum(dim=-1, keepdim=True) + _NORM_EPS)
