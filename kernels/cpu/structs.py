"""The structs that the compiled kernels read: the sizes of a model, one step, and parts of LoRA adapters."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu.formats import RowLayout


class NativeSpec(c.Structure):
    """Shapes and constants of a decoder. Mirrors Spec of src/weights/spec.h."""

    _fields_ = [
        *((name, c.c_int32) for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads")),
        *((name, c.c_int32) for name in ("head_dim", "vocab", "max_position")),
        ("norm_eps", c.c_float),
        *((name, c.c_int32) for name in ("block_size", "num_blocks", "kv_format", "hadamard_rotation")),
        *((name, c.c_int32) for name in ("rotary_dim", "activation", "has_layer_norms", "is_gated", "is_parallel")),
        *((name, c.c_int32) for name in ("has_input_norms", "has_output_norms", "joins_head_norms", "num_ropes")),
        *((name, c.c_int32) for name in ("num_experts", "experts_per_token", "normalizes_experts")),
        *((name, c.c_float) for name in ("embedding_scale", "residual_scale", "score_scale", "score_cap")),
        *((name, c.c_float) for name in ("logit_scale", "logit_cap")),
        *((name, c.c_int32) for name in ("rank", "num_ranks")),
    ]


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
