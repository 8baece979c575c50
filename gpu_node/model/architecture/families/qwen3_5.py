"""Qwen 3.5: the gated delta rule in three of four layers, and attention with output gates in the others.

Models with an image encoder have the text model inside. Only that is read: images are refused with the chat, and the
tensors of the encoder and of the further prediction layer (`mtp.`) are skipped.
"""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import (
    HEAD_NORMS,
    LAYER,
    Config,
    biased_attention,
    kinds_of,
    layers_of,
    llama_layer,
    llama_mlp,
    llama_model,
    max_position_of,
    rope_of,
    with_prefix,
)
from penstock.gpu_node.model.architecture.recurrent import DeltaRule
from penstock.gpu_node.model.architecture.spec import Family, LayerSpec, ModelSpec

_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DEFAULT_PERIOD = 4
_DEFAULT_ROTARY = 0.25
_LINEAR = LAYER + "linear_attn."


def _qwen3_5(config: Config) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    rope_settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = rope_settings.get("partial_rotary_factor", config.get("partial_rotary_factor", _DEFAULT_ROTARY))
    rope = rope_of(config, int(config["head_dim"] * share))
    period = config.get("full_attention_interval") or _DEFAULT_PERIOD

    def layer(kind: str) -> LayerSpec:
        mlp = llama_mlp(config)
        if kind == "full_attention":
            return llama_layer(biased_attention(config, rope=rope, output_gate=True, **HEAD_NORMS), mlp)
        return llama_layer(None, mlp, recurrence=_delta_rule(config))

    kinds = kinds_of(
        config,
        lambda at: "linear_attention" if (at + 1) % period else "full_attention",
        ("linear_attention", "full_attention"),
    )
    return llama_model(
        config, layers_of(config, kinds, layer), norm_offset=1.0, max_position=max_position_of(config, rope)
    )


def _delta_rule(config: Config) -> DeltaRule:
    return DeltaRule(
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        taps=config["linear_conv_kernel_dim"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        inputs=(_LINEAR + "in_proj_qkv", _LINEAR + "in_proj_z"),
        learning_gate=_LINEAR + "in_proj_b",
        decay_gate=_LINEAR + "in_proj_a",
        convolution=_LINEAR + "conv1d",
        decay_log=_LINEAR + "A_log",
        decay_bias=_LINEAR + "dt_bias",
        norm=_LINEAR + "norm",
        out=_LINEAR + "out_proj",
    )


FAMILIES = (
    Family("Qwen3_5ForCausalLM", _qwen3_5),
    Family(
        "Qwen3_5ForConditionalGeneration",
        lambda config: with_prefix(_qwen3_5(config), "model.language_model."),
        has_text_config=True,
    ),
)
