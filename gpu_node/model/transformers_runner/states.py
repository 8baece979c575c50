"""The states of recurrent layers of transformers' modules: what one pass reads and leaves, and those of all slots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

MAX_STATES = 16
"""States of each kind that a layer may keep."""
Kind = Literal["conv", "recurrent"]


@dataclass(frozen=True, slots=True)
class StateShape:
    """A state that a layer keeps: the last inputs of a convolution, or what its recurrence has summed up."""

    layer: int
    kind: Kind
    index: int
    """Among the layer's states of this kind."""
    shape: tuple[int, ...]
    """Of one sequence."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of one sequence."""
        return math.prod(self.shape) * self.dtype.itemsize


StateValues: TypeAlias = Mapping[StateShape, Tensor]
"""Each state of some sequences, [sequences, …]."""


class PassStates:
    """The states that the layers of a module read in one pass, and those that they leave."""

    def __init__(self, earlier: StateValues | None = None) -> None:
        """earlier: the states before the pass, which it changes; None: its sequences begin."""
        self.continues = earlier is not None
        self._layers: dict[int, LinearAttentionLayer] = {}
        for one, value in (earlier or {}).items():
            layer = self.layer(one.layer)
            if one.kind == "conv":
                layer.conv_states[one.index], layer.conv_kernel_size[one.index] = value, value.shape[-1]
                layer.is_conv_states_initialized[one.index] = True
            else:
                layer.recurrent_states[one.index] = value
                layer.is_recurrent_states_initialized[one.index] = True
            layer.has_previous_state[one.index] = True

    def layer(self, index: int) -> LinearAttentionLayer:
        """Return what transformers keeps of a layer."""
        if index not in self._layers:
            self._layers[index] = LinearAttentionLayer(number_of_states=MAX_STATES)
        return self._layers[index]

    def later(self) -> StateValues:
        """Return the states after the pass."""
        return {
            StateShape(at, kind, index, tuple(value.shape[1:]), value.dtype): value
            for at, layer in self._layers.items()
            for kind, index, value in _kept(layer)
        }


def _kept(layer: LinearAttentionLayer) -> Iterator[tuple[Kind, int, Tensor]]:
    for index, value in layer.conv_states.items():
        if value is not None:
            yield "conv", index, value
    for index, value in layer.recurrent_states.items():
        if value is not None:
            yield "recurrent", index, value


class SlotStates:
    """The states of all slots. A slot holds those of all layers."""

    def __init__(self, shapes: Sequence[StateShape], num_slots: int) -> None:
        self.num_slots = num_slots if shapes else 0
        self.slot_bytes = sum(one.num_bytes for one in shapes)
        # What is never written takes no memory: the system provides the pages at their first use.
        self._values = {one: torch.empty(self.num_slots, *one.shape, dtype=one.dtype) for one in shapes}

    def read(self, slots: Sequence[int]) -> StateValues:
        """Return copies of the states in some slots."""
        return {one: values[slots] for one, values in self._values.items()}

    def write(self, slots: Sequence[int], states: StateValues) -> None:
        """Keep states in slots."""
        for one, values in self._values.items():
            values[slots] = states[one]


def rows_of(states: StateValues, rows: Sequence[int]) -> StateValues:
    """Return copies of the states of some sequences."""
    return {one: value[rows] for one, value in states.items()}
