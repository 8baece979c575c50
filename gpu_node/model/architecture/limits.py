"""The table of what a model's files may say: the range of each size and factor, checked before code of a family runs.

`plan` and models of random weights have no other bound. Where a checkpoint has tensors, their shapes bound sizes too.
`make fields` writes it to docs/SIZES.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError

MAX_VOCAB = 1 << 20
MAX_DESCRIPTION_BYTES = 16 << 20
"""Of a JSON file that describes a model, its tokenizer or an adapter. Python takes up to 32 bytes for each."""
MAX_INDEX_BYTES = 32 << 20
MAX_HEADER_BYTES = 32 << 20
"""Of a safetensors file's header."""
MAX_TENSORS = 1 << 20
MAX_TENSOR_DIMS = 8
MAX_DIM = 1 << 48
MAX_PARTS = 10_000
"""Files of one checkpoint."""
MAX_LIST = 1 << 22
"""Values of a list in the metadata of a GGUF file."""
MAX_TEXT_BYTES = 16 << 20
"""Of a text there."""
MAX_TOKENIZER_BYTES = 128 << 20
MAX_TEMPLATE_BYTES = 1 << 20
MAX_TOKENIZER_ENTRIES = 2 * MAX_VOCAB
"""Keys or lists of such a JSON file, which are more than its tokens; five times as many texts."""
MAX_FRAME_TOKENS = 1024
"""Special tokens that a tokenizer puts around a text."""
MAX_GROWTH = 32
"""Characters that a tokenizer's normalizer or decoder may make of one."""

MAX_LAYERS = 1024
MAX_EXPERT_MATRICES = 1 << 17
"""Layers times experts."""
MAX_ROPE_NUMBERS = 1 << 29
"""Positions times rotated channels: 2 GiB of cosines and sines."""
MAX_POSITION_NUMBERS = 1 << 26
"""The same where each position has numbers of its own: dynamic RoPE scaling, and heads with position biases (ALiBi)."""

_SHOWN_CHARS = 80
_BLOCK_DIMS = 2
_MAX_WRITTEN = 1e12
"""Larger numbers are written with an exponent."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The range of a number in a model's file, ends included."""

    low: float
    high: float
    is_whole: bool = True
    or_text: bool = False
    """Whether a text is allowed as well."""

    def __str__(self) -> str:
        low, high = (
            f"{int(end):,}" if end == int(end) and end < _MAX_WRITTEN else f"{end:g}" for end in (self.low, self.high)
        )
        return f"a {'whole ' if self.is_whole else ''}number from {low} to {high}{' or a text' if self.or_text else ''}"

    def allows(self, value: object) -> bool:
        """Return whether a value is such a number."""
        if self.or_text and isinstance(value, str):
            return True
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        return not self.is_whole or value == int(value)


@dataclass(frozen=True, slots=True)
class ValueKind:
    """The type of a value in a model's file that is no number."""

    name: str
    types: tuple[type, ...]

    def __str__(self) -> str:
        return self.name

    def allows(self, value: object) -> bool:
        """Return whether a value is of this type."""
        return isinstance(value, self.types) or (bool in self.types and value in (0, 1))


_POSITIONS, _WIDTH, _HEADS, _EXPERTS = Limit(1, 1 << 22), Limit(0, 1 << 18), Limit(1, 1024), Limit(0, 1024)
_ORIGINAL = Limit(2, 1 << 22)
"""LongRoPE divides by its logarithm."""
_COUNT, _WINDOW, _GROUP = Limit(0, 1 << 20), Limit(0, (1 << 31) - 1), Limit(-1, 1 << 20)
_BASE, _SHARE, _EPSILON = (Limit(low, high, is_whole=False) for low, high in ((2, 1e15), (0, 1), (0, 1)))
_SCALE, _FACTOR = (Limit(low, high, is_whole=False) for low, high in ((1e-6, 1e6), (1e-3, 1e6)))
_DIVISOR, _MAGNITUDE = Limit(1e-3, 1e31, is_whole=False), Limit(0, 1e3, is_whole=False)
_FLAG, _TEXT, _OBJECT = (
    ValueKind("true or false", (bool,)),
    ValueKind("a text", (str,)),
    ValueKind("an object", (dict,)),
)
_LISTS = frozenset(("eos_token_id", "short_factor", "long_factor", "factors", "weight_block_size"))
"""Fields that may be lists of such numbers."""

