"""A model of Hugging Face's format as a GGUF file, written as llama.cpp's converter does for families that it keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def write_gguf(folder: Path, path: Path, architecture: str) -> Path:
    """Write `folder`'s model in bfloat16, with its byte-level tokenizer; rows stay in their order."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    kind = next(known for known, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, config["num_hidden_layers"])
    writer = GGUFWriter(path, architecture)
    _add_config(writer, config)
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config["eos_token_id"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored = GGMLQuantizationType.BF16 if tensor.ndim > 1 else GGMLQuantizationType.F32
        values = np.ascontiguousarray(tensor.float().numpy())
        its_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(its_name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], eos_token_id: int) -> None:
    vocab, added = tokenizer["model"]["vocab"], {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3 if i in added else 1 for i in range(len(vocab))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(eos_token_id)
