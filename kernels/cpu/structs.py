"""The enums and structs that the compiled kernels read: formats, sizes of a model, one step, parts of LoRA adapters."""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PANEL = 32
"""Rows of a matrix that the kernels keep and compute together (kPanel of src/weights/weights.h)."""


class Format(IntEnum):
    """Storage format of a matrix; a group is 32 columns. See src/weights/weights.h.

    INT8_GROUP and INT4_GROUP are GGUF's Q8_0 and Q4_1.
    """

    BF16 = 0
    INT8 = 1
    INT8_GROUP = 2
    INT4_GROUP = 3
    Q4_K = 4
    Q5_K = 5
    Q6_K = 6
    Q2_K = 7
    Q3_K = 8
    IQ4_NL = 9
    IQ4_XS = 10
    Q4_0 = 11
    Q5_0 = 12
    Q5_1 = 13
    MXFP4 = 14


class Source(IntEnum):
    """Format of the checkpoint rows that a matrix is packed from."""

    FLOAT32 = 0
    BFLOAT16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 4
    Q4_K = 5
    Q5_K = 6
    Q6_K = 7
    FLOAT16 = 8
    Q2_K = 9
    Q3_K = 10
    IQ4_NL = 11
    IQ4_XS = 12
    Q5_0 = 13
    Q5_1 = 14
    MXFP4 = 15


class RowLayout(IntEnum):
    """Where rows go in a fused matrix: one after the other, or interleaved with those of another part."""

    PLAIN = 0
    FIRST_HALF = 1
    SECOND_HALF = 2


class KvFormat(IntEnum):
    """Storage format of keys and values. See src/attention/kv_cache.h."""

    BF16 = 0
    INT8 = 1
    F16 = 2


STORED_FORMATS = frozenset(weights for weights in Format if weights.name in Source.__members__)
"""Formats that keep the numbers of GGUF's blocks. They hold only rows that are stored in the same format."""

Run = tuple[Format, int]
"""Consecutive rows of a matrix in one format, and their number."""


class NativeSpec(c.Structure):
    """Shapes and constants of a decoder or an encoder. Mirrors Spec of src/weights/spec.h."""

    _fields_ = [
        *((name, c.c_int32) for name in ("num_layers", "hidden", "vocab", "max_position")),
        ("norm_eps", c.c_float),
        *((name, c.c_int32) for name in ("block_size", "num_blocks", "kv_format", "hadamard_rotation")),
        *((name, c.c_int32) for name in ("has_layer_norms", "num_ropes")),
        *((name, c.c_float) for name in ("embedding_scale", "residual_scale", "logit_scale", "logit_cap")),
        *((name, c.c_int32) for name in ("rank", "num_ranks", "num_state_slots", "token_size")),
        *((name, c.c_float) for name in ("token_scale", "token_projection_scale")),
        *((name, c.c_int32) for name in ("is_encoder", "has_final_norm", "has_embedding_norm", "num_query_growths")),
        ("num_window_blocks", c.c_int32),
    ]


class NativeLayer(c.Structure):
    """Shapes and constants of a layer. Mirrors LayerSpec of src/weights/spec.h."""

    _fields_ = [
        *((name, c.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "window", "rope", "rotary_dim")),
        *((name, c.c_int32) for name in ("has_position_biases", "joins_head_norms")),
        *((name, c.c_float) for name in ("score_scale", "score_cap")),
        *((name, c.c_int32) for name in ("intermediate", "activation", "is_gated")),
        *((name, c.c_float) for name in ("gate_limit", "gate_slope")),
        *((name, c.c_int32) for name in ("num_experts", "experts_per_token", "normalizes_experts")),
        *((name, c.c_int32) for name in ("is_parallel", "has_attention_norm", "has_mlp_norm")),
        *((name, c.c_int32) for name in ("has_attention_output_norm", "has_mlp_output_norm", "has_output_gate")),
        *((name, c.c_int32) for name in ("taps", "channels", "key_heads", "value_heads", "key_dim", "value_dim")),
        ("head_norm_eps", c.c_float),
        *((name, c.c_int32) for name in ("is_state_space", "tiles_values")),
        *((name, c.c_int32) for name in ("shared_experts", "shares_by_sigmoid")),
        ("expert_scale", c.c_float),
        *((name, c.c_int32) for name in ("source", "has_value_norm", "token_activation")),
        *((name, c.c_int32) for name in ("has_attention_sum_norm", "has_mlp_sum_norm", "has_head_gates")),
        *((name, c.c_float) for name in ("attention_factor", "mixer_factor", "state_gate_factor")),
        *((name, c.c_float) for name in ("duration_factor", "gate_factor", "mlp_factor")),
        *((name, c.c_int32) for name in ("query_growth", "expert_intermediate", "has_router_norm", "is_windowed")),
    ]


class NativeShapes(NamedTuple):
    """A decoder's shapes and those of its layers."""

    spec: NativeSpec
    layers: c.Array[NativeLayer]


