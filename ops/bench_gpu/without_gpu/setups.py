"""The models and formats whose launches are recorded: those that are counted, and one of each family to compile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bench_gpu.models import spec_of as spec_of_shape
from penstock.gpu_node.model.architecture.families import family_of
from penstock.gpu_node.model.architecture.spec import ModelSpec


class Setup(NamedTuple):
    """What a runner's launches depend on, beside the shape of a step."""

    shape: str
    """A name of SHAPES or of FAMILIES."""
    quantization: str = "none"
    kv_dtype: torch.dtype = torch.bfloat16
    num_adapters: int = 0
    max_lora_rank: int = 8
    dtype: torch.dtype = torch.bfloat16
    deterministic: bool = False
    dependent: bool = False
    """Whether kernels of graphs start while the kernel ahead of them runs."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        config = FAMILIES.get(self.shape)
        return spec_of_shape(self.shape) if config is None else family_of(config).spec_of(config)

    @property
    def needs_float8(self) -> bool:
        """Whether only GPUs with float8 run it."""
        return self.quantization == "fp8" or self.kv_dtype == torch.float8_e4m3fn

    def __str__(self) -> str:
        """Return a key for tables and JSON."""
        adapters = " adapters" if self.num_adapters else ""
        kept = _SHORT[self.dtype] if self.quantization == "none" else self.quantization
        further = adapters + " deterministic" * self.deterministic + " dependent" * self.dependent
        return f"{self.shape} {kept} kv-{_SHORT[self.kv_dtype]}{further}"


_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


def _config(architecture: str, sizes: tuple[int, int, int, int, int], vocab: int, **rest: Any) -> dict[str, Any]:
    """sizes: hidden, intermediate, query heads, key heads, layers."""
    names = "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"
    given = dict(zip(names, sizes, strict=True)) | {"architectures": [architecture], "vocab_size": vocab}
    usual = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 8192}
    return {**usual, **given, **rest}


_GEMMA: dict[str, Any] = {"head_dim": 256, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
    "logits_scaling": 16.0,
}
FAMILIES: Mapping[str, dict[str, Any]] = {
    "falcon-7b": _config("FalconForCausalLM", (4544, 18_176, 71, 1, 2), 65_024),
    "falcon-rw-1b": _config(
        *("FalconForCausalLM", (2048, 8192, 32, 32, 2), 50_304), alibi=True, multi_query=False, parallel_attn=False
    )
    | {"bias": True},
    "gemma2-9b": _config("Gemma2ForCausalLM", (3584, 14_336, 16, 8, 2), 256_000, sliding_window=4096, **_GEMMA)
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3-4b": _config("Gemma3ForCausalLM", (2560, 10_240, 8, 4, 6), 262_208, sliding_window=1024, **_GEMMA),
    "pythia-6.9b": _config("GPTNeoXForCausalLM", (4096, 16_384, 32, 32, 2), 50_432, rotary_pct=0.25)
    | {"hidden_act": "gelu", "layer_norm_eps": 1e-5},
    "granite-3-8b": _config("GraniteForCausalLM", (4096, 12_800, 32, 8, 2), 49_155, **_GRANITE),
    "mistral-7b": _config("MistralForCausalLM", (4096, 14_336, 32, 8, 2), 32_000, sliding_window=4096),
    "olmo2-7b": _config("Olmo2ForCausalLM", (4096, 11_008, 32, 32, 2), 100_352),
    "phi3-mini": _config("Phi3ForCausalLM", (3072, 8192, 32, 32, 2), 32_064, sliding_window=2047),
    "phi4": _config("Phi3ForCausalLM", (5120, 17_920, 40, 10, 2), 100_352),
    "qwen2.5-0.5b": _config("Qwen2ForCausalLM", (896, 4864, 14, 2, 2), 151_936, tie_word_embeddings=True),
    "qwen2.5-7b": _config("Qwen2ForCausalLM", (3584, 18_944, 28, 4, 2), 152_064),
    "smollm3-3b": _config("SmolLM3ForCausalLM", (2048, 11_008, 16, 4, 4), 128_256),
}
"""Models of all families that the GPU runner supports, with the sizes of their `config.json` and as many layers as
differ from each other."""
_FLOAT8 = torch.float8_e4m3fn
COUNTED = [
    Setup(shape, quantization, kv_dtype)
    for shape in ("llama-8b", "qwen3-0.6b")
    for quantization in ("none", "int8", "fp8", "int4")
    for kv_dtype in (torch.bfloat16, _FLOAT8)
] + [Setup("llama-8b", num_adapters=2, dependent=dependent) for dependent in (False, True)]
"""Whose launches per layer and step are counted."""
_FORMATS = ("none", torch.bfloat16), ("int8", torch.int8), ("fp8", _FLOAT8), ("int4", torch.bfloat16)
COMPILED = [
    *(Setup(family, quantization, kv_dtype) for family in FAMILIES for quantization, kv_dtype in _FORMATS),
    *(Setup("llama-8b", kv_dtype=kv_dtype, deterministic=True) for kv_dtype in (torch.bfloat16, torch.int8)),
    Setup("llama-8b", deterministic=True, dependent=True),
    *(Setup("llama-8b", *formats, dependent=True) for formats in _FORMATS[1:]),
    *(Setup(family, dependent=True) for family in ("gemma2-9b", "olmo2-7b")),
    Setup("llama-1b"),
    Setup("llama-8b", kv_dtype=torch.int8),
    Setup("llama-8b", dtype=torch.float16, kv_dtype=torch.float16),
    *(Setup(shape, num_adapters=2, max_lora_rank=rank) for shape in ("llama-8b", "phi4") for rank in (64, 512)),
]
"""Further setups, whose launches are only compiled."""
