"""What each kernel must move and compute: bytes of GPU memory and floating-point operations, by formula.

Bytes are those of the algorithm: each tensor once per pass, without what caches save or tiles read again. A product of
two numbers and its addition are two operations. Masked work, such as padded rows, is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.kernels.triton.int4 import GROUP
from penstock.kernels.triton.sampling_passes import BUCKETS, COLUMNS

_REAL = 4
"""Bytes of a float32 or int32."""
_LONG = 8
WEIGHT_BITS = {"none": 16, "int8": 8, "fp8": 8, "int4": 4}
"""Bits per weight by quantization, without scales."""


class Cost(NamedTuple):
    """The work of one launch or of several."""

    bytes_read: int
    bytes_written: int
    flops: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes moved in either direction."""
        return self.bytes_read + self.bytes_written

    def floor_ms(self, gb_s: float, tflop_s: float) -> float:
        """Return the time that a GPU with this bandwidth and this rate of operations needs at least."""
        return max(self.num_bytes / gb_s / 1e6, self.flops / tflop_s / 1e9)


def total(costs: Iterable[Cost]) -> Cost:
    """Return the sum of costs."""
    return Cost(*(sum(parts) for parts in zip(Cost(0, 0), *costs, strict=True)))


class Heads(NamedTuple):
    """The heads of an attention layer, and the bytes of its numbers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int = 2
    kv_itemsize: int = 2
    """Bytes of a cached number; 1 for a quantized cache, which has a float32 scale per vector."""

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's key and value in one layer's cache."""
        scale = _REAL if self.kv_itemsize == 1 else 0
        return 2 * self.num_kv_heads * (self.head_dim * self.kv_itemsize + scale)

    @property
    def query_bytes(self) -> int:
        """Bytes of one token's queries."""
        return self.num_heads * self.head_dim * self.itemsize


def decode_attention(contexts: Iterable[int], heads: Heads, *, splits: int = 1, window: int = 0) -> Cost:
    """Attend with one query per context, cut into `splits` parts whose float32 results are merged."""
    seen = [min(context, window) if window else context for context in contexts]
    partial = 0 if splits == 1 else len(seen) * heads.num_heads * splits * (heads.head_dim + 1) * _REAL
    queries = len(seen) * heads.query_bytes
    flops = 4 * sum(seen) * heads.num_heads * heads.head_dim
    return Cost(sum(seen) * heads.kv_token_bytes + queries + partial, queries + partial, flops)


def prefill_attention(counts: Iterable[int], contexts: Iterable[int], heads: Heads, *, rows: int) -> Cost:
    """Attend with chunks of `counts` queries at the end of contexts. rows: queries of a tile.

    Each tile reads the keys and values up to its last query once for each query head. Caches serve most of it.
    """
    kv_bytes = num_queries = num_pairs = 0
    for count, context in zip(counts, contexts, strict=True):
        prefix = context - count
        ends = [prefix + min(first + rows, count) for first in range(0, count, rows)]
        kv_bytes += sum(ends) * heads.kv_token_bytes * heads.num_heads // heads.num_kv_heads
        num_queries += count
        num_pairs += count * prefix + count * (count + 1) // 2
    queries = num_queries * heads.query_bytes
    return Cost(kv_bytes + queries, queries, 4 * num_pairs * heads.num_heads * heads.head_dim)


def rotate_and_store(num_tokens: int, heads: Heads) -> Cost:
    """Rotate queries and keys, and store keys and values."""
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    angles = heads.head_dim * _REAL
    written = num_tokens * (heads.query_bytes + heads.kv_token_bytes)
    return Cost(num_tokens * (width * heads.itemsize + angles), written, num_tokens * 6 * width)


def embed(num_tokens: int, hidden: int, *, itemsize: int = 2) -> Cost:
    """Read token ids and embeddings; write the float32 residual stream."""
    size = num_tokens * hidden
    return Cost(num_tokens * _REAL + size * itemsize, size * _REAL, size)


