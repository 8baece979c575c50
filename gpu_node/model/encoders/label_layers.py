"""The layers between an encoder's hidden states and its scores of labels, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.stored_kinds import Stored
from penstock.gpu_node.model.checkpoint.stored_tensors import Checkpoint
from penstock.gpu_node.model.encoders.heads import Activation, DenseLayer, Floats, PoolingMode, pooled
from penstock.gpu_node.model.text_protocol import RowKind

_HEADS: Mapping[str, tuple[str, Activation, str]] = {
    "bert": ("bert.pooler.dense", "tanh", "classifier"),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), ("classifier.dense", "tanh", "classifier.out_proj")),
    "data2vec-text": ("classifier.dense", "tanh", "classifier.out_proj"),
    "electra": ("classifier.dense", "gelu", "classifier.out_proj"),
    "distilbert": ("pre_classifier", "relu", "classifier"),
    "modernbert": ("head.dense", "gelu", "classifier"),
    "nomic_bert": ("nomic_bert.pooler.dense", "tanh", "classifier"),
    "gte": ("gte.pooler.dense", "tanh", "classifier"),
    "eurobert": ("dense", "gelu", "classifier"),
}
"""By `model_type`: the layer over a text's vector, its activation, and the layer that scores labels."""
_POOLINGS: Mapping[str, PoolingMode] = {"cls": "cls", "bos": "cls", "mean": "mean"}


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A norm over the channels of each row."""

    weight: Floats
    bias: Floats | None
    eps: float

    def __call__(self, x: Floats) -> Floats:
        """x: [rows, width]."""
        distance = x - x.mean(axis=1, keepdims=True)
        y = distance / np.sqrt((distance * distance).mean(axis=1, keepdims=True) + np.float32(self.eps)) * self.weight
        found: Floats = (y if self.bias is None else y + self.bias).astype(np.float32)
        return found


@dataclass(frozen=True, slots=True)
class LabelLayers:
    """A head of labels, for whole texts or for each token."""

    pooling: PoolingMode | None
    """How the hidden states of a text become one vector; None: each token has scores."""
    layers: tuple[DenseLayer | LayerNorm, ...]

    @property
    def reads_first(self) -> bool:
        """Whether it reads the hidden state of each text's first token alone."""
        return self.pooling == "cls"

    def rows(self, hidden: Floats, lengths: NDArray[np.int32]) -> Floats:
        """Return scores, [num_texts, num_labels], or of tokens [num_tokens, num_labels].

        hidden: [num_tokens, width], or with `reads_first` [num_texts, width].
        """
        rows = hidden if self.pooling is None or self.reads_first else pooled(hidden, lengths, self.pooling)
        for layer in self.layers:
            rows = layer(rows)
        return rows


def label_layers_of(
    config: Mapping[str, Any], row_kind: RowKind, num_labels: int, checkpoint: Checkpoint
) -> LabelLayers | None:
    """Return the head of labels of a checkpoint; None for a model that embeds. Raises ConfigError."""
    if row_kind == "vectors":
        return None
    kind, width = str(config["model_type"]), int(config["hidden_size"])

    def dense(name: str, rows: int, activation: Activation, *, has_bias: bool = True) -> DenseLayer:
        bias = _floats(checkpoint.get(f"{name}.bias", rows)) if has_bias else None
        return DenseLayer(_floats(checkpoint.get(f"{name}.weight", rows, width)), bias, activation)

    if kind == "gemma3_text":
        return LabelLayers("last", (dense("score", num_labels, "identity", has_bias=False),))
    inner, activation, out = _HEADS[kind]
    layers: list[DenseLayer | LayerNorm] = []
    is_modern = kind == "modernbert"
    if row_kind == "labels" or is_modern:
        if is_modern and (named := config["classifier_activation"]) != activation:
            raise ConfigError(f"classifier_activation {named!r} is not supported; supported: {activation}")
        layers.append(dense(inner, width, activation, has_bias=not is_modern or config["classifier_bias"]))
    if is_modern:
        bias = _floats(checkpoint.get("head.norm.bias", width)) if config["norm_bias"] else None
        layers.append(LayerNorm(_floats(checkpoint.get("head.norm.weight", width)), bias, config["norm_eps"]))
    layers.append(dense("classifier" if row_kind == "token_labels" else out, num_labels, "identity"))
    return LabelLayers(None if row_kind == "token_labels" else _pooling_of(config), tuple(layers))


def _pooling_of(config: Mapping[str, Any]) -> PoolingMode:
    named = config.get("classifier_pooling", "cls")
    if named not in _POOLINGS:
        raise ConfigError(f"classifier_pooling {named!r} is not supported; supported: {', '.join(_POOLINGS)}")
    return _POOLINGS[named]


def _floats(stored: Stored) -> Floats:
    return np.ascontiguousarray(stored.to_float32(), np.float32)
