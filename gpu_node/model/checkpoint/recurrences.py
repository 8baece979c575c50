"""The small tensors of recurrent mixers as all runners compute with them: in float32, and in one layout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.checkpoint.stored_kinds import Stored
from penstock.gpu_node.model.checkpoint.stored_layer import StoredRecurrence, StoredScan

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HeadValues:
    """Those of a delta rule's value heads."""

    gates: Floats
    """[2 * value heads, hidden]: the gates of learning, then those of the decay."""
    decay_rates: Floats
    """[value heads]: what the logarithm of a state's decay is in proportion to; negative."""
    decay_biases: Floats
    """[value heads]"""
    norm: Floats
    """[value_dim]"""


@dataclass(frozen=True, slots=True)
class ScanValues:
    """Those of a state-space mixer's heads."""

    duration_biases: Floats
    """[heads], as the next two."""
    decay_rates: Floats
    """What the logarithm of a state's decay is in proportion to; negative."""
    skips: Floats
    norm: Floats | None
    """[outputs of the mixer]; None: outputs are not normed."""


@dataclass(frozen=True, slots=True)
class RecurrenceValues:
    """The values of a mixer."""

    convolution: Floats
    """[taps, channels]: the weights of the oldest token first."""
    bias: Floats | None
    """[channels]"""
    heads: HeadValues | ScanValues | None
    """None for a short convolution."""


def values_of(stored: StoredRecurrence) -> RecurrenceValues:
    """Read the small tensors of a mixer."""
    convolution = stored.convolution.to_float32()
    if stored.factors:
        counts, factors = zip(*stored.factors, strict=True)
        convolution *= np.repeat(np.array(factors, np.float32), counts)[:, None, None]
    heads: HeadValues | ScanValues | None = None

    def rates(decay: Stored) -> Floats:
        numbers = decay.to_float32()
        return numbers if stored.has_rates else -np.exp(numbers)

    if isinstance(stored.heads, StoredScan):
        heads = ScanValues(
            duration_biases=stored.heads.duration_bias.to_float32(),
            decay_rates=rates(stored.heads.decay_log),
            skips=stored.heads.skip.to_float32(),
            norm=None if stored.heads.norm is None else stored.heads.norm.to_float32(),
        )
    elif stored.heads is not None:
        heads = HeadValues(
            gates=np.concatenate([gate.to_float32() for gate in stored.heads.gates]),
            decay_rates=rates(stored.heads.decay_log),
            decay_biases=stored.heads.decay_bias.to_float32(),
            norm=stored.heads.norm.to_float32(),
        )
    return RecurrenceValues(
        convolution=np.ascontiguousarray(convolution.reshape(len(convolution), -1).T),
        bias=None if stored.bias is None else stored.bias.to_float32(),
        heads=heads,
    )
