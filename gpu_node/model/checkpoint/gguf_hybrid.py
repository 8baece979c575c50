"""Describe GGUF files of models with recurrent layers, whose metadata transformers does not read, or reads in part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.gguf_file import GgufHeader
from penstock.gpu_node.model.checkpoint.gguf_llama import (
    has_plain_tokenizer,
    special_ids,
    transformers_version,
    write_description,
)
from penstock.gpu_node.model.checkpoint.gguf_tokenizer import TOKENIZER_LISTS
from penstock.gpu_node.model.protocol import WrittenTokenizer

_DEFAULT_PERIOD = 4
"""Of Qwen3.5 every fourth layer has attention, if the file does not say which."""

_DEFAULT_EPSILON = 1e-5


def describe_hybrid(header: GgufHeader, folder: Path) -> WrittenTokenizer | None:
    """Write the config and tokenizer to a new `folder`. Return the tokenizer, or None for other architectures.

    header: with its `TOKENIZER_LISTS`. Raises ConfigError that names what of the metadata is missing or wrong.
    """
    architecture = header.metadata.get("general.architecture")
    known = _CONFIGS.get(str(architecture))
    if known is None:
        return None
    if not has_plain_tokenizer(header.metadata):
        needs = "tokenizer.ggml.model gpt2 with tokens, their types and merges"
        raise ConfigError(f"a GGUF file of the architecture {architecture} needs {needs}")
    name, config_of = known
    metadata = _Metadata(header)
    config = {
        **_common(metadata),
        **config_of(metadata),
        "architectures": [name],
        "dtype": "bfloat16",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "transformers_version": transformers_version(),
    }
    return write_description(header, config, folder)


class _Metadata:
    """The metadata of an architecture, by keys without its name."""

    def __init__(self, header: GgufHeader) -> None:
        self.all = header.metadata
        self.tensors = header.tensors
        self._prefix = f"{self.all['general.architecture']}."

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number; `default` if the file has none. Raises ConfigError for another value, or a missing one."""
        found = self.all.get(self._prefix + key, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ConfigError(f"{self._prefix}{key} of the metadata is {found!r} but must be a number")
        return found

    def optional(self, key: str) -> Any:
        """Return any value; None if the file has none."""
        return self.all.get(self._prefix + key)

    def of_layers(self, key: str, count: int) -> list[Any] | None:
        """Return the values for all layers; None if there is none, or one for all. Raises ConfigError."""
        found = self.all.get(self._prefix + key)
        if not isinstance(found, list):
            return None
        if len(found) < count or not all(isinstance(one, int) and one >= 0 for one in found):
            need = f"a whole number of at least 0 for each of {count} layers"
            raise ConfigError(f"{self._prefix}{key} of the metadata has {len(found)} values but must have {need}")
        return found[:count]

    @property
    def num_layers(self) -> int:
        """The layers, without those that only predict further tokens, which are skipped."""
        count = int(self.number("block_count")) - int(self.number("nextn_predict_layers", 0))
        if count < 1:
            raise ConfigError(
                f"{self._prefix}block_count of the metadata leaves {count} layers without predicting ones"
            )
        return count


def _common(metadata: _Metadata) -> dict[str, Any]:
    """Return the fields that all of these models have."""
    number, num_layers = metadata.number, metadata.num_layers
    kv_heads = metadata.of_layers("attention.head_count_kv", num_layers)
    ids = special_ids(metadata.all).items()
    return {
        "vocab_size": metadata.number("vocab_size", _vocab_size(metadata)),
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv") if kv_heads is None else max(kv_heads),
        "max_position_embeddings": number("context_length"),
        **{f"{name}_token_id": token_id for name, token_id in ids if token_id is not None},
    }


def _vocab_size(metadata: _Metadata) -> int:
    embedding = metadata.tensors.get("token_embd.weight")
    return len(metadata.all[TOKENIZER_LISTS[0]]) if embedding is None else embedding.shape[0]


def _qwen3_5(metadata: _Metadata) -> dict[str, Any]:
    number, num_layers = metadata.number, metadata.num_layers
    head_dim, value_heads = number("attention.key_length"), number("ssm.time_step_rank")
    recurrent = metadata.of_layers("attention.recurrent_layers", num_layers)
    if recurrent is None:
        period = number("full_attention_interval", _DEFAULT_PERIOD)
        recurrent = [(layer + 1) % period != 0 for layer in range(num_layers)]
    return {
        "head_dim": head_dim,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "linear_conv_kernel_dim": number("ssm.conv_kernel"),
        "linear_key_head_dim": number("ssm.state_size"),
        "linear_num_key_heads": number("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": number("ssm.inner_size") // value_heads,
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": number("rope.freq_base"),
            "partial_rotary_factor": number("rope.dimension_count") / head_dim,
        },
    }


def _qwen3_5_dense(metadata: _Metadata) -> dict[str, Any]:
    return {**_qwen3_5(metadata), "intermediate_size": metadata.number("feed_forward_length")}


def _qwen3_5_moe(metadata: _Metadata) -> dict[str, Any]:
    number = metadata.number
    return {
        **_qwen3_5(metadata),
        "moe_intermediate_size": number("expert_feed_forward_length"),
        "shared_expert_intermediate_size": number("expert_shared_feed_forward_length"),
        "num_experts": number("expert_count"),
        "num_experts_per_tok": number("expert_used_count"),
    }


def _lfm2(metadata: _Metadata) -> dict[str, Any]:
    number, num_layers = metadata.number, metadata.num_layers
    kv_heads = metadata.of_layers("attention.head_count_kv", num_layers) or [1] * num_layers
    return {
        "layer_types": ["full_attention" if count else "conv" for count in kv_heads],
        "conv_L_cache": number("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in metadata.tensors),
        "norm_eps": number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": number("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": number("rope.freq_base")},
    }


def _lfm2_moe(metadata: _Metadata) -> dict[str, Any]:
    number = metadata.number
    return {
        **_lfm2(metadata),
        "moe_intermediate_size": number("expert_feed_forward_length"),
        "num_dense_layers": number("leading_dense_block_count"),
        "num_experts": number("expert_count"),
        "num_experts_per_tok": number("expert_used_count"),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in metadata.tensors),
    }


def _nemotron_h(metadata: _Metadata) -> dict[str, Any]:
    number, num_layers, heads = metadata.number, metadata.num_layers, metadata.number("ssm.time_step_rank")
    eps = number("attention.layer_norm_epsilon", _DEFAULT_EPSILON)
    return {
        "layers_block_type": [_nemotron_kind(metadata, layer) for layer in range(num_layers)],
        "head_dim": number("attention.key_length"),
        "layer_norm_epsilon": number("attention.layer_norm_rms_epsilon", eps),
        "intermediate_size": _rows_of(metadata, "ffn_up.weight"),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in metadata.tensors),
        "mamba_num_heads": heads,
        "mamba_head_dim": number("ssm.inner_size") // heads,
        "ssm_state_size": number("ssm.state_size"),
        "n_groups": number("ssm.group_count"),
        "conv_kernel": number("ssm.conv_kernel"),
        "use_bias": any(name.endswith("ssm_in.bias") for name in metadata.tensors),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in metadata.tensors),
    }


