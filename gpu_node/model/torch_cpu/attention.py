"""Paged attention in plain torch: batches sequences of similar length and reads their KV blocks directly."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from penstock.gpu_node.model.protocol import NULL_BLOCK, StepPlan

_MaskKind: TypeAlias = tuple[int | None, int | None, bool]
"""An attention window, the size of chunks, and whether scores have position biases."""
_MAX_PADDING = 2.0
_MIN_BLOCKS = 4
_SCORED_QUERIES = 64
"""Queries of a sequence whose scores are in memory at once, where torch's fused attention does not compute them."""


class PagedLayer(Protocol):
    """What the attention of a layer needs to be known of it."""

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""

    @property
    def head_dim(self) -> int:
        """Channels of a query and of a key."""

    @property
    def value_dim(self) -> int:
        """Channels of a value."""

    @property
    def scale(self) -> float:
        """The factor of scores."""

    @property
    def score_cap(self) -> float | None:
        """Limit of scores: a score s becomes cap * tanh(s / cap)."""

    @property
    def window(self) -> int | None:
        """The tokens that each token sees, itself included; None: all earlier tokens."""

    @property
    def chunk(self) -> int | None:
        """The size of chunks: a token sees the earlier tokens of its own chunk. None: there are no chunks."""

    @property
    def has_position_biases(self) -> bool:
        """Whether scores have position biases (ALiBi)."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """The sequences of one attention call: B sequences, Q queries each, S = padded context in tokens."""

    tokens: Tensor
    """[B * Q]: indices of the queries in the packed step, ascending."""
    pages: Mapping[int, Tensor]
    """Number of KV heads → [num_kv_heads * B * S / block_size]: pages of every head, as rows of a cache viewed per head
    and block."""
    masks: Mapping[_MaskKind, Tensor]
    """[B, 1 or num_heads, Q, S], -inf for hidden keys, else the bias of the score.

    The masks have the cache's dtype and four dimensions, because torch's fast attention accepts no other."""


class KvCache:
    """The keys and values of one layer, head-major: [num_kv_heads, num_blocks, block_size, channels] each."""

    def __init__(self, attention: PagedLayer, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        # Zeros, because masked padding still enters products, and 0 x NaN is NaN.
        self.k = torch.zeros(attention.num_kv_heads, num_blocks, block_size, attention.head_dim, dtype=dtype)
        self.v = torch.zeros(attention.num_kv_heads, num_blocks, block_size, attention.value_dim, dtype=dtype)

    def store(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store the keys and values of tokens.

        k, v: [num_tokens, num_kv_heads, channels]; slots: [num_kv_heads * num_tokens], head-major.
        """
        for kept, new in ((self.k, k), (self.v, v)):
            channels = new.shape[-1]
            kept.view(-1, channels).index_copy_(0, slots, new.transpose(0, 1).reshape(-1, channels))

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks, with all sources read before any target is written. sources, targets: [num_copies]."""
        for kept in (self.k, self.v):
            kept[:, targets] = kept[:, sources]

    def zero(self, blocks: list[int]) -> None:
        """Clear blocks."""
        self.k[:, blocks] = 0
        self.v[:, blocks] = 0


def copy_blocks(copies: NDArray[np.int32], caches: Iterable[KvCache]) -> None:
    """Apply all copies of a step at once. copies: [num_copies, 2], source and target.

    Chains are resolved first, so that each target gets the contents that some block had before the first copy.
    """
    origins: dict[int, int] = {}
    for source, target in copies.tolist():
        origins[target] = origins.get(source, source)
    targets, sources = (torch.tensor(list(blocks)) for blocks in (origins.keys(), origins.values()))
    for cache in caches:
        cache.copy(sources, targets)


class PagedAttention:
    """The attention of a step. `groups` and `targets` depend only on the plan and are computed once for all layers.

    Not thread-safe: the buffer for gathered pages is reused from step to step.
    """

    def __init__(
        self,
        attentions: Collection[PagedLayer],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        biases: Tensor | None = None,
    ) -> None:
        """attentions: of all layers; biases: [num_heads, max_position], score biases by key position."""
        self._head_counts = sorted({one.num_kv_heads for one in attentions})
        self._mask_kinds = {_mask_kind(one) for one in attentions}
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._dtype = dtype
        self._biases = biases
        self._scratch = torch.empty(0, dtype=dtype)

    def targets(self, plan: StepPlan) -> tuple[Mapping[int, Tensor], list[int]]:
        """Return the cache slot of each token for every head, and the newly used blocks.

        The slots are [num_kv_heads * num_tokens], by the number of KV heads. Blocks that receive their first token must
        be cleared, because masks do not silence a NaN in old contents.
        """
        seqs = np.repeat(np.arange(len(plan.context_lens)), np.diff(plan.query_starts))
        blocks = plan.block_tables[seqs, plan.positions // self._block_size].astype(np.int64)
        offsets = plan.positions % self._block_size
        slots = self._by_heads(blocks * self._block_size + offsets, self._num_blocks * self._block_size)
        return slots, blocks[offsets == 0].tolist()

    def groups(self, plan: StepPlan) -> list[AttentionGroup]:
        """Split a step into groups of sequences with similar context lengths, so that padding stays small."""
        return [self._group(plan, seqs) for seqs in _split(plan, self._block_size)]

    def attend(
        self,
        q: Tensor,
        cache: KvCache,
        groups: list[AttentionGroup],
        attention: PagedLayer,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute a layer's attention of q, [num_tokens, num_heads, head_dim].

        Return [num_tokens, num_heads, value_dim]. The step's keys and values must be stored already.
        sinks: [num_heads], a score of each head that takes a share of the attention and has no value.
        """
        if len(groups) == 1:
            return self._attend_group(q, cache, groups[0], attention, sinks)
        out = q.new_empty(*q.shape[:-1], attention.value_dim)
        for group in groups:
            rows = q.index_select(0, group.tokens)
            out.index_copy_(0, group.tokens, self._attend_group(rows, cache, group, attention, sinks))
        return out

    def _attend_group(
        self, q: Tensor, cache: KvCache, group: AttentionGroup, attention: PagedLayer, sinks: Tensor | None
    ) -> Tensor:
        mask, num_kv_heads = group.masks[_mask_kind(attention)], attention.num_kv_heads
        num_seqs, _, num_queries, context = mask.shape
        shape = num_kv_heads, num_seqs, context, -1
        k, v = (pages.view(shape) for pages in self._gather(cache, group.pages[num_kv_heads]))
        scale, cap = attention.scale, attention.score_cap
        if num_queries == 1:
            return _decode(q, k, v, mask, scale, cap, sinks)
        if cap is None and sinks is None:
            return _prefill(q, k, v, mask, scale)
        return _prefill_by_scores(q, k, v, mask, scale, cap, sinks)

    def _gather(self, cache: KvCache, pages: Tensor) -> list[Tensor]:
        kinds = cache.k, cache.v
        sizes = [self._block_size * kept.shape[-1] for kept in kinds]
        needed = len(pages) * sum(sizes)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=self._dtype)
        parts = torch.split(self._scratch[:needed], [len(pages) * size for size in sizes])
        out = [part.view(len(pages), size) for part, size in zip(parts, sizes, strict=True)]
        for kept, size, gathered in zip(kinds, sizes, out, strict=True):
            torch.index_select(kept.view(-1, size), 0, pages, out=gathered)
        return out

    def _group(self, plan: StepPlan, seqs: NDArray[np.int64]) -> AttentionGroup:
        starts, contexts = plan.query_starts[seqs], plan.context_lens[seqs]
        num_queries = int(plan.query_starts[seqs[0] + 1] - starts[0])
        num_blocks = -(-int(contexts.max()) // self._block_size)
        steps = np.arange(num_queries)
        query_positions = (contexts - num_queries)[:, None] + steps
        # A sequence may hold blocks that no token is stored in yet; masks do not silence a NaN in their old contents.
        is_used = np.arange(num_blocks) < -(-contexts // self._block_size)[:, None]
        pages = np.where(is_used, plan.block_tables[seqs, :num_blocks], NULL_BLOCK).astype(np.int64).ravel()
        return AttentionGroup(
            tokens=torch.from_numpy((starts[:, None] + steps).ravel()),
            pages=self._by_heads(pages, self._num_blocks),
            masks={kind: self._mask(query_positions, num_blocks * self._block_size, kind) for kind in self._mask_kinds},
        )

    def _mask(self, query_positions: NDArray[np.int64], context: int, kind: _MaskKind) -> Tensor:
        """Return the mask of a kind. query_positions: [B, Q], the queries' positions in their sequences."""
        window, chunk, has_biases = kind
        key_positions, own = np.arange(context), query_positions[:, None, :, None]
        hidden = key_positions > own
        if window is not None:
            hidden |= key_positions <= own - window
        if chunk is not None:
            hidden |= key_positions // chunk != own // chunk
        shown = torch.zeros(1)
        if has_biases and self._biases is not None:
            # [num_heads, 1, context]; positions in the padding up to whole pages are hidden anyway.
            known = self._biases[:, :context]
            shown = functional.pad(known, (0, context - known.shape[1]))[:, None]
        return torch.where(torch.from_numpy(hidden), -torch.inf, shown).to(self._dtype)

    def _by_heads(self, index: NDArray[np.int64], stride: int) -> dict[int, Tensor]:
        """Return an index repeated for each KV head, by the number of KV heads."""
        found: dict[int, Tensor] = {}
        for count in self._head_counts:
            heads = np.arange(count, dtype=np.int64)[:, None] * stride
            found[count] = torch.from_numpy((heads + index).ravel())
        return found


def _mask_kind(attention: PagedLayer) -> _MaskKind:
    return attention.window, attention.chunk, attention.has_position_biases


def _decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute attention for one query per sequence; returns [B, num_heads, value_dim].

    q: [B, num_heads, head_dim]; k, v: [num_kv_heads, B, S, channels]; mask: [B, 1 or num_heads, 1, S].
    In bfloat16 this is 2 to 3 times as fast as torch's fused attention, which is optimized for many queries.
    """
    num_seqs, num_heads, _ = q.shape
    # The query heads that share a key head become queries of that head.
    q = q.view(num_seqs, len(k), -1, q.shape[-1]).transpose(0, 1) * scale
    scores = _capped(q @ k.transpose(-1, -2), cap)
    # The mask has one row for all heads, or one per head in the layout of the queries.
    mask = mask.view(len(mask), -1, q.shape[2] if mask.shape[1] > 1 else 1, mask.shape[-1]).transpose(0, 1)
    out = _shares(scores.float() + mask, None if sinks is None else sinks.view(len(k), 1, -1, 1)).to(v.dtype) @ v
    return out.transpose(0, 1).reshape(num_seqs, num_heads, v.shape[-1])


def _prefill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute attention for Q queries per sequence; returns [B * Q, num_heads, value_dim].

    q: [B * Q, num_heads, head_dim]; k, v: [num_kv_heads, B, S, channels]; mask: [B, 1 or num_heads, Q, S].
    """
    num_tokens, num_heads, _ = q.shape
    q = q.view(len(mask), mask.shape[2], *q.shape[1:]).transpose(1, 2)
    out = functional.scaled_dot_product_attention(
        q, k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, enable_gqa=True, scale=scale
    )
    return out.transpose(1, 2).reshape(num_tokens, num_heads, v.shape[-1])


def _prefill_by_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute attention with caps or sinks, which torch's fused attention does not have; arguments as for `_prefill`.

    Queries are computed in runs of a few, because their scores are kept in memory.
    """
    num_seqs, num_queries = len(mask), mask.shape[2]
    grouped = q.view(num_seqs, num_queries, *q.shape[1:])
    out = grouped.new_empty(*grouped.shape[:-1], v.shape[-1])
    by_key_head = None if sinks is None else sinks.view(len(k), 1, -1, 1, 1)
    for first in range(0, num_queries, _SCORED_QUERIES):
        part = slice(first, first + _SCORED_QUERIES)
        rows = grouped[:, part]
        count = rows.shape[1]
        # [num_kv_heads, B, group * queries, head_dim]: query heads that share a key head become its queries.
        by_head = rows.reshape(num_seqs, count, len(k), -1, rows.shape[-1]).permute(2, 0, 3, 1, 4)
        scores = _capped(by_head.flatten(2, 3) * scale @ k.transpose(-1, -2), cap)
        scores = scores.float().view(*by_head.shape[:-1], -1) + mask[:, :, part]
        attended = _shares(scores, by_key_head).to(v.dtype).flatten(2, 3) @ v
        attended = attended.view(*by_head.shape[:-1], v.shape[-1])
        out[:, part] = attended.permute(1, 3, 0, 2, 4).reshape(num_seqs, count, -1, v.shape[-1])
    return out.view(-1, *out.shape[2:])


def _shares(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores over the last dimension, of which sinks take a share. sinks: [..., 1]."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]


def _capped(scores: Tensor, cap: float | None) -> Tensor:
    return scores if cap is None else cap * torch.tanh(scores / cap)


def _split(plan: StepPlan, block_size: int) -> Iterator[NDArray[np.int64]]:
    """Yield the sequences of each group: a prefill chunk alone, decode steps with others of similar length."""
    counts = np.diff(plan.query_starts)
    for seq in np.flatnonzero(counts > 1):
        yield np.array([seq])
    decoding = np.flatnonzero(counts == 1)
    decoding = decoding[np.argsort(plan.context_lens[decoding], kind="stable")]
    num_blocks = -(-plan.context_lens[decoding] // block_size)
    start = 0
    while start < len(decoding):
        limit = max(_MIN_BLOCKS, int(num_blocks[start] * _MAX_PADDING))
        end = int(np.searchsorted(num_blocks, limit, side="right"))
        yield np.sort(decoding[start:end])
        start = end
