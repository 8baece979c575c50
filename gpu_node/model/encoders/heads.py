"""The heads of encoders: float32 arithmetic from hidden states, or from logits, to the rows of a task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import RequestError
from penstock.contract.tasks import Classify, Embed, Score, TextTask
from penstock.gpu_node.model.text_protocol import RowKind

Floats: TypeAlias = NDArray[np.float32]
PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last"]
"""How the hidden states of a text become one vector. Those of several modes are put one after another."""
Activation = Literal["identity", "tanh", "relu", "gelu", "sigmoid"]
ScoreActivation = Literal["identity", "sigmoid"]

_MIN_NORM = 1e-12
"""A shorter vector is left as it is, as torch's `normalize` does."""


def _sigmoid(x: Floats) -> Floats:
    # Of both forms, each is used where it cannot overflow.
    small = np.exp(-np.abs(x))
    found: Floats = np.where(x >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)
    return found


def _gelu(x: Floats) -> Floats:
    # The error function within 1.5e-7, by Abramowitz and Stegun, 7.1.26.
    scaled = np.abs(x).astype(np.float64) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * scaled)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = np.copysign(1 - series * np.exp(-scaled * scaled), x)
    found: Floats = (x * 0.5 * (1 + erf)).astype(np.float32)
    return found


_ACTIVATIONS: Mapping[Activation, Callable[[Floats], Floats]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "sigmoid": _sigmoid,
}


def pooled(hidden: Floats, lengths: NDArray[np.int32], mode: PoolingMode) -> Floats:
    """Return the vector of each text, [num_texts, width]. hidden: [num_tokens, width], packed; lengths: all above 0."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    if mode == "cls":
        first: Floats = hidden[starts]
        return first
    if mode == "last":
        last: Floats = hidden[ends - 1]
        return last
    if mode == "max":
        return np.maximum.reduceat(hidden, starts, axis=0)
    if mode == "weightedmean":
        # The weights are 1, 2, … by the place of a token in its text.
        weights = (np.arange(len(hidden)) - np.repeat(starts, lengths) + 1).astype(np.float32)
        sums = np.add.reduceat(hidden * weights[:, None], starts, axis=0)
        return (sums / np.add.reduceat(weights, starts)[:, None]).astype(np.float32)
    divisor = np.sqrt(lengths) if mode == "mean_sqrt_len" else lengths
    return (np.add.reduceat(hidden, starts, axis=0) / divisor[:, None]).astype(np.float32)


def normalized(rows: Floats) -> Floats:
    """Return vectors of length 1."""
    norms = np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    found: Floats = (rows / np.maximum(norms, _MIN_NORM)).astype(np.float32)
    return found


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A layer after the pooling: activation(x @ weight.T + bias)."""

    weight: Floats
    """[out, in]"""
    bias: Floats | None
    """[out]"""
    activation: Activation

    def __call__(self, x: Floats) -> Floats:
        """x: [num_texts, in]; return [num_texts, out]. A row has the same bits in any company."""
        # A product of all rows adds in an order that depends on their number.
        y = np.stack([self.weight @ row for row in x]) if len(x) else np.empty((0, len(self.weight)), np.float32)
        return _ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)


@dataclass(frozen=True, slots=True)
class EmbeddingHead:
    """Vectors of texts, as the modules of sentence-transformers compute them from hidden states."""

    poolings: tuple[PoolingMode, ...]
    layers: tuple[DenseLayer, ...]
    normalizes: bool
    width: int
    row_kind: RowKind = "vectors"
    labels: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("embed",)

    def rows(self, hidden: Floats, lengths: NDArray[np.int32], task: TextTask) -> Floats:
        """Return a vector for each text. Raises RequestError for options that the model does not have."""
        if not isinstance(task, Embed):
            raise RequestError("this model embeds texts; it has no other answer", param="model")
        modes: tuple[PoolingMode, ...] = self.poolings if task.pooling is None else (task.pooling,)
        rows = np.concatenate([pooled(hidden, lengths, mode) for mode in modes], axis=1)
        for layer in self.layers:
            rows = layer(rows)
        kept = rows[:, : task.dimensions]
        normalizes = self.normalizes if task.normalize is None else task.normalize
        return normalized(kept) if normalizes else np.ascontiguousarray(kept)


@dataclass(frozen=True, slots=True)
class LabelHead:
    """Scores of labels, of whole texts or of their tokens, and of pairs if there is one label."""

    labels: tuple[str, ...]
    is_multi_label: bool
    """Whether labels do not exclude each other: each has a probability of its own."""
    activation: ScoreActivation
    """What a score of a pair is made of the model's number by."""
    row_kind: RowKind = "labels"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of jobs that it can answer."""
        is_of_pairs = self.row_kind == "labels" and len(self.labels) == 1
        return ("score", "classify") if is_of_pairs else ("classify",)

    @property
    def width(self) -> int:
        """The number of labels."""
        return len(self.labels)

    def rows(self, hidden: Floats, lengths: NDArray[np.int32], task: TextTask) -> Floats:
        """Return the scores of all labels for each text or token."""
        if isinstance(task, Score):
            known: Mapping[bool | None, ScoreActivation] = {None: self.activation, True: "identity", False: "sigmoid"}
            return _ACTIVATIONS[known[task.raw]](hidden)
        if isinstance(task, Classify) and task.raw:
            return hidden
        if self.is_multi_label or len(self.labels) == 1:
            return _sigmoid(hidden)
        shifted = np.exp(hidden - hidden.max(axis=1, keepdims=True))
        found: Floats = (shifted / shifted.sum(axis=1, keepdims=True)).astype(np.float32)
        return found
