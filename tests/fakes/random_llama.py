"""Llamas of any shape with random bfloat16 weights and no tokenizer, for tests of runners."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_llama(
    folder: Path,
    *,
    poison: Iterable[tuple[int, float]] = (),
    equal_logits: bool = False,
    llama3_rope: bool = False,
    **shapes: Any,
) -> Path:
    """Write a model to `folder`; `shapes` are LlamaConfig's. `poison` puts numbers into the embeddings of tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    plain = {
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        # Wide enough that the logits of neighbouring tokens lie apart.
        "initializer_range": 0.2,
        "eos_token_id": 0,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    if llama3_rope:
        shapes["rope_parameters"] = _LLAMA3_ROPE
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**plain | shapes)).to(torch.bfloat16)
        for name, weight in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
    for token, number in poison:
        model.model.embed_tokens.weight.data[token, 5] = number
    if equal_logits:
        model.lm_head.weight.data[:] = model.lm_head.weight.data[0].clone()
    model.save_pretrained(folder)
    return folder
