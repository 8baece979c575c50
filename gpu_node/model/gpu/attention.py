"""Attention backends of the GPU runner: one protocol, Triton's kernels as the default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.kernels.paged_cache import PagedCache
from penstock.kernels.triton.decode_attention import decode_attention
from penstock.kernels.triton.prefill_attention import prefill_attention


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRows:
    """Which kernel computes which queries of a step. A backend with one kernel for all of them ignores it."""

    decoding: Tensor
    """[num_decoding] int32: sequences with one query in the step; -1 marks a padding row, which has no output."""
    tiles: Tensor
    """[num_tiles, 2] int32: query tiles of all other sequences, from `prefill_tiles`; sequence -1 marks padding."""
    splits: int
    """The number of parts that each context of a decoding sequence is split into."""
    query_rows: int
    """Queries of a tile."""


class AttentionBackend(Protocol):
    """Computes the attention of a step. Under a CUDA graph it must not wait for the GPU or read tensors on the host."""

    def attend(
        self,
        out: Tensor,
        q: Tensor,
        cache: PagedCache,
        starts: Tensor,
        contexts: Tensor,
        tables: Tensor,
        rows: AttentionRows,
        *,
        scale: float,
        window: int | None,
        biases: Tensor | None,
        cap: float | None = None,
    ) -> None:
        """Write each query's attention over its paged context to its row of `out`; causal within a sequence.

        q, out: [num_tokens, num_heads, head_dim].
        starts: [num_seqs + 1], first query of each sequence.
        contexts: [num_seqs], tokens in the cache, the step's included. A padding sequence has no query and context 0.
        tables: [num_seqs, max_blocks].
        window: tokens that a query sees, itself included; None: all.
        biases: [num_heads, num_positions] float32, added to scaled scores by the key's position.
        cap: of scaled scores, before biases: a score s becomes cap * tanh(s / cap).
        """


class TritonAttention:
    """The default: one kernel for decode rows, one for prefill chunks."""

    def attend(
        self,
        out: Tensor,
        q: Tensor,
        cache: PagedCache,
        starts: Tensor,
        contexts: Tensor,
        tables: Tensor,
        rows: AttentionRows,
        *,
        scale: float,
        window: int | None,
        biases: Tensor | None,
        cap: float | None = None,
    ) -> None:
        """Implement `AttentionBackend.attend`."""
        given, sees = (out, q, cache, starts, contexts, tables), window or 0
        if len(rows.decoding):
            decode_attention(*given, rows.decoding, rows.splits, scale=scale, window=sees, biases=biases, cap=cap)
        if len(rows.tiles):
            prefill_attention(
                *given, rows.tiles, scale=scale, window=sees, biases=biases, cap=cap, rows=rows.query_rows
            )