def _nemotron_kind(metadata: _Metadata, layer: int) -> str:
    """Return the kind of a layer, which only its tensors say."""
    kinds = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    for name, kind in kinds.items():
        if f"blk.{layer}.{name}.weight" in metadata.tensors:
            return kind
    raise ConfigError(f"blk.{layer} has none of the tensors {', '.join(kinds)}, by which layers are told apart")


def _rows_of(metadata: _Metadata, ending: str) -> int:
    """Return the rows of the first tensor whose name has an ending; 0 without one."""
    return next((tensor.shape[0] for name, tensor in metadata.tensors.items() if name.endswith(f".{ending}")), 0)


def _nemotron_h_moe(metadata: _Metadata) -> dict[str, Any]:
    number = metadata.number
    return {
        **_nemotron_h(metadata),
        "moe_intermediate_size": number("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": number("expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.optional("moe_latent_size"),
        "n_routed_experts": number("expert_count"),
        "num_experts_per_tok": number("expert_used_count"),
        "n_group": number("expert_group_count", 1),
        "topk_group": number("expert_group_used_count", 1),
        "norm_topk_prob": bool(metadata.optional("expert_weights_norm")),
        "routed_scaling_factor": number("expert_weights_scale", 1.0),
    }


_CONFIGS: Mapping[str, tuple[str, Callable[[_Metadata], dict[str, Any]]]] = {
    "qwen35": ("Qwen3_5ForCausalLM", _qwen3_5_dense),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", _qwen3_5_moe),
    "lfm2": ("Lfm2ForCausalLM", _lfm2),
    "lfm2moe": ("Lfm2MoeForCausalLM", _lfm2_moe),
    "nemotron_h": ("NemotronHForCausalLM", _nemotron_h),
    "nemotron_h_moe": ("NemotronHForCausalLM", _nemotron_h_moe),
}
"""GGUF's architectures, with their names in config.json and the further fields of their configs."""
