"""Recurrent mixers in plain torch: the states of all slots, and the steps that continue them token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.architecture.recurrent import DeltaRule, Recurrence, ShortConvolution
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.protocol import NO_STATE, StepPlan
from penstock.gpu_node.model.torch_common.layers import RecurrentWeights

_NORM_EPS = 1e-6
"""Added to the squared length of queries and keys."""


class LayerStates:
    """The states of one layer, by slot, in float32."""

    def __init__(self, mixer: Recurrence, num_slots: int) -> None:
        # What is never written takes no memory: the system provides the pages at their first use.
        self.inputs = torch.empty(num_slots, mixer.taps - 1, mixer.channels)
        """The inputs of the convolution at the last tokens, the oldest first."""
        self.matrices: Tensor | None = None
        """[num_slots, value heads, key_dim, value_dim], of a delta rule."""
        if isinstance(mixer, DeltaRule):
            self.matrices = torch.empty(num_slots, mixer.num_value_heads, mixer.key_dim, mixer.value_dim)


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
        normed: Tensor,
        projected: Tensor,
        steps: StateSteps,
    ) -> Tensor:
        """Continue the states of a layer by all tokens of a step, and return the mixer's outputs in float32.

        normed: [num_tokens, hidden]; projected: its product with the mixer's first matrix.
        """
        states, projected = self.states[at], projected.float()
        if isinstance(mixer, ShortConvolution):
            first, second, values = projected.chunk(3, dim=-1)
            return second * _convolved(first * values, weights, states, steps)
        mixed = functional.silu(_convolved(projected[:, : mixer.channels], weights, states, steps))
        return _delta_rule(mixer, weights, normed.float(), mixed, projected[:, mixer.channels :], states, steps)


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
    normed: Tensor,
    mixed: Tensor,
    gates: Tensor,
    states: LayerStates,
    steps: StateSteps,
) -> Tensor:
    """Return the outputs of the delta rule, [num_tokens, value heads * value_dim].

    mixed: queries, keys and values, convolved; gates: of the outputs.
    """
    heads, num_tokens, count = weights.heads, len(mixed), mixer.num_value_heads
    if heads is None or states.matrices is None:
        raise InvariantError("a delta rule has no value heads")
    queries, keys, values = mixed.split((mixer.keys, mixer.keys, mixer.outputs), dim=-1)
    queries, keys = (
        _unit(one.view(num_tokens, mixer.num_key_heads, mixer.key_dim)).repeat_interleave(
            count // mixer.num_key_heads, dim=1
        )
        for one in (queries, keys)
    )
    queries = queries * mixer.key_dim**-0.5
    values = values.view(num_tokens, count, mixer.value_dim)
    learning, decay = (normed @ heads.gates.T).chunk(2, dim=-1)
    learning = torch.sigmoid(learning).unsqueeze(-1)
    decay = torch.exp(heads.decay_rates * functional.softplus(decay + heads.decay_biases))
    before = steps.before(states.matrices)
    out = torch.empty(num_tokens, count, mixer.value_dim)
    # Sequences with more tokens come first, so that those that have a token left are always the first ones.
    order = np.argsort(-steps.counts, kind="stable")
    state = before[torch.from_numpy(order)]
    place = {int(seq): i for i, seq in enumerate(order)}
    firsts, left = steps.starts[order].astype(np.int64), np.sort(steps.counts)
    for at in range(int(left[-1]) if len(left) else 0):
        num_seqs = len(left) - int(np.searchsorted(left, at, side="right"))
        rows, current = torch.from_numpy(firsts[:num_seqs] + at), state[:num_seqs]
        current *= decay[rows, :, None, None]
        key = keys[rows].unsqueeze(-2)
        error = (values[rows].unsqueeze(-2) - key @ current) * learning[rows].unsqueeze(-2)
        current += key.transpose(-1, -2) * error
        out[rows] = (queries[rows].unsqueeze(-2) @ current).squeeze(-2)
        for seq, slot in steps.saves_at.get(at, ()):
            states.matrices[slot] = state[place[seq]]
    states.matrices[steps.writes[torch.from_numpy(order)]] = state
    normed_out = functional.rms_norm(out, (mixer.value_dim,), heads.norm, mixer.norm_eps)
    return normed_out.flatten(1) * functional.silu(gates)


def _unit(rows: Tensor) -> Tensor:
    """Return rows of length 1."""
    return rows * torch.rsqrt(rows.square().sum(dim=-1, keepdim=True) + _NORM_EPS)
