"""Single native kernels, for tests that compare each with its reference."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu.structs import Format, KvFormat, LowRankRows, RowLayout, Source, check_sizes, low_rank_table
from penstock.kernels.reference.sampler import SamplingRow

Floats = NDArray[np.float32]

MAX_QUERY_ROWS = 6
"""kMaxQueryRows of src/attention/attention.h."""


_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTEGERS = ("top_k", "choice", "position")


class _Rule(c.Structure):
    """Mirrors SamplingRule of src/sampling/sampler.h."""

    _fields_ = [
        *((name, c.c_float) for name in _FLOATS),
        *((name, c.c_int32) for name in _INTEGERS),
        ("seed", c.c_uint64),
        ("seen", c.c_void_p),
        *((name, c.c_int32) for name in ("num_seen", "num_seen_prompt")),
        ("banned", c.c_void_p),
        ("num_banned", c.c_int32),
        *((name, c.c_void_p) for name in ("biased", "biases")),
        ("num_biased", c.c_int32),
        ("mask", c.c_void_p),
    ]


class _MatrixPart(c.Structure):
    """Mirrors MatrixPart of single_kernels.cpp."""

    _fields_ = [
        *((name, c.c_int32) for name in ("format", "source", "rows")),
        ("data", c.c_void_p),
        ("row_bytes", c.c_size_t),
    ]


class Single:
    """The single kernels of a compiled library."""

    def __init__(self, library: Path) -> None:
        self._library = _open(library)

    @property
    def isa(self) -> str:
        """The instruction set that the library was compiled for."""
        name: bytes = self._library.penstock_isa()
        return name.decode()

    def repack(self, weights: Format, source: Source, data: NDArray[np.uint8], columns: int) -> Floats:
        """Return packed rows as the kernels see them, [rows, columns]. data: [rows, bytes of a row]."""
        data, out = np.ascontiguousarray(data), _poisoned(len(data), columns)
        self._library.penstock_single_repack(weights, source, *out.shape, *_rows(data), _at(out))
        return out

    def num_bytes(self, weights: Format, rows: int, columns: int) -> int:
        """Return the size of a packed matrix."""
        count: int = self._library.penstock_single_num_bytes(weights, rows, columns)
        return count

    def multiply(
        self, weights: Format, source: Source, data: NDArray[np.uint8], x: Floats, *, num_threads: int = 1
    ) -> Floats:
        """Return x @ matrix.T, [rows, outputs]. data: [outputs, bytes of a row]; x: [rows, columns]."""
        return self.multiply_fused([(weights, source, data)], x, num_threads=num_threads)

    def multiply_fused(
        self, parts: Sequence[tuple[Format, Source, NDArray[np.uint8]]], x: Floats, *, num_threads: int = 1
    ) -> Floats:
        """Return the products with a matrix whose rows are those of the parts. x: [rows, columns]."""
        kept = [np.ascontiguousarray(data) for _, _, data in parts]
        x, out = _aligned(x), _poisoned(len(x), sum(map(len, kept)))
        table = (_MatrixPart * len(parts))()
        for row, (weights, source, _), data in zip(table, parts, kept, strict=True):
            row.format, row.source, row.rows = weights, source, len(data)
            row.data, row.row_bytes = _rows(data)
        self._library.penstock_single_multiply(table, len(table), x.shape[1], _at(x), len(x), num_threads, _at(out))
        return out

    def add_low_rank(self, out: Floats, x: Floats, parts: Sequence[LowRankRows]) -> Floats:
        """Return `out` plus what an adapter's parts compute from x. out: [rows, outputs]; x: [rows, columns]."""
        x, out = _aligned(x), _aligned(out).copy()
        shape, table = (out.shape[1], x.shape[1]), low_rank_table(parts)
        self._library.penstock_single_low_rank(*shape, table, len(parts), _at(x), len(x), _at(out))
        return out

    def quantize(self, row: Floats) -> tuple[float, NDArray[np.int8], int]:
        """Quantize a row; return its scale, its integers and their sum. Its length must be a multiple of 16."""
        row, q, total = _aligned(row), np.full(len(row), 99, np.int8), c.c_int32()
        scale = self._library.penstock_single_quantize(_at(row), len(row), _at(q), c.byref(total))
        return scale, q, total.value

    def exp_of_negative(self, x: Floats) -> Floats:
        """Return e^x for x <= 0. x: [n]."""
        x, out = _aligned(x), _poisoned(len(x))
        self._library.penstock_single_exp(_at(x), len(x), _at(out))
        return out

    def silu(self, x: Floats) -> Floats:
        """Return x / (1 + e^-x). x: [n]."""
        x, out = _aligned(x), _poisoned(len(x))
        self._library.penstock_single_silu(_at(x), len(x), _at(out))
        return out

    def gelu(self, x: Floats, *, is_tanh: bool = False) -> Floats:
        """Return the exact GELU, or its approximation by tanh. x: [n]."""
        x, out = _aligned(x), _poisoned(len(x))
        self._library.penstock_single_gelu(_at(x), len(x), is_tanh, _at(out))
        return out

    def norm(self, row: Floats, weight: Floats, bias: Floats | None, eps: float) -> tuple[Floats, bool]:
        """Return a normed row and whether it was finite: layer norm with a bias, else RMS norm. All: [n]."""
        count, padded = len(row), -(-len(row) // 16) * 16
        row, weight = (np.pad(values, (0, padded - count)) for values in (row, weight))
        added = None if bias is None else np.pad(bias, (0, padded - count))
        out = _poisoned(padded)
        addresses = _at(row), _at(weight), None if added is None else _at(added)
        finite = self._library.penstock_single_norm(*addresses, padded, count, eps, _at(out))
        return out, bool(finite)

    def hadamard_rotation(self, row: Floats) -> Floats:
        """Return a row after the Hadamard rotation, zero-padded to a multiple of 16. row: [n]."""
        padded = np.zeros(-(-len(row) // 16) * 16, np.float32)
        padded[: len(row)] = row
        self._library.penstock_single_hadamard(_at(padded), len(row))
        return padded

    def packed_row(self, layout: RowLayout, first: int, i: int) -> int:
        """Return the row of a fused matrix that holds row i of a part."""
        row: int = self._library.penstock_single_packed_row(layout, first, i)
        return row

    def sample_row(self, logits: Floats, row: SamplingRow) -> int:
        """Return the token that a row samples. logits: [vocab]."""
        return int(self.draw(logits, row, 1)[0])

    def draw(self, logits: Floats, row: SamplingRow, count: int) -> NDArray[np.int32]:
        """Return the tokens that a row samples at `count` positions, from its own on. logits: [vocab]."""
        logits, tokens = _aligned(logits), np.full(count, -2, np.int32)
        seen, banned, biased = (np.ascontiguousarray(ids, np.int32) for ids in (row.seen, row.banned, row.biased))
        biases, mask = np.ascontiguousarray(row.biases, np.float32), None
        if row.mask is not None:
            mask = np.ascontiguousarray(row.mask, np.uint32)
        plain = {name: getattr(row, name) for name in (*_FLOATS, *_INTEGERS, "seed", "num_seen_prompt")}
        rule = _Rule(
            **plain,
            seen=_at(seen),
            num_seen=len(seen),
            banned=_at(banned),
            num_banned=len(banned),
            biased=_at(biased),
            biases=_at(biases),
            num_biased=len(biased),
            mask=None if mask is None else _at(mask),
        )
        self._library.penstock_single_draw(_at(logits), len(logits), c.byref(rule), count, _at(tokens))
        return tokens

    def logprobs(self, logits: Floats, token: int, count: int) -> tuple[NDArray[np.int32], Floats]:
        """Return ids and values, each [1 + count]: of `token`, then of the most likely tokens. logits: [vocab]."""
        ids, values = np.full(1 + count, -1, np.int32), _poisoned(1 + count)
        self._library.penstock_single_logprobs(_at(logits), len(logits), token, count, _at(ids), _at(values))
        return ids, values


class SingleCache:
    """The native KV cache of one layer. Only `close` frees its memory."""

    def __init__(
        self, kernels: Single, kept: KvFormat, *, num_heads: int, head_dim: int, block_size: int, num_blocks: int
    ) -> None:
        self._library = kernels._library
        self._head_dim = head_dim
        make = self._library.penstock_single_cache_new
        self._cache = c.c_void_p(make(kept, num_heads, head_dim, block_size, num_blocks))

    def close(self) -> None:
        """Free the memory."""
        self._library.penstock_single_cache_free(self._cache)

    def set(self, slots: int | Sequence[int], head: int, key: Floats, value: Floats) -> None:
        """Store the keys and values of one head.

        key, value: [slots, head_dim], or [head_dim], which each slot then gets.
        """
        of_slots = np.asarray(slots, np.int32)
        shape = *of_slots.shape, self._head_dim
        key, value = (_aligned(np.broadcast_to(rows, shape)) for rows in (key, value))
        self._library.penstock_single_cache_set(self._cache, _at(of_slots), of_slots.size, head, _at(key), _at(value))

    def get(self, slots: int | Sequence[int], head: int) -> tuple[Floats, Floats]:
        """Return the keys and values of one head, dequantized: [slots, head_dim], of a single slot [head_dim]."""
        of_slots = np.asarray(slots, np.int32)
        shape = *of_slots.shape, self._head_dim
        key, value = _poisoned(*shape), _poisoned(*shape)
        self._library.penstock_single_cache_get(self._cache, _at(of_slots), of_slots.size, head, _at(key), _at(value))
        return key, value

    def attend(
        self,
        queries: Floats,
        limits: Sequence[int],
        blocks: Sequence[int],
        head: int,
        *,
        firsts: Sequence[int] | None = None,
        biases: Floats | None = None,
        by_span: bool = False,
    ) -> Floats:
        """Attend with rows that each see the tokens [firsts, limits), in one call or span by span.

        queries: [rows, head_dim]; biases: [rows, tokens rounded up to a multiple of 64], added to the scores.
        """
        queries, out = _aligned(queries), _poisoned(*queries.shape)
        ends, table, scale = np.array(limits, np.int32), np.array(blocks, np.int32), self._head_dim**-0.5
        begins = np.zeros_like(ends) if firsts is None else np.array(firsts, np.int32)
        added = None if biases is None else np.array([_at(row) for row in biases], np.uint64)
        spans = _at(ends), _at(begins), None if added is None else _at(added)
        call = self._library.penstock_single_attend
        call(self._cache, _at(queries), *spans, len(ends), _at(table), head, scale, by_span, _at(out))
        return out


def _poisoned(*shape: int) -> Floats:
    """Return NaN for a kernel to overwrite, so that an element it does not write shows."""
    return np.full(shape, np.nan, np.float32)


def _aligned(values: Floats) -> Floats:
    return np.ascontiguousarray(values, np.float32)


def _rows(data: NDArray[np.uint8]) -> tuple[int, int]:
    """Return the address of `data`, which the caller keeps alive, and the bytes of a row."""
    return _at(data), data.shape[1]


def _at(array: NDArray[Any]) -> int:
    return array.ctypes.data


def _open(path: Path) -> Any:
    library = c.CDLL(str(path))
    pointer, number, real = c.c_void_p, c.c_int, c.c_float
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "repack": (None, [*[number] * 4, pointer, c.c_size_t, pointer]),
        "num_bytes": (c.c_size_t, [number] * 3),
        "multiply": (None, [pointer, number, number, pointer, number, number, pointer]),
        "low_rank": (None, [number, number, pointer, number, pointer, number, pointer]),
        "quantize": (real, [pointer, number, pointer, pointer]),
        "exp": (None, [pointer, number, pointer]),
        "silu": (None, [pointer, number, pointer]),
        "gelu": (None, [pointer, number, number, pointer]),
        "norm": (number, [*[pointer] * 3, number, number, real, pointer]),
        "hadamard": (None, [pointer, number]),
        "packed_row": (number, [number] * 3),
        "draw": (None, [pointer, number, pointer, number, pointer]),
        "logprobs": (None, [pointer, *[number] * 3, pointer, pointer]),
        "cache_new": (pointer, [number] * 5),
        "cache_free": (None, [pointer]),
        "cache_set": (None, [pointer, pointer, number, number, pointer, pointer]),
        "cache_get": (None, [pointer, pointer, number, number, pointer, pointer]),
        "attend": (None, [*[pointer] * 5, number, pointer, number, real, number, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"penstock_single_{name}")
        function.restype, function.argtypes = result, arguments
    library.penstock_isa.restype = c.c_char_p
    check_sizes(library, {"sampling_rule": _Rule})
    return library