def add_norm(num_tokens: int, hidden: int, *, itemsize: int = 2, added: bool = True, quantized: bool = False) -> Cost:
    """Add to the float32 residual stream and norm it. `quantized`: the norm is stored in 8 bits, with a scale."""
    size = num_tokens * hidden
    read = size * (_REAL + added * itemsize) + hidden * itemsize
    out = size + num_tokens * _REAL if quantized else size * itemsize
    return Cost(read, added * size * _REAL + out, 5 * size)


def activation(num_tokens: int, inner: int, *, itemsize: int = 2, gated: bool = True, quantized: bool = False) -> Cost:
    """Activate, and multiply by the gate's partner if gated. `quantized`: as in `add_norm`."""
    size = num_tokens * inner
    out = size + num_tokens * _REAL if quantized else size * itemsize
    return Cost((1 + gated) * size * itemsize, out, 8 * size)


def quantize(num_tokens: int, size: int, *, itemsize: int = 2) -> Cost:
    """Quantize rows to 8 bits and a scale."""
    return Cost(num_tokens * size * itemsize, num_tokens * (size + _REAL), 2 * num_tokens * size)


def linear(num_rows: int, outputs: int, columns: int, quantization: str = "none", *, itemsize: int = 2) -> Cost:
    """Multiply rows by a matrix in one of WEIGHT_BITS. int8 and fp8 read rows that are quantized already."""
    weight = outputs * columns * WEIGHT_BITS[quantization] // 8
    given = num_rows * columns * itemsize
    if quantization in ("int8", "fp8"):
        weight += outputs * _REAL
        given = num_rows * (columns + _REAL)
    if quantization == "int4":
        weight += outputs * (columns // GROUP) * _REAL
    return Cost(weight + given, num_rows * outputs * itemsize, 2 * num_rows * outputs * columns)


def sample(num_rows: int, vocab: int, *, itemsize: int = 2, passes: int = 3, marked: bool = False) -> Cost:
    """Sample each row in 1 pass (greedy, plain), 2 (min_p) or 3 (top_k, top_p), and read the drawn token's tile again.

    marked: penalties, masks or biases apply, which takes a mark and a bias for each logit.
    """
    width = itemsize + 2 * _REAL * marked
    read = num_rows * (vocab * passes + min(vocab, COLUMNS)) * width
    buckets = num_rows * BUCKETS * (_REAL + _LONG) if passes == 3 else 0
    return Cost(read + buckets, buckets + num_rows * _REAL, 8 * passes * num_rows * vocab)


def add_lora(num_rows: int, columns: int, outputs: int, rank: int, adapters: int, *, itemsize: int = 2) -> Cost:
    """Add the products of `adapters` different adapters to `num_rows` rows."""
    matrices = adapters * rank * (columns + outputs) * itemsize
    inner, out = num_rows * rank * _REAL, num_rows * outputs * itemsize
    read = matrices + num_rows * columns * itemsize + inner + out
    return Cost(read, inner + out, 2 * num_rows * rank * (columns + outputs))


def delta_rule(num_tokens: int, num_seqs: int, *, key_heads: int, heads: int, key_dim: int, value_dim: int) -> Cost:
    """Let the states of sequences learn their tokens: each state is read and written once."""
    state, outputs = heads * key_dim * value_dim, heads * value_dim
    inputs = 2 * key_heads * key_dim + outputs + 2 * heads
    read, written = num_tokens * inputs + num_seqs * state, num_tokens * outputs + num_seqs * state
    return Cost(_REAL * read, _REAL * written, 7 * num_tokens * state)


def scan(num_tokens: int, num_seqs: int, *, groups: int, heads: int, head_dim: int, state_size: int) -> Cost:
    """Add tokens to the states of sequences: each state is read and written once."""
    state, outputs = heads * head_dim * state_size, heads * head_dim
    inputs = outputs + 2 * groups * state_size + heads
    read, written = num_tokens * inputs + num_seqs * state, num_tokens * outputs + num_seqs * state
    return Cost(_REAL * read, _REAL * written, 5 * num_tokens * state)


def copy_blocks(num_copies: int, block_bytes: int) -> Cost:
    """Copy KV blocks."""
    return Cost(num_copies * block_bytes, num_copies * block_bytes)
