"""The configs of GGUF files of models with attention in every layer, as config.json has them.

Settings that are read again at each start, such as the scaling of RoPE, are in gguf_conversion.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.gpu_node.model.checkpoint.gguf_metadata import Metadata

_THETA = 10_000.0
"""The base of RoPE where a file has none, as in llama.cpp."""
_GEMMA3_THETA = 1_000_000.0


def _llama(metadata: Metadata) -> dict[str, Any]:
    """Return the config of Llama and its relatives. A head is as wide as what RoPE turns, unless the file says more."""
    turned = metadata.optional("rope.dimension_count")
    return {**({} if turned is None else {"head_dim": turned}), **_plain(metadata)}


def _plain(metadata: Metadata) -> dict[str, Any]:
    number, head_dim = metadata.number, metadata.optional("attention.key_length")
    theta = number("rope.freq_base", _THETA)
    return {
        # Mixtures may lack it.
        "intermediate_size": number("feed_forward_length", metadata.optional("expert_feed_forward_length")),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
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


CONFIGS: Mapping[str, tuple[str, str, Callable[[Metadata], dict[str, Any]]]] = {
    "gemma2": ("Gemma2ForCausalLM", "gemma2", _plain),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _gemma3),
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
