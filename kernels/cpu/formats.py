"""The formats of weights and of the KV cache. They mirror the enums of src/weights/weights.h and kv_cache.h."""

from __future__ import annotations

from enum import IntEnum

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


class RowLayout(IntEnum):
    """Where rows go in a fused matrix: one after the other, or interleaved with those of another part."""

    PLAIN = 0
    FIRST_HALF = 1
    SECOND_HALF = 2


class KvFormat(IntEnum):
    """Storage format of keys and values."""

    BF16 = 0
    INT8 = 1
    F16 = 2


STORED_FORMATS = frozenset(weights for weights in Format if weights.name in Source.__members__)
"""Formats that keep the numbers of GGUF's blocks. They hold only rows that are stored in the same format."""

Run = tuple[Format, int]
"""Consecutive rows of a matrix in one format, and their number."""
