"""A small random model for each feature of each family, in Hugging Face's format, with the tiny model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fakes.tiny_model import write_tokenizer

WINDOW = 32
ORIGINAL_LENGTH = 96
"""Of models whose positions are scaled: a third of what tests have them read."""

_SMALL = {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    # Wide enough that greedy wanders over the vocabulary instead of repeating one token.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 2,
}
_GATED = _SMALL | {"intermediate_size": 96, "num_key_value_heads": 2}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "original_max_position_embeddings": ORIGINAL_LENGTH, "beta_fast": 8}
_SCALED = {"factor": 4.0, "rope_theta": 10_000.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GATED | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama linear": (
        "LlamaConfig",
        _GATED | {"max_position_embeddings": ORIGINAL_LENGTH, "rope_parameters": _SCALED | {"rope_type": "linear"}},
    ),
    "llama dynamic": (
        "LlamaConfig",
        _GATED
        | {"max_position_embeddings": ORIGINAL_LENGTH, "rope_parameters": _SCALED | {"rope_type": "dynamic"}}
        # transformers works out its angles in single precision, of which wider scores make more.
        | {"initializer_range": 0.2},
    ),
    "llama 3": (
        "LlamaConfig",
        _GATED | {"rope_parameters": _SCALED | _LLAMA3 | {"original_max_position_embeddings": ORIGINAL_LENGTH}},
    ),
    "mistral": ("MistralConfig", _GATED | {"sliding_window": WINDOW, "head_dim": 32}),
    "mistral without window": ("MistralConfig", _GATED | {"sliding_window": None}),
    "qwen2": ("Qwen2Config", _GATED),
    "qwen2 with windows": (
        "Qwen2Config",
        _GATED | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    # Scores are wider by the square of what it multiplies cosines and sines with.
    "qwen2 yarn": (
        "Qwen2Config",
        _GATED
        | {"initializer_range": 0.2, "max_position_embeddings": 4 * ORIGINAL_LENGTH}
        | {"rope_parameters": _SCALED | _YARN},
    ),
    "qwen3": ("Qwen3Config", _GATED | {"head_dim": 32}),
    "qwen3 yarn": (
        "Qwen3Config",
        _GATED
        | {"head_dim": 32, "max_position_embeddings": 4 * ORIGINAL_LENGTH}
        | {"rope_parameters": _SCALED | _YARN | {"mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False}},
    ),
    "falcon 7b": ("FalconConfig", _SMALL),
    "falcon 40b": ("FalconConfig", _SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon 11b": (
        "FalconConfig",
        _SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon rw": (
        "FalconConfig",
        _SMALL
        # Not a power of two: the slopes of the rest lie between those, and are rounded.
        | {"num_attention_heads": 12, "hidden_size": 192, "initializer_range": 0.2}
        | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 96},
    ),
    "gpt-neox": ("GPTNeoXConfig", _SMALL | {"intermediate_size": 96}),
    "gpt-neox sequential": (
        "GPTNeoXConfig",
        _SMALL
        | {"intermediate_size": 96, "use_parallel_residual": False, "hidden_act": "gelu_fast", "attention_bias": False}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
    ),
}


def make_family_model(folder: Path, name: str, dtype: str = "float32", **changes: Any) -> Path:
    """Write a model of `FAMILIES` to `folder`; all that training would move from its start is random.

    `changes` are settings that are to be others.
    """
    import torch
    import transformers

    kind, settings = FAMILIES[name]
    config = getattr(transformers, kind)(**settings | changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.3)
            elif weight.ndim == 1:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return folder