CONFIG_LIMITS: Mapping[str, Limit] = {
    "vocab_size": Limit(1, MAX_VOCAB),
    "hidden_size": Limit(1, 1 << 16),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "moe_intermediate_size"), _WIDTH),
    "moe_shared_expert_intermediate_size": _WIDTH,
    **dict.fromkeys(("block_ff_dim", "shared_expert_intermediate_size", "shared_intermediate_size"), _WIDTH),
    "num_hidden_layers": Limit(1, MAX_LAYERS),
    "num_attention_heads": _HEADS,
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "head_dim"), Limit(0, 1024)),
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads"), Limit(0, 1024)),
    **dict.fromkeys(("n_embd",), Limit(1, 1 << 16)),
    "n_positions": _POSITIONS,
    "n_layer": Limit(1, MAX_LAYERS),
    "n_head": _HEADS,
    "n_inner": _WIDTH,
    "num_kv_shared_layers": Limit(0, MAX_LAYERS),
    "hidden_size_per_layer_input": Limit(0, 1 << 12),
    "vocab_size_per_layer_input": Limit(1, MAX_VOCAB),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "n_routed_experts"), _EXPERTS),
    "top_k_experts": _EXPERTS,
    "max_position_embeddings": _POSITIONS,
    "original_max_position_embeddings": _ORIGINAL,
    "sliding_window": _WINDOW,
    **dict.fromkeys(("max_window_layers", "no_rope_layer_interval"), _COUNT),
    "sliding_window_pattern": Limit(0, 1 << 20, or_text=True),
    "num_ln_in_parallel_attn": Limit(1, 2),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), _HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), _HEADS),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_L_cache", "mamba_d_conv", "conv_kernel"), Limit(2, 64)),
    **dict.fromkeys(("mamba_n_heads", "mamba_n_groups", "mamba_d_state"), _HEADS),
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"), _HEADS),
    "mamba_expand": Limit(1, 64),
    **dict.fromkeys(("full_attention_interval", "block_multiple_of"), Limit(1, 1 << 20)),
    **dict.fromkeys(("block_ffn_dim_multiplier", "routed_scaling_factor"), _SCALE),
    **dict.fromkeys(("num_dense_layers", "num_nextn_predict_layers"), _COUNT),
    "decoder_sparse_step": Limit(0, 1 << 20),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), _EPSILON),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), _BASE),
    **dict.fromkeys(("rotary_pct", "partial_rotary_factor"), _SHARE),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier"), _SCALE),
    **dict.fromkeys(("logits_scaling", "logit_scale", "query_pre_attn_scalar"), _SCALE),
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha"), _SCALE),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _SCALE),
    "eos_token_id": Limit(-1, (1 << 31) - 1),
}
"""Fields of config.json. Zero stands for an absent value in some of them, and the record `ModelSpec` refuses it in
others."""
_NEVER_NULL = frozenset(
    ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
) | {
    *("max_position_embeddings", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "query_pre_attn_scalar"),
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
}
_NULL_IS_A_VALUE = frozenset(("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")) | {
    *("head_dim", "num_key_value_heads", "num_kv_heads")
}
"""Fields in which null is something else than an absent field, whose default is the family's."""
CONFIG_KINDS: Mapping[str, ValueKind] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "bias", "tie_word_embeddings", "use_sliding_window"), _FLAG),
    **dict.fromkeys(("new_decoder_architecture", "parallel_attn", "multi_query", "alibi", "norm_topk_prob"), _FLAG),
    **dict.fromkeys(("use_parallel_residual", "use_bias", "use_qkv_bias", "qk_layernorm"), _FLAG),
    "use_bidirectional_attention": ValueKind("true, false or a text", (bool, str)),
    **dict.fromkeys(("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention"), _FLAG),
    **dict.fromkeys(("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"), _FLAG),
    **dict.fromkeys(("conv_bias", "block_auto_adjust_ff_dim", "tie_embedding", "use_expert_bias"), _FLAG),
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias", "use_bias", "use_conv_bias"), _FLAG),
}
_LAYER_LISTS: Mapping[str, tuple[object, ...]] = {
    "layer_types": (
        *("full_attention", "sliding_attention", "linear_attention", "conv", "mamba", "attention"),
        *("moe", "mlp"),
    ),
    "no_rope_layers": (0, 1),
}
"""Fields with a value for each layer, and the values that they may have."""
ROPE_LIMITS: Mapping[str, Limit] = {
    **{name: CONFIG_LIMITS[name] for name in ("rope_theta", "partial_rotary_factor")},
    "original_max_position_embeddings": _ORIGINAL,
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), _FACTOR),
    "attention_factor": _FACTOR,
    "llama_4_scaling_beta": Limit(0, 1e3, is_whole=False),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _MAGNITUDE),
    **dict.fromkeys(("short_factor", "long_factor", "factors"), _DIVISOR),
}
"""Fields of `rope_parameters` and `rope_scaling`, and of those for one kind of layer."""
ROPE_KINDS: Mapping[str, ValueKind] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    "truncate": _FLAG,
    **dict.fromkeys(("full_attention", "sliding_attention"), _OBJECT),
}
QUANTIZATION_LIMITS: Mapping[str, Limit] = {
    **dict.fromkeys(("group_size", "q_group_size"), _GROUP),
    "weight_block_size": Limit(1, 1 << 20),
    **dict.fromkeys(("bits", "w_bit"), Limit(1, 64)),
}
"""Fields of `quantization_config`."""
QUANTIZATION_KINDS: Mapping[str, ValueKind] = {
    **dict.fromkeys(("quant_method", "quant_algo", "format", "version", "checkpoint_format"), _TEXT),
    **dict.fromkeys(("config_groups", "sparsity_config", "transform_config", "quantization"), _OBJECT),
}
GGUF_FIELDS: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), "head_dim"),
    **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), "head_dim"),
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "leading_dense_block_count": "num_dense_layers",
    "nextn_predict_layers": "num_nextn_predict_layers",
    "full_attention_interval": "full_attention_interval",
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "context_length": "max_position_embeddings",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "attention.sliding_window": "sliding_window",
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"), "rms_norm_eps"),
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa"), "rope_theta"),
    **{name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Metadata of a GGUF file, without the architecture's name, and the fields of config.json whose limits they have."""
GGUF_ROPE_FIELDS: Mapping[str, str] = {
    "rope.scaling.factor": "factor",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
"""The same of `rope_parameters`."""
_ZERO_IS_NONE = frozenset(("expert_count", "expert_used_count", "expert_feed_forward_length")) | {
    *("expert_shared_feed_forward_length", "leading_dense_block_count", "nextn_predict_layers"),
    *("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    *("attention.shared_kv_layers", "embedding_length_per_layer_input"),
    *("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
}
"""Metadata that may be 0. llama.cpp takes a limit of 0 for none."""
GGUF_LIST_LIMITS: Mapping[str, int] = dict.fromkeys(
    ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores"), MAX_VOCAB
)
"""Lists whose limit is less than `MAX_LIST`."""
ADAPTER_LIMITS: Mapping[str, Limit] = {"r": Limit(1, 512), "lora_alpha": Limit(-1e6, 1e6, is_whole=False)}
"""Fields of adapter_config.json."""


def checked_config(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a config.json without fields that are null, which is as if they were absent.

    Each number, type and list of layers is checked here, so that no family does it again. Whole numbers that are
    written as 2.0 become 2. Raises ConfigError that names file, field and range.
    """
    found = _checked(config, {**CONFIG_LIMITS, **CONFIG_KINDS}, f"{path}: ")
    of_rope: Mapping[str, Limit | ValueKind] = {**ROPE_LIMITS, **ROPE_KINDS}
    of_numbers: Mapping[str, Limit | ValueKind] = {**QUANTIZATION_LIMITS, **QUANTIZATION_KINDS}
    for field in ("rope_parameters", "rope_scaling"):
        if rope := _object(found, field, path):
            found[field] = _checked(rope, of_rope, f"{path}: {field}.")
            for kind, inner in rope.items():
                if isinstance(inner, dict):
                    found[field][kind] = _checked(inner, of_rope, f"{path}: {field}.{kind}.")
    for field in ("quantization_config", "compression_config"):
        if settings := _object(found, field, path):
            found[field] = _checked(settings, of_numbers, f"{path}: {field}.")
            size = settings.get("weight_block_size")
            if size is not None and (not isinstance(size, list) or len(size) != _BLOCK_DIMS):
                raise ConfigError(f"{path}: {field}.weight_block_size is {_shown(size)} but must be two whole numbers")
    _check_layers(found, path)
    return found


_ANY_NUMBER = Limit(-(1 << 31), 1 << 22)
_MAX_NESTING = 8


def check_all_numbers(config: Mapping[str, Any], path: Path) -> None:
    """Check each whole number of a config.json of any architecture, also in objects and lists of it.

    A field that is known has its own range. Raises ConfigError that names file, field and range.
    """
    _check_numbers(config, f"{path}: ", 0)


def _check_numbers(values: Mapping[str, Any], where: str, depth: int) -> None:
    if depth > _MAX_NESTING:
        raise ConfigError(f"{where[:200]} is nested more than {_MAX_NESTING} deep")
    for name, value in values.items():
        known = CONFIG_LIMITS.get(name)
        limit = known if known is not None and known.is_whole else _ANY_NUMBER
        items = value if isinstance(value, list) else [value]
        if len(items) > MAX_LIST:
            raise ConfigError(f"{where}{name} has {len(items):,} values, at most {MAX_LIST:,} are read")
        for one in items:
            if isinstance(one, dict):
                _check_numbers(one, f"{where}{name}.", depth + 1)
            elif isinstance(one, int) and not isinstance(one, bool) and not limit.allows(one):
                raise ConfigError(f"{where}{name} is {_shown(one)} but must be {limit}")


def _check_layers(config: Mapping[str, Any], path: Path) -> None:
    num_layers = config.get("num_hidden_layers")
    for field, allowed in _LAYER_LISTS.items():
        values = config.get(field) or []
        is_list = isinstance(values, list) and all(value in allowed for value in values)
        if not is_list or (values and len(values) != num_layers):
            must = f"must have {' or '.join(map(str, allowed))} for each layer; num_hidden_layers is {num_layers}"
            if isinstance(values, list) and len(values) == num_layers:
                at = next(i for i, value in enumerate(values) if value not in allowed)
                must += f", and layer {at} has {_shown(values[at])}"
            raise ConfigError(f"{path}: {field} is {_shown(values)} but {must}")


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Check the numbers in the metadata of a GGUF file. Raises ConfigError that names key and range."""
    name = metadata.get("general.architecture")
    limits = {key: CONFIG_LIMITS[field] for key, field in GGUF_FIELDS.items()}
    limits |= {key: ROPE_LIMITS[field] for key, field in GGUF_ROPE_FIELDS.items()}
    lows = {key: 0 if key in _ZERO_IS_NONE else max(limit.low, int(limit.is_whole)) for key, limit in limits.items()}
    # The values of lists for all layers are checked where they are read.
    metadata = {key: value for key, value in metadata.items() if not isinstance(value, list)}
    _checked(metadata, {f"{name}.{key}": replace(limits[key], low=low) for key, low in lows.items()}, "")
    count = "attention.head_count"
    _require_multiple(metadata, f"{name}.{count}", f"{name}.{count}_kv")
    if metadata.get(f"{name}.attention.key_length") is None:
        _require_multiple(metadata, f"{name}.embedding_length", f"{name}.{count}")
    keys, values = (metadata.get(f"{name}.attention.{which}_length") for which in ("key", "value"))
    if keys is not None and values is not None and keys != values:
        said = f"{name}.attention.key_length is {keys} and {name}.attention.value_length is {values}"
        raise ConfigError(f"{said}, but keys and values must have one length")


def _require_multiple(metadata: Mapping[str, Any], key: str, divisor: str) -> None:
    number, by = metadata.get(key), metadata.get(divisor)
    if number is not None and by is not None and number % by:
        raise ConfigError(f"{key} is {number} but must be a multiple of {divisor}, which is {by}")


def check_adapter(config: Mapping[str, Any], name: str) -> None:
    """Check the numbers of an adapter_config.json. Raises ConfigError that names file, field and range."""
    for field, limit in ADAPTER_LIMITS.items():
        if config.get(field) is None:
            raise ConfigError(f"{name}: {field} is missing; it must be {limit}")
    _checked(config, {**ADAPTER_LIMITS, "use_rslora": _FLAG}, f"{name}: ")


def _object(config: Mapping[str, Any], field: str, path: Path) -> Mapping[str, Any] | None:
    """Return a field's value, None for an absent or empty one. Raises ConfigError for a value that is no object."""
    value = config.get(field)
    if value and not isinstance(value, dict):
        raise ConfigError(f"{path}: {field} is {_shown(value)} but must be an object")
    return value or None


def _checked(config: Mapping[str, Any], limits: Mapping[str, Limit | ValueKind], where: str) -> dict[str, Any]:
    found = dict(config)
    for name, limit in limits.items():
        value = found.get(name)
        if value is None and name not in _NULL_IS_A_VALUE and name not in _NEVER_NULL:
            found.pop(name, None)
        if name not in found or (value is None and name in _NULL_IS_A_VALUE):
            continue
        values: list[Any] = value if isinstance(value, list) and name in _LISTS else [value]
        for one in values:
            if not limit.allows(one):
                raise ConfigError(f"{where}{name} is {_shown(one)} but must be {limit}")
        if isinstance(limit, Limit) and limit.is_whole:
            whole = [int(one) for one in values]
            found[name] = whole if value is values else whole[0]
    return found


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def check_positions(num_positions: int, channels: int, *, has_own: bool) -> None:
    """Refuse tables of positions that take gigabytes. has_own: each position has numbers of its own.

    channels: the rotated channels of a head, or the heads with position biases. Raises ConfigError.
    """
    most = (MAX_POSITION_NUMBERS if has_own else MAX_ROPE_NUMBERS) // max(1, channels)
    if num_positions > min(most, int(_POSITIONS.high)):
        raise ConfigError(
            f"max_position_embeddings gives {num_positions:,} positions (RoPE scaling included), but a model with "
            f"{channels} numbers for each may have {min(most, int(_POSITIONS.high)):,}"
        )
