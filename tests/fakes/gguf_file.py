"""A model of Hugging Face's format as a GGUF file, written as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from fakes.matrices import K_BLOCKS, random_blocks
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize
from gguf.constants import MODEL_ARCH_NAMES
from gguf.tensor_mapping import get_tensor_name_map
from numpy.typing import NDArray

_INTERLEAVED = {"llama": {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}}


def write_gguf(folder: Path, path: Path, architecture: str, kind: str = "bf16") -> Path:
    """Write `folder`'s model with its matrices in a format, with its byte-level tokenizer.

    What the package gguf cannot write, q4_k, q5_k and q6_k, is random numbers instead of the model's.
    """
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    known = next(known for known, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(known, config["num_hidden_layers"])
    writer = GGUFWriter(path, architecture)
    _add_config(writer, config)
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config["eos_token_id"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored = GGMLQuantizationType[kind.upper()] if tensor.ndim > 1 else GGMLQuantizationType.F32
        values = np.ascontiguousarray(tensor.float().numpy())
        for part, heads in _INTERLEAVED.get(architecture, {}).items():
            values = _interleaved(values, config[heads]) if part in name else values
        its_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(its_name, _quantised(values, stored), raw_dtype=stored)
    if config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_values(folder: Path, path: Path, architecture: str) -> dict[str, NDArray[np.float32]]:
    """What such a file's tensors mean by the package gguf, under the names and in the order of `folder`'s model."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    known = next(known for known, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(known, config["num_hidden_layers"])
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    kept = load_file(folder / "model.safetensors")
    found = {name: tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] for name in kept}
    values = {name: dequantize(tensor.data, tensor.tensor_type) for name, tensor in found.items()}
    for part, heads in _INTERLEAVED.get(architecture, {}).items():
        values |= {name: _deinterleaved(value, config[heads]) for name, value in values.items() if part in name}
    return values


def _quantised(values: NDArray[np.float32], stored: GGMLQuantizationType) -> NDArray[Any]:
    quantised: NDArray[Any] = (
        random_blocks(*values.shape, stored) if stored in K_BLOCKS.values() else quantize(values, stored)
    )
    return quantised


def _interleaved(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    return values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _deinterleaved(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    return values.reshape(num_heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _add_config(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    scaling = config["rope_parameters"]
    if scaling["rope_type"] in ("linear", "yarn"):
        writer.add_string(f"{writer.arch}.rope.scaling.type", scaling["rope_type"])
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def _llama3_factors(config: dict[str, Any]) -> NDArray[np.float32]:
    """What each frequency is divided by: nothing for short waves, `factor` for long ones."""
    rope = config["rope_parameters"]
    dim = config["head_dim"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    smooth = (rope["original_max_position_embeddings"] / waves - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    smooth = smooth.clip(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], eos_token_id: int) -> None:
    vocab, added = tokenizer["model"]["vocab"], {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3 if i in added else 1 for i in range(len(vocab))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(eos_token_id)
