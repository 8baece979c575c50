"""The slots of recurrent states on a GPU, and the mixers that continue them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.contract.errors import ConfigError, InvariantError
from penstock.gpu_node.model.architecture.recurrent import DeltaRule, Recurrence, ShortConvolution, StateSpace, padded
from penstock.gpu_node.model.architecture.spec import ModelSpec, state_bytes
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.torch_common.layers import HeadWeights, RecurrentWeights, ScanWeights
from penstock.kernels.arguments import StateRows
from penstock.kernels.triton.invariant import multiply_invariant
from penstock.kernels.triton.recurrent import convolve, delta_rule, gate_outputs, scan


@dataclass(frozen=True, slots=True)
class PooledStates:
    """The states of one layer, by slot, in float32."""

    inputs: Tensor
    """[num_slots, taps - 1, channels]: the inputs of the convolution at the last tokens, the oldest first."""
    matrices: Tensor | None
    """[num_slots, heads, rows, columns]; None for a short convolution."""


class StatePool:
    """The state slots in GPU memory. A slot is contiguous and holds the states of all layers."""

    def __init__(self, spec: ModelSpec, num_slots: int, device: Device) -> None:
        """Raises ConfigError without a slot for a model that needs one."""
        self.num_slots, self.slot_bytes = num_slots, state_bytes(spec)
        if self.slot_bytes and not num_slots:
            raise ConfigError(
                f"state_slots is 0 but must be at least 1: the state of a sequence takes {self.slot_bytes:,} bytes"
            )
        # A slot is written before it is read.
        self._numbers = torch.empty(num_slots, self.slot_bytes // 4, dtype=torch.float32, device=device.torch)
        self.layers: list[PooledStates | None] = []
        first = 0
        for mixer in (layer.recurrence for layer in spec.layers):
            self.layers.append(None if mixer is None else self._layer(mixer, first))
            first += 0 if mixer is None else mixer.state_numbers

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return self.num_slots * self.slot_bytes

    def _layer(self, mixer: Recurrence, first: int) -> PooledStates:
        """Return the views of a layer whose numbers begin at `first` in each slot. Rows are padded."""
        known, channels = mixer.taps - 1, mixer.channels
        inputs, first = self._view(first, known, channels), first + known * padded(channels)
        if isinstance(mixer, ShortConvolution):
            return PooledStates(inputs, None)
        if isinstance(mixer, DeltaRule):
            return PooledStates(inputs, self._view(first, mixer.num_value_heads, mixer.key_dim, mixer.value_dim))
        return PooledStates(inputs, self._view(first, mixer.num_heads, mixer.head_dim, mixer.state_size))

    def _view(self, first: int, *sizes: int) -> Tensor:
        strides = [padded(sizes[-1]), 1]
        for size in reversed(sizes[1:-1]):
            strides.insert(0, size * strides[0])
        return self._numbers.as_strided((self.num_slots, *sizes), (self._numbers.shape[1], *strides), first)


def mix(
    mixer: Recurrence,
    weights: RecurrentWeights,
    head_gates: Tensor | None,
    projected: Tensor,
    states: PooledStates,
    rows: StateRows,
) -> Tensor:
    """Continue the states of a layer by all tokens of a step, and return the mixer's outputs in its dtype.

    head_gates: [num_tokens, 2 * value heads] of a delta rule, from `head_gates_of`; projected: the products of the
    tokens with the mixer's first matrix.
    """
    if isinstance(mixer, ShortConvolution):
        given = projected, states.inputs, weights.convolution, weights.bias, rows
        return convolve(*given, projected.dtype, gated=True)
    if states.matrices is None:
        raise InvariantError("a mixer with heads has no matrices")
    if isinstance(mixer, StateSpace):
        return _scan(mixer, weights, projected, states.inputs, states.matrices, rows)
    heads = weights.heads
    if not isinstance(heads, HeadWeights) or head_gates is None:
        raise InvariantError("a delta rule has no value heads, or no gates of them")
    mixed = convolve(projected, states.inputs, weights.convolution, weights.bias, rows)
    found = delta_rule(
        *(mixed, head_gates, heads.decay_rates, heads.decay_biases, states.matrices, rows),
        num_key_heads=mixer.num_key_heads,
        tiled=mixer.tiles_values,
    )
    output_gates, eps = projected[:, mixer.channels :], mixer.norm_eps
    return gate_outputs(
        found, output_gates, heads.norm, projected.dtype, width=mixer.value_dim, eps=eps, norm_first=True
    )


def head_gates_of(weights: RecurrentWeights, normed: Tensor) -> Tensor | None:
    """Return the gates of a delta rule's value heads before their functions, in float32; None for other mixers.

    normed: [num_tokens, hidden]. The order of sums does not depend on the number of rows.
    """
    heads = weights.heads
    return multiply_invariant(normed.float(), heads.gates, None) if isinstance(heads, HeadWeights) else None


def _scan(
    mixer: StateSpace, weights: RecurrentWeights, projected: Tensor, inputs: Tensor, matrices: Tensor, rows: StateRows
) -> Tensor:
    heads = weights.heads
    if not isinstance(heads, ScanWeights):
        raise InvariantError("a state-space mixer has no heads")
    gates, of_convolution, durations = torch.split(projected, [mixer.outputs, mixer.channels, mixer.num_heads], dim=1)
    mixed = convolve(of_convolution, inputs, weights.convolution, weights.bias, rows)
    of_heads = heads.duration_biases, heads.decay_rates, heads.skips
    factors = mixer.input_factors
    read = scan(*(mixed, durations, *of_heads, matrices, rows), num_groups=mixer.num_groups, duration_factor=factors[4])
    return gate_outputs(
        *(read, gates, heads.norm, projected.dtype),
        width=mixer.outputs // mixer.num_groups,
        eps=mixer.norm_eps,
        norm_first=False,
        gate_factor=factors[0],
        factor=mixer.output_factor,
    )
