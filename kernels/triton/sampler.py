"""Samples tokens without a sort, in one to three passes over the logits; see `sampling_passes`.

`kernels.reference.sampler` defines the rules and their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.triton import sampling_passes as passes
from penstock.kernels.triton.launches import dependent_launch, padded
from penstock.kernels.triton.sampling_passes import BANNED, PROMPT, draw_tokens

RULE_COLUMNS = passes.RULE_COLUMNS
_MAX_COLUMNS = 4096
_MARKS_AT_ONCE = 256


@triton.jit(do_not_specialize=["count"])
def _mark(marks, entries, count, vocab, COUNT: tl.constexpr):
    """Grid [runs of entries]. An entry is a row of marks, a token, and the number to add (1) or the flag to set."""
    i = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    inside = i < count
    row = tl.load(entries + 3 * i, mask=inside, other=0).to(tl.int64)
    token = tl.load(entries + 3 * i + 1, mask=inside, other=0)
    what = tl.load(entries + 3 * i + 2, mask=inside, other=0)
    at = marks + row * vocab + token
    tl.atomic_add(at, what, mask=inside & (what == 1))
    tl.atomic_or(at, what, mask=inside & (what > 1))


@triton.jit
def _mask(marks, words, rows, vocab, words_stride, COLUMNS: tl.constexpr):
    """Grid [masks, runs of columns]: ban the tokens that a mask's bits do not allow."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = ids < vocab
    word = tl.load(words + row * words_stride + ids // 32, mask=inside, other=0)
    at = marks + tl.load(rows + row).to(tl.int64) * vocab + ids
    mark = tl.load(at, mask=inside, other=0)
    tl.store(at, tl.where((word >> (ids % 32)) & 1 != 0, mark, mark | BANNED), mask=inside)


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """By row and token: how often the row has seen it, whether it is banned, and the bias added to its logit."""

    marks: Tensor
    """[max_rows, vocab] int32."""
    biases: Tensor
    """[max_rows, vocab] float32."""

    @classmethod
    def empty(cls, max_rows: int, vocab: int, device: torch.device) -> Marks:
        """Allocate `max_rows` rows. They must be cleared before use."""
        shape = max_rows, vocab
        return cls(torch.empty(shape, dtype=torch.int32, device=device), torch.empty(shape, device=device))

    def clear(self, num_rows: int) -> None:
        """Clear the first `num_rows` rows."""
        self.marks[:num_rows].zero_()
        self.biases[:num_rows].zero_()

    def add(self, entries: Tensor) -> None:
        """Record the tokens that rows have seen and must not choose. entries: [n, 3] in int32, from `mark_entries`."""
        if len(entries):
            grid = (triton.cdiv(len(entries), _MARKS_AT_ONCE),)
            _mark[grid](self.marks, entries, len(entries), self.marks.shape[1], COUNT=_MARKS_AT_ONCE)

    def allow_only(self, rows: Tensor, words: Tensor) -> None:
        """Ban all tokens without a set bit. rows: [n]; words: [n, vocab / 32], both int32, lowest bit first."""
        vocab = self.marks.shape[1]
        columns = min(_MAX_COLUMNS, padded(vocab, 16))
        grid = (len(rows), triton.cdiv(vocab, columns))
        _mask[grid](self.marks, words, rows, vocab, words.stride(0), COLUMNS=columns)


def mark_entries(row: int, seen: NDArray[np.int32], num_prompt: int, banned: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the entries of a row for `Marks.add`: its prompt tokens, output tokens and banned tokens."""
    what = np.ones(len(seen) + len(banned), np.int32)
    what[:num_prompt] = PROMPT.value
    what[len(seen) :] = BANNED.value
    return np.stack((np.full_like(what, row), np.concatenate((seen, banned)), what), axis=1)


class RuleArrays(Protocol):
    """The sampling rules of all rows, every array [rows]. The engine's `SamplingRows` implements it."""

    @property
    def temperature(self) -> NDArray[np.float32]: ...
    @property
    def top_p(self) -> NDArray[np.float32]: ...
    @property
    def min_p(self) -> NDArray[np.float32]: ...
    @property
    def repetition_penalty(self) -> NDArray[np.float32]: ...
    @property
    def presence_penalty(self) -> NDArray[np.float32]: ...
    @property
    def frequency_penalty(self) -> NDArray[np.float32]: ...
    @property
    def top_k(self) -> NDArray[np.int32]: ...
    @property
    def seed(self) -> NDArray[np.uint64]: ...
    @property
    def choice(self) -> NDArray[np.int32]: ...
    @property
    def position(self) -> NDArray[np.int32]: ...


def pack_rules(rows: RuleArrays, marks: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the rules as `sample` takes them. marks: [rows], each row's own row of `Marks`, or -1."""
    packed = np.empty((len(marks), len(RULE_COLUMNS)), np.int32)
    for at, name in enumerate(RULE_COLUMNS[:6]):
        packed[:, at] = getattr(rows, name).view(np.int32)
    packed[:, 6], packed[:, 7], packed[:, 8] = rows.top_k, rows.choice, rows.position
    packed[:, 9:11] = rows.seed.reshape(-1, 1).view(np.int32)
    packed[:, 11] = marks
    return packed


def sample(logits: Tensor, rules: Tensor, marks: Marks) -> Tensor:
    """Sample one token per row, in int32; FAILED_TOKEN (-1) if a row cannot sample.

    logits: [rows, vocab], any float; rules: [rows, len(RULE_COLUMNS)] in int32.
    """
    num_rows, vocab = logits.shape
    columns = min(passes.COLUMNS, padded(vocab, 16))
    tiles = triton.cdiv(vocab, columns)
    scratch = _Scratch.empty(num_rows, tiles, logits.device)
    chosen = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    given = logits, rules, marks.marks, marks.biases, vocab, logits.stride(0)
    bests, sums = (scratch.bests, scratch.tokens), (scratch.counts, scratch.masses)
    # The reference rounds after each penalty. Fused steps round once, so another token could win by the last bit.
    options = {"num_warps": 4, "enable_fp_fusion": False, **dependent_launch(logits.device)}
    sizes = {"COLUMNS": columns, "TILES": tiles}
    best_of, buckets = {"TILES_PAD": padded(tiles)}, {"BUCKETS": passes.BUCKETS}
    collected = {"CAPACITY": passes.MAX_CANDIDATES, "FIELDS": passes.BOUND_FIELDS}
    by_tile, by_row = (num_rows, tiles), (num_rows,)
    cleared = {"CLEARED": padded(triton.cdiv(passes.BUCKETS, tiles))}
    passes.scan_tiles[by_tile](
        *bests, scratch.weights, *sums, scratch.found, *given, **cleared, **sizes, **buckets, **options
    )
    passes.count_buckets[by_tile](*sums, scratch.weights, *bests, *given, **sizes, **best_of, **buckets, **options)
    passes.bound_limits[by_row](scratch.bounds, *sums, rules, vocab, **buckets, FIELDS=passes.BOUND_FIELDS, **options)
    found = scratch.candidates, scratch.found, scratch.weights, scratch.bounds, *bests
    passes.collect_candidates[by_tile](*found, *given, **sizes, **best_of, **collected, **options)
    draw_tokens[by_row](chosen, *found, *given, **sizes, **best_of, **buckets, **collected, **options)
    return chosen


class _Scratch(NamedTuple):
    """Buffers between the passes. Each pass writes all that a later one reads, so they need no clearing."""

    bests: Tensor
    """[rows, tiles] float32: the best score."""
    tokens: Tensor
    """[rows, tiles] int32: the first token with the best score, or -1."""
    weights: Tensor
    """[rows, tiles] int64."""
    counts: Tensor
    """[rows, BUCKETS] int32."""
    masses: Tensor
    """[rows, BUCKETS] int64."""
    bounds: Tensor
    """[rows, BOUND_FIELDS] int64."""
    found: Tensor
    """[rows] int32: the number of candidates."""
    candidates: Tensor
    """[rows, MAX_CANDIDATES, 2] int32: the bits of the distance, and the token."""

    @classmethod
    def empty(cls, rows: int, tiles: int, device: torch.device) -> _Scratch:
        shapes = {
            "bests": ((rows, tiles), torch.float32),
            "tokens": ((rows, tiles), torch.int32),
            "weights": ((rows, tiles), torch.int64),
            "counts": ((rows, passes.BUCKETS), torch.int32),
            "masses": ((rows, passes.BUCKETS), torch.int64),
            "bounds": ((rows, passes.BOUND_FIELDS), torch.int64),
            "found": ((rows,), torch.int32),
            "candidates": ((rows, passes.MAX_CANDIDATES, 2), torch.int32),
        }
        return cls(**{name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()})
