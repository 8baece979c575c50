"""Encoders in GGUF files: their configs, and how they pool, as the files of sentence-transformers say it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, dequantize

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile
from penstock.gpu_node.model.checkpoint.gguf_metadata import Metadata

_NOMIC_THETA, _MODERN_THETA, _THETA = 1000.0, 160_000.0, 10_000.0
_MODERN_PERIOD, _GEMMA_PERIOD = 3, 6
"""Every so many layers have no window, if the file does not say which."""
_MODES = {1: "mean", 2: "cls", 3: "lasttoken"}
"""Values of `pooling_type`, and how sentence-transformers calls them."""
_NONE, _RANK = 0, 4
_DENSE = ("dense_2", "dense_3")
"""The dense layers of EmbeddingGemma, which the converter writes if it is asked to."""


def _norms(metadata: Metadata) -> dict[str, Any]:
    return {
        "intermediate_size": metadata.number("feed_forward_length"),
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon"),
    }


def _num_types(metadata: Metadata) -> int:
    """Return how many types of tokens have a vector; DistilBERT has none."""
    found = metadata.tensors.get("token_types.weight")
    return 0 if found is None else found.shape[0]


def _bert(metadata: Metadata) -> dict[str, Any]:
    """Return the config of BERT and its relatives. The converter leaves out positions before the first token's."""
    positions = metadata.tensors.get("position_embd.weight")
    if positions is None:
        raise ConfigError("tensor position_embd.weight is missing, which bert needs")
    return {
        **_norms(metadata),
        "max_position_embeddings": positions.shape[0],
        "type_vocab_size": _num_types(metadata),
        "hidden_act": "gelu",
    }


def _nomic(metadata: Metadata) -> dict[str, Any]:
    theta = metadata.number("rope.freq_base", _NOMIC_THETA)
    return {
        **_norms(metadata),
        "type_vocab_size": _num_types(metadata),
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def _layer_types(metadata: Metadata, period: int, *, whole_first: bool) -> list[str]:
    """Return which layers have a window. whole_first: the first one of each period has none, else the last one."""
    pattern = metadata.of_layers("attention.sliding_window_pattern", metadata.num_layers)
    if pattern is None:
        period = int(metadata.number("attention.sliding_window_pattern", period)) or 1
        whole = 0 if whole_first else period - 1
        pattern = [at % period != whole for at in range(metadata.num_layers)]
    return ["sliding_attention" if has_window else "full_attention" for has_window in pattern]


def _ropes(metadata: Metadata, theta: float) -> dict[str, Any]:
    """Return the RoPE of each kind of layers."""
    whole, windowed = metadata.number("rope.freq_base", theta), metadata.number("rope.freq_base_swa", _THETA)
    return {
        "full_attention": {"rope_type": "default", "rope_theta": whole},
        "sliding_attention": {"rope_type": "default", "rope_theta": windowed},
    }


def _modern(metadata: Metadata) -> dict[str, Any]:
    number, tensors = metadata.number, metadata.tensors
    return {
        "intermediate_size": number("feed_forward_length"),
        "norm_eps": number("attention.layer_norm_epsilon"),
        "norm_bias": "output_norm.bias" in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "hidden_activation": str(metadata.optional("hidden_activation") or "gelu"),
        "local_attention": number("attention.sliding_window"),
        "layer_types": _layer_types(metadata, _MODERN_PERIOD, whole_first=True),
        "rope_parameters": _ropes(metadata, _MODERN_THETA),
    }


def _gemma(metadata: Metadata) -> dict[str, Any]:
    number = metadata.number
    return {
        "intermediate_size": number("feed_forward_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "head_dim": number("attention.key_length"),
        "query_pre_attn_scalar": number("attention.key_length"),
        "sliding_window": number("attention.sliding_window"),
        "layer_types": _layer_types(metadata, _GEMMA_PERIOD, whole_first=False),
        "rope_parameters": _ropes(metadata, 100 * _THETA),
        "use_bidirectional_attention": True,
    }


CONFIGS: Mapping[str, tuple[str, str, Callable[[Metadata], dict[str, Any]]]] = {
    "bert": ("BertModel", "bert", _bert),
    "gemma-embedding": ("Gemma3TextModel", "gemma3_text", _gemma),
    "modern-bert": ("ModernBertModel", "modernbert", _modern),
    "nomic-bert": ("NomicBertModel", "nomic_bert", _nomic),
}
"""GGUF's architectures, with `architectures`, `model_type` and the further fields of config.json."""


def write_modules(file: GgufFile, metadata: Metadata, folder: Path) -> None:
    """Write the files of sentence-transformers for an encoder. Raises ConfigError for a pooling that is not supported.

    A file does not say whether vectors have length 1; llama.cpp's programs return such ones.
    """
    if metadata.architecture not in CONFIGS:
        return
    if (scaling := metadata.optional("rope.scaling.type")) not in (None, "none"):
        raise ConfigError(f"{file.path}: rope.scaling.type {scaling!r} is not supported for encoders")
    kind = metadata.optional("pooling_type")
    if kind == _RANK:
        raise ConfigError(f"{file.path}: pooling_type {kind} (rank) is not supported; serve the model's folder")
    if kind not in (None, _NONE, *_MODES):
        raise ConfigError(f"{file.path}: pooling_type is {kind!r} but must be one of {', '.join(map(str, _MODES))}")
    names = ["Transformer", "Pooling", *("Dense" for one in _DENSE if f"{one}.weight" in file.header.tensors)]
    modules = []
    for at, name in enumerate([*names, "Normalize"]):
        path = "" if name in ("Transformer", "Normalize") else f"{at}_{name}"
        modules.append({"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{name}"})
    _write(folder / "modules.json", modules)
    (folder / "1_Pooling").mkdir()
    _write(folder / "1_Pooling" / "config.json", {"pooling_mode": _MODES.get(kind or 1)})
    for at, name in enumerate((one for one in _DENSE if f"{one}.weight" in file.header.tensors), 2):
        _write_dense(file, f"{name}.weight", folder / f"{at}_Dense")


def _write_dense(file: GgufFile, name: str, folder: Path) -> None:
    from safetensors.numpy import save_file

    tensor = file.header.tensors[name]
    stored = GGMLQuantizationType[tensor.ggml_type.upper()]
    values = dequantize(file.bytes_of(tensor).reshape(tensor.shape[0], -1), stored)
    folder.mkdir()
    save_file({"linear.weight": np.ascontiguousarray(values, np.float32)}, folder / "model.safetensors")
    _write(folder / "config.json", {"activation_function": "torch.nn.modules.linear.Identity"})


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