SAMPLING_COLUMNS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("top_k", "choice", "position", "seed"),
)
"""The arrays of a plan with one number for each sampling row, in the order of the struct."""


class NativePlan(c.Structure):
    """One step: counts, and addresses of arrays. Mirrors Plan of src/model/plan.h."""

    _fields_ = [
        *((name, c.c_int32) for name in ("num_tokens", "num_seqs", "num_samples", "block_table_stride")),
        *((name, c.c_void_p) for name in ("token_ids", "positions", "query_starts", "block_tables", "sample_tokens")),
        *((name, c.c_void_p) for name in SAMPLING_COLUMNS),
        *((name, c.c_void_p) for name in ("seen", "num_seen", "num_seen_prompt", "banned", "num_banned")),
        *((name, c.c_void_p) for name in ("biased", "biases", "num_biased", "masks", "masks_written")),
        ("adapters", c.c_void_p),
        ("num_copies", c.c_int32),
        *((name, c.c_void_p) for name in ("copies", "tokens", "logits", "times_ms")),
        *((name, c.c_void_p) for name in ("num_logprobs", "logprob_ids", "logprobs")),
        *((name, c.c_int32) for name in ("logprobs_width", "num_scored")),
        *((name, c.c_void_p) for name in ("scored_tokens", "score_targets", "num_score_logprobs")),
        *((name, c.c_void_p) for name in ("score_ids", "scores")),
        *((name, c.c_int32) for name in ("scores_width", "num_pooled")),
        *((name, c.c_void_p) for name in ("pooled_tokens", "hidden")),
        *((name, c.c_void_p) for name in ("state_reads", "state_writes", "state_saves")),
        ("num_saves", c.c_int32),
        *((name, c.c_void_p) for name in ("token_inputs", "token_types", "window_tables", "window_copies")),
        ("num_window_copies", c.c_int32),
    ]


_LINE = 64


class RankState(c.Structure):
    """What one rank shows to the others. Mirrors RankState of src/ranks/exchange.h; times are in nanoseconds."""

    _fields_ = [
        ("meetings", c.c_uint64),
        *((name, c.c_int64) for name in ("waited_ns", "exchanged_ns")),
        ("is_waiting", c.c_uint32),
        ("padding", c.c_uint8 * (_LINE - 28)),
    ]


MAX_RANKS = 64


class _SharedWord(c.Structure):
    _fields_ = [("value", c.c_uint32), ("sleepers", c.c_uint32), ("padding", c.c_uint8 * (_LINE - 8))]


class _Line(c.Structure):
    _fields_ = [("value", c.c_uint32), ("padding", c.c_uint8 * (_LINE - 4))]


class ExchangeState(c.Structure):
    """The words at which the ranks of a group meet. Mirrors ExchangeState of src/ranks/exchange.h."""

    _fields_ = [
        *((name, _SharedWord) for name in ("step", "generation")),
        *((name, _Line) for name in ("arrived", "aborted", "refused")),
        ("completed_ns", c.c_int64),
        ("padding", c.c_uint8 * (_LINE - 8)),
        ("ranks", RankState * MAX_RANKS),
    ]


class LowRankPart(c.Structure):
    """Mirrors LowRankPart of src/gemm/low_rank.h."""

    _fields_ = [
        *((name, c.c_int32) for name in ("layout", "first", "count", "rank")),
        *((name, c.c_void_p) for name in ("down", "up")),
    ]


class LowRankRows(NamedTuple):
    """A LoRA adapter's part for rows of a matrix: up @ down. down: [rank, columns]; up: [rows, rank]; contiguous."""

    layout: RowLayout
    first: int
    down: NDArray[np.float32]
    up: NDArray[np.float32]


def low_rank_table(parts: Sequence[LowRankRows]) -> c.Array[LowRankPart]:
    """Return the parts as an array of C structs, valid only as long as `parts`."""
    table = (LowRankPart * len(parts))()
    for row, (layout, first, down, up) in zip(table, parts, strict=True):
        row.layout, row.first, row.count, row.rank = layout, first, len(up), len(down)
        row.down, row.up = down.ctypes.data, up.ctypes.data
    return table


class KernelError(Exception):
    """A native call failed; the text gives the reason."""


class AbiError(KernelError):
    """The library was compiled from different sources."""


def check_sizes(library: Any, structs: Mapping[str, type[c.Structure]]) -> None:
    """Compare each struct's size with the library's `penstock_sizeof_<name>()`. Raises AbiError if they differ."""
    for name, struct in structs.items():
        size_of = getattr(library, f"penstock_sizeof_{name}")
        size_of.restype, size_of.argtypes = c.c_size_t, []
        if size_of() != c.sizeof(struct):
            raise AbiError(
                f"{struct.__name__} has {c.sizeof(struct)} bytes, but {size_of()} in the library: they differ in fields"
            )
