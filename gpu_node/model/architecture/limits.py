"""The table of what a model's files may say: the range of each size and factor, checked before code of a family runs.

`plan` and models of random weights have no other bound. Where a checkpoint has tensors, their shapes bound sizes too.
docs/MODELS.md has the table for readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

    def __str__(self) -> str:
        low, high = (
            f"{int(end):,}" if end == int(end) and end < _MAX_WRITTEN else f"{end:g}" for end in (self.low, self.high)
        )
        return f"a {'whole ' if self.is_whole else ''}number from {low} to {high}"

    def allows(self, value: object) -> bool:
        """Return whether a value is such a number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        return not self.is_whole or value == int(value)


_POSITIONS, _WIDTH, _HEADS, _EXPERTS = Limit(1, 1 << 22), Limit(0, 1 << 18), Limit(1, 1024), Limit(0, 1024)
_COUNT, _WINDOW, _GROUP = Limit(0, 1 << 20), Limit(0, (1 << 31) - 1), Limit(-1, 1 << 20)
_BASE, _SHARE, _EPSILON = (Limit(low, high, is_whole=False) for low, high in ((2, 1e15), (0, 1), (0, 1)))
_SCALE, _CAP, _FACTOR = (Limit(low, high, is_whole=False) for low, high in ((1e-6, 1e6), (0, 1e6), (1e-3, 1e6)))
_DIVISOR, _MAGNITUDE = Limit(1e-3, 1e31, is_whole=False), Limit(0, 1e3, is_whole=False)
_LISTS = frozenset(("eos_token_id", "short_factor", "long_factor", "factors", "weight_block_size"))
"""Fields that may be lists of such numbers."""

CONFIG_LIMITS: Mapping[str, Limit] = {
    "vocab_size": Limit(1, MAX_VOCAB),
    "hidden_size": Limit(1, 1 << 16),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "moe_intermediate_size"), _WIDTH),
    "num_hidden_layers": Limit(1, 1024),
    "num_attention_heads": _HEADS,
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "head_dim"), Limit(0, 1024)),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), _EXPERTS),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), _POSITIONS),
    "sliding_window": _WINDOW,
    **dict.fromkeys(("max_window_layers", "sliding_window_pattern", "no_rope_layer_interval"), _COUNT),
    "num_ln_in_parallel_attn": Limit(1, 2),
    "decoder_sparse_step": Limit(0, 1 << 20),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), _EPSILON),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), _BASE),
    **dict.fromkeys(("rotary_pct", "partial_rotary_factor"), _SHARE),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier"), _SCALE),
    **dict.fromkeys(("logits_scaling", "query_pre_attn_scalar"), _SCALE),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _CAP),
    "eos_token_id": Limit(-1, (1 << 31) - 1),
}
"""Fields of config.json. Zero stands for an absent value in some of them, and the record `ModelSpec` refuses it in
others."""
ROPE_LIMITS: Mapping[str, Limit] = {
    **{name: CONFIG_LIMITS[name] for name in ("rope_theta", "partial_rotary_factor")},
    "original_max_position_embeddings": _POSITIONS,
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), _FACTOR),
    "attention_factor": _FACTOR,
    **dict.fromkeys(("mscale", "mscale_all_dim"), _MAGNITUDE),
    **dict.fromkeys(("short_factor", "long_factor", "factors"), _DIVISOR),
}
"""Fields of `rope_parameters` and `rope_scaling`, and of those for one kind of layer."""
QUANTIZATION_LIMITS: Mapping[str, Limit] = {
    **dict.fromkeys(("group_size", "q_group_size"), _GROUP),
    "weight_block_size": Limit(1, 1 << 20),
}
"""Fields of `quantization_config`."""
GGUF_FIELDS: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), "head_dim"),
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "context_length": "max_position_embeddings",
    "attention.sliding_window": "sliding_window",
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"), "rms_norm_eps"),
    "rope.freq_base": "rope_theta",
}
"""Metadata of a GGUF file, without the architecture's name, and the fields of config.json whose limits they have. The
others are checked when they are fields of a config."""
GGUF_LIST_LIMITS: Mapping[str, int] = dict.fromkeys(
    ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores"), MAX_VOCAB
)
"""Lists whose limit is less than `MAX_LIST`."""
ADAPTER_LIMITS: Mapping[str, Limit] = {"r": Limit(1, 512), "lora_alpha": Limit(-1e6, 1e6, is_whole=False)}
"""Fields of adapter_config.json."""


def check_config(config: Mapping[str, Any], path: Path) -> None:
    """Check the numbers of a config.json. Raises ConfigError that names file, field and range."""
    _check_fields(config, CONFIG_LIMITS, f"{path}: ")
    for field in ("rope_parameters", "rope_scaling"):
        for name, rope in _objects(config, field, path):
            _check_fields(rope, ROPE_LIMITS, f"{path}: {name}.")
            for kind, inner in rope.items():
                if isinstance(inner, dict):
                    _check_fields(inner, ROPE_LIMITS, f"{path}: {name}.{kind}.")
    for field in ("quantization_config", "compression_config"):
        for name, settings in _objects(config, field, path):
            _check_fields(settings, QUANTIZATION_LIMITS, f"{path}: {name}.")
            size = settings.get("weight_block_size")
            if size is not None and (not isinstance(size, list) or len(size) != _BLOCK_DIMS):
                raise ConfigError(f"{path}: {name}.weight_block_size is {_shown(size)} but must be two whole numbers")


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Check the sizes in the metadata of a GGUF file. Raises ConfigError that names key and range."""
    architecture = metadata.get("general.architecture")
    limits = {f"{architecture}.{key}": CONFIG_LIMITS[field] for key, field in GGUF_FIELDS.items()}
    _check_fields(metadata, limits, "")


def check_adapter(config: Mapping[str, Any], name: str) -> None:
    """Check the numbers of an adapter_config.json. Raises ConfigError that names file, field and range."""
    for field, limit in ADAPTER_LIMITS.items():
        if config.get(field) is None:
            raise ConfigError(f"{name}: {field} is missing; it must be {limit}")
    _check_fields(config, ADAPTER_LIMITS, f"{name}: ")


def _objects(config: Mapping[str, Any], field: str, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a field's name and value, unless it is absent. Raises ConfigError for a value that is no object."""
    value = config.get(field)
    if value and not isinstance(value, dict):
        raise ConfigError(f"{path}: {field} is {_shown(value)} but must be an object")
    if value:
        yield field, value


def _check_fields(config: Mapping[str, Any], limits: Mapping[str, Limit], where: str) -> None:
    for name, limit in limits.items():
        found = config.get(name)
        values = found if isinstance(found, list) and name in _LISTS else [found]
        for value in values:
            if value is not None and not limit.allows(value):
                raise ConfigError(f"{where}{name} is {_shown(value)} but must be {limit}")


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
