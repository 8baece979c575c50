"""Records that all backends over torch tensors take: one layer's KV blocks, norms, and slots of states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

QUANTIZED_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each quantized format. Quantization maps the largest number of a vector to it."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedCache:
    """The KV cache blocks of one layer. Slot s is position s % block_size of block s // block_size.

    In a quantized cache, a vector is its stored numbers times its scale. GPU kernels can also read blocks in pinned
    host memory: block b >= host_from is `host_jump` bytes after the address that it would have in the tensors.
    """

    k: Tensor
    """[num_kv_heads, num_blocks, block_size, head_dim]; one head's part of a block is contiguous."""
    v: Tensor
    """Same shape and strides as k."""
    k_scales: Tensor | None = None
    """[num_kv_heads, num_blocks, block_size] float32; one head's part of a block is contiguous. None: not quantized."""
    v_scales: Tensor | None = None
    """Same shape and strides as k_scales."""
    host_from: int = 2**31 - 1
    host_jump: int = 0

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.k.shape[2]


class NormWeights(Protocol):
    """An RMS norm, or a layer norm if it has a bias. With an empty weight it only converts to its dtype."""

    @property
    def weight(self) -> Tensor:
        """[hidden]."""

    @property
    def bias(self) -> Tensor | None:
        """[hidden]."""

    @property
    def eps(self) -> float:
        """Added to the mean square."""

    @property
    def offset(self) -> float:
        """Added to the weight, in float32."""


@dataclass(frozen=True, slots=True)
class Addend:
    """Rows that are still to be added to the residual stream."""

    rows: Tensor
    """[num_tokens, hidden]; rows must be contiguous."""
    norm: NormWeights | None = None
    """An RMS norm of the rows, applied first."""
    scale: float = 1.0
    """Multiplies the rows, after their norm."""


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """Where the tokens of a step find the state before them, and where the states after them go. All int32."""

    owners: Tensor
    """[num_tokens]: the sequence of each token; -1 for padding tokens."""
    starts: Tensor
    """[num_seqs + 1]: the first token of each sequence. A padding sequence has none."""
    reads: Tensor
    """[num_seqs]: the slot with the state before a sequence's first token; -1: zeros."""
    writes: Tensor
    """[num_seqs]: the slot for the state after its last token."""
    save_starts: Tensor
    """[num_seqs + 1]: the first of `saves` of each sequence."""
    saves: Tensor
    """[num_saves, 2]: a token, ascending, and the slot that gets the state after it."""
