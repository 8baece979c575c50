"""The configs of GGUF files of models with attention in every layer, as config.json has them.

Settings that are read again at each start, such as the scaling of RoPE, are in gguf_conversion.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.gguf_metadata import Metadata

_THETA = 10_000.0
"""The base of RoPE where a file has none, as in llama.cpp."""
_GEMMA3_THETA = 1_000_000.0
_COHERE2_PERIOD = 4
"""Every so many layers have no window, if the file does not say which."""


def _llama(metadata: Metadata) -> dict[str, Any]:
    """Return the config of Llama and its relatives. A head is as wide as what RoPE turns, unless the file says more."""
    turned = metadata.optional("rope.dimension_count")
    return {**({} if turned is None else {"head_dim": turned}), **_plain(metadata)}


def _plain(metadata: Metadata, *, eps: str = "attention.layer_norm_rms_epsilon") -> dict[str, Any]:
    number, head_dim = metadata.number, metadata.optional("attention.key_length")
    theta = number("rope.freq_base", _THETA)
    return {
        # Mixtures may lack it.
        "intermediate_size": number("feed_forward_length", metadata.optional("expert_feed_forward_length")),
        "rms_norm_eps": number(eps),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        **({} if head_dim is None else {"head_dim": head_dim}),
    }


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    return {**_plain(metadata), "norm_topk_prob": True}


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    """Return the config of Gemma 3, which has a RoPE for each kind of layers."""
    number = metadata.number
    whole, windowed = number("rope.freq_base", _GEMMA3_THETA), number("rope.freq_base_swa", _THETA)
    return {
        **_plain(metadata),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": whole},
            "sliding_attention": {"rope_type": "default", "rope_theta": windowed},
        },
    }


def _gemma4(metadata: Metadata) -> dict[str, Any]:
    """Return the config of Gemma 4. Numbers of heads and widths of MLPs are lists where layers differ.

    A file has no values' projection where values come from that of the keys. The tensor of divisors, which every file
    has, says which channels of layers without a window are turned.
    """
    number, num_layers, tensors = metadata.number, metadata.num_layers, metadata.tensors
    pattern = metadata.of_layers("attention.sliding_window_pattern", num_layers)
    if pattern is None:
        key = "gemma4.attention.sliding_window_pattern"
        raise ConfigError(f"{key} is missing; it says which layers have a window, for each of {num_layers} layers")
    num_own = num_layers - int(number("attention.shared_kv_layers", 0))
    whole = next((at for at, has_window in enumerate(pattern) if not has_window and at < num_own), None)
    widths = metadata.of_layers("feed_forward_length", num_layers)
    width = number("feed_forward_length") if widths is None else widths[0]
    fields = {
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "head_dim": number("attention.key_length_swa"),
        "global_head_dim": number("attention.key_length"),
        "layer_types": ["sliding_attention" if has_window else "full_attention" for has_window in pattern],
        "num_kv_shared_layers": num_layers - num_own,
        "intermediate_size": width,
        "use_double_wide_mlp": widths is not None and widths[-1] == 2 * width,
        "hidden_size_per_layer_input": number("embedding_length_per_layer_input", 0),
        "attention_k_eq_v": whole is not None and f"blk.{whole}.attn_v.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": number("rope.freq_base", _GEMMA3_THETA)},
            "sliding_attention": {"rope_type": "default", "rope_theta": number("rope.freq_base_swa", _THETA)},
        },
    }
    if (table := tensors.get("per_layer_token_embd.weight")) is not None:
        fields["vocab_size_per_layer_input"] = table.shape[0]
    if kv_heads := metadata.of_layers("attention.head_count_kv", num_layers):
        windowed = next((count for count, has_window in zip(kv_heads, pattern, strict=True) if has_window), kv_heads[0])
        fields["num_key_value_heads"] = windowed
        fields["num_global_key_value_heads"] = None if whole is None else kv_heads[whole]
    if count := number("expert_count", 0):
        names = "expert_used_count", "expert_feed_forward_length"
        used, size = map(number, names)
        fields |= {"enable_moe_block": True, "num_experts": count, "top_k_experts": used, "moe_intermediate_size": size}
    return fields


def _gpt2(metadata: Metadata) -> dict[str, Any]:
    number = metadata.number
    return {
        "n_embd": number("embedding_length"),
        "n_layer": metadata.num_layers,
        "n_head": number("attention.head_count"),
        "n_inner": number("feed_forward_length"),
        "n_positions": number("context_length"),
        "layer_norm_epsilon": number("attention.layer_norm_epsilon"),
    }


def _cohere2(metadata: Metadata) -> dict[str, Any]:
    number, num_layers = metadata.number, metadata.num_layers
    pattern = metadata.of_layers("attention.sliding_window_pattern", num_layers)
    if pattern is None:
        period = int(number("attention.sliding_window_pattern", _COHERE2_PERIOD)) or 1
        pattern = [(layer + 1) % period != 0 for layer in range(num_layers)]
    found = _plain(metadata, eps="attention.layer_norm_epsilon")
    return {
        **{name: value for name, value in found.items() if name != "rms_norm_eps"},
        "layer_norm_eps": found["rms_norm_eps"],
        "layer_types": ["sliding_attention" if has_window else "full_attention" for has_window in pattern],
        "attention_bias": "blk.0.attn_q.bias" in metadata.tensors,
    }


CONFIGS: Mapping[str, tuple[str, str, Callable[[Metadata], dict[str, Any]]]] = {
    "cohere2": ("Cohere2ForCausalLM", "cohere2", _cohere2),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", _plain),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text", _gemma4),
    "gpt2": ("GPT2LMHeadModel", "gpt2", _gpt2),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss", _llama),
    "granite": ("GraniteForCausalLM", "granite", _llama),
    "llama": ("LlamaForCausalLM", "llama", _llama),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", _llama),
    "phi3": ("Phi3ForCausalLM", "phi3", _plain),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _plain),
    "qwen2vl": ("Qwen2ForCausalLM", "qwen2", _plain),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _plain),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe),
    "qwen3vl": ("Qwen3ForCausalLM", "qwen3", _plain),
    "qwen3vlmoe": ("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", _llama),
}
"""GGUF's architectures, with `architectures`, `model_type` and the further fields of config.json."""
