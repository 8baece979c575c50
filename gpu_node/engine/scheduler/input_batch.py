"""The running batch as arrays with one row a sequence, kept between steps: a plan is gathered, not rebuilt."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.sequence import NO_TOKENS, Sequence
from penstock.gpu_node.engine.steps import Ints, Rows, Step
from penstock.gpu_node.engine.text.reasoning import NEVER
from penstock.gpu_node.model.protocol import (
    NO_ADAPTER,
    NO_LOGPROBS,
    NULL_BLOCK,
    ROW_COLUMNS,
    SamplingRows,
    StepPlan,
    TokenMasks,
)


class TokenGuide(Protocol):
    """What decides which tokens may continue a choice, such as a grammar."""

    @property
    def is_waiting(self) -> bool:
        """Whether its mask is requested and has not arrived."""

    def new_tokens_of(self, output: Ints) -> list[int]:
        """Return the tokens at the end of a choice's output that earlier calls did not return, for `take`."""

    def take(self, token_ids: Items[int]) -> None:
        """Append tokens."""

    @property
    def is_idle(self) -> bool:
        """Whether the choice still reasons, so that any token but an end token may follow."""

    def masks_of(self, guided: Items[Self | None], forced: Mapping[int, int]) -> TokenMasks:
        """Return the masks of a step: `guided` has, by sampling row, its guide or None; `forced` the only token."""


NO_GUIDES: Mapping[Sequence, TokenGuide] = {}
_NOTHING_FORCED: Mapping[int, int] = {}
_NOT_OF_PARAMS = ("position", "seed", "choice", "num_seen_prompt")
"""Columns of SamplingRows that are no sampling option: `position` changes in each step, the others do not."""


_SETTINGS = {name: dtype for name, dtype in ROW_COLUMNS.items() if name != "position"}
_OPTIONS = tuple(name for name in _SETTINGS if name not in _NOT_OF_PARAMS)
"""Settings that are fields of SamplingParams."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """The sampling settings of some rows, which no step changes."""

    rows: Rows
    values: dict[str, NDArray[Any]]
    num_prompt_tokens: Ints
    none: tuple[Ints, ...]
    biased: tuple[Ints, ...]
    biases: tuple[NDArray[np.float32], ...]
    are_penalized: bool
    have_bans: bool
    are_limited: bool
    """Whether budgets limit the reasoning of some."""
    are_guided: bool
    look_back: bool
    num_logprobs: Ints | None


class InputBatch:
    """Tokens, progress, block tables and sampling settings by row.

    0 <= num_computed < num_tokens <= limit and num_computed <= capacity, the number of tokens that the held blocks can
    store. The blocks of the first num_cached tokens are in the prefix cache. num_drafted drafted tokens follow a row's
    own tokens; the next step may compute them.
    """

    def __init__(self, max_rows: int, max_model_len: int, block_size: int) -> None:
        self.guides: dict[Sequence, TokenGuide] = {}
        """The guides of the sequences with a grammar, whether or not they run."""
        self._unused = list(range(max_rows - 1, -1, -1))
        self._block_size = block_size
        self.num_tokens, self.num_drafted, self.num_computed, self.num_cached, self.capacity, self.limit = (
            np.zeros(max_rows, dtype=np.int32) for _ in range(6)
        )
        self._num_prompt_tokens = np.zeros(max_rows, dtype=np.int32)
        self._limited_from = np.full(max_rows, NEVER, dtype=np.int32)
        self.is_background = np.zeros(max_rows, dtype=np.bool_)
        # Memory pages that no sequence is long enough to reach are never touched, so they cost nothing.
        # A prompt that is embedded may fill the context. The token sampled after it is written too, but never computed.
        self._tokens = np.zeros((max_rows, max_model_len + 1), dtype=np.int32)
        self._block_tables = np.full((max_rows, -(-max_model_len // block_size)), NULL_BLOCK, dtype=np.int32)
        self._adapters = np.full(max_rows, NO_ADAPTER, dtype=np.int32)
        self._settings = {name: np.zeros(max_rows, dtype) for name, dtype in _SETTINGS.items()}
        self._last = self._gather_settings([], np.empty(0, dtype=np.intp))
        self._ordinals = np.arange(max_rows + 1, dtype=np.int32)

    @property
    def num_unused(self) -> int:
        """Free rows."""
        return len(self._unused)

    @property
    def shape_of_tables(self) -> tuple[int, int]:
        """Rows, and the most blocks of each."""
        rows, width = self._block_tables.shape
        return rows, width

    def take(self, seq: Sequence) -> None:
        """Assign a row to a sequence, with no token computed."""
        row = seq.row = self._unused.pop()
        num_tokens = len(seq.token_ids)
        self._tokens[row, :num_tokens] = seq.token_ids
        self.num_tokens[row] = num_tokens
        self.num_drafted[row] = self.num_computed[row] = self.num_cached[row] = self.capacity[row] = 0
        self.limit[row] = seq.max_num_tokens
        self._num_prompt_tokens[row] = seq.num_prompt_tokens
        self._limited_from[row] = seq.limited_from
        self.is_background[row] = seq.background
        self._adapters[row] = seq.adapter_slot
        for name, value in _settings_of(seq).items():
            self._settings[name][row] = value

    def give_back(self, seq: Sequence) -> None:
        """Release a sequence's row; its tokens move to `token_ids`."""
        seq.token_ids = self.tokens_of(seq).copy()
        self._block_tables[seq.row] = NULL_BLOCK
        self._unused.append(seq.row)
        seq.row = -1

    def check_integrity(self, seqs: Collection[Sequence]) -> None:
        """Raise InvariantError unless exactly these sequences have rows, and each row agrees with its sequence."""
        rows = [seq.row for seq in seqs]
        if sorted(rows + self._unused) != list(range(len(self.limit))):
            raise InvariantError(f"rows {rows} are taken and {self._unused} are not, of {len(self.limit)}")
        for seq in seqs:
            row, held = seq.row, len(seq.blocks)
            table = self._block_tables[row]
            if table[:held].tolist() != seq.blocks or table[held:].any():
                raise InvariantError(f"row {row} lists other blocks than its sequence holds")
            if self.capacity[row] != held * self._block_size or self.num_computed[row] > self.capacity[row]:
                raise InvariantError(f"row {row} has computed {self.num_computed[row]} tokens in {held} blocks")

    def tokens_of(self, seq: Sequence) -> Ints:
        """Return a running sequence's tokens; later tokens do not change this view."""
        return self._tokens[seq.row, : self.num_tokens[seq.row]]

    def add_blocks(self, seq: Sequence, blocks: list[int]) -> None:
        """Append blocks to a running sequence."""
        held = len(seq.blocks)
        self._block_tables[seq.row, held : held + len(blocks)] = blocks
        seq.blocks += blocks
        self.capacity[seq.row] = len(seq.blocks) * self._block_size

    def mark_stored(self, seq: Sequence, num_stored: int) -> None:
        """Record that a running sequence's blocks hold its first tokens; full ones are in the prefix cache."""
        self.num_computed[seq.row] = num_stored
        self.num_cached[seq.row] = num_stored // self._block_size * self._block_size

    def replace_block(self, seq: Sequence, at: int, block: int) -> None:
        """Replace one block of a running sequence."""
        self._block_tables[seq.row, at] = seq.blocks[at] = block

    def copy(self, source: Sequence, target: Sequence) -> None:
        """Give a running sequence the tokens, blocks and progress of another one; the caller counts the references."""
        from_row, to_row, num_tokens = source.row, target.row, self.num_tokens[source.row]
        self._tokens[to_row, :num_tokens] = self._tokens[from_row, :num_tokens]
        for column in (self.num_tokens, self.num_computed, self.num_cached, self.capacity):
            column[to_row] = column[from_row]
        self._block_tables[to_row] = self._block_tables[from_row]
        target.blocks = source.blocks.copy()

    def append_one(self, seq: Sequence, token_id: int) -> None:
        """Append a token to a running sequence that has computed all of its tokens."""
        num_tokens = self.num_tokens[seq.row]
        self._tokens[seq.row, num_tokens] = token_id
        self.num_computed[seq.row], self.num_tokens[seq.row] = num_tokens, num_tokens + 1

    def append(self, rows: Rows, at: Ints, tokens: Ints) -> None:
        """Append a token to each of some rows; a row that is listed several times gets its tokens in order."""
        self._tokens[rows, at] = tokens
        self.num_tokens[rows] = at + 1

    def put_draft(self, seq: Sequence, draft: list[int]) -> int:
        """Write drafted tokens after a running sequence's own tokens. Return how many."""
        num_tokens, num_drafted = self.num_tokens[seq.row], len(draft)
        self._tokens[seq.row, num_tokens : num_tokens + num_drafted] = draft
        self.num_drafted[seq.row] = num_drafted
        return num_drafted

    def last_tokens(self, step: Step) -> Ints:
        """Return the token before each sample of a step: [num_samples]."""
        tokens: Ints = self._tokens[step.sampled_rows, step.sampled_ends - 1]
        return tokens

    def set_tokens(self, rows: Rows, at: Ints, tokens: Ints) -> None:
        """Write tokens that were unknown until now."""
        self._tokens[rows, at] = tokens

    def num_known(self, rows: Rows, ends: Ints) -> Ints:
        """Return how many of the first `ends` tokens of some rows are known: all, or all but the last."""
        return ends - (self._tokens[rows, ends - 1] < 0).astype(np.int32)

    def can_plan_past(self, step: Step) -> bool:
        """Return whether the next step can be planned before the samples of this one are known."""
        settings = self._settings_for(step.sampled_seqs, step.sampled_rows)
        if settings.look_back or not settings.are_limited:
            return not settings.look_back
        # The next token of a row at its budget depends on whether this step's token ends the reasoning.
        return not np.count_nonzero(step.sampled_ends + 1 >= self._limited_from[step.sampled_rows])

    def plan(self, step: Step) -> StepPlan:
        """Return a step in the form that the runner takes; nothing in it changes while the step runs."""
        rows, starts, ends = step.rows, step.starts, step.ends
        query_starts, owners, positions = self._ordinals[: len(rows) + 1], rows, starts
        sample_tokens = self._ordinals[: len(rows)]
        if len(step.sampled) != len(rows) or step.num_prefill_tokens:
            counts = ends - starts
            query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
            np.cumsum(counts, out=query_starts[1:])
            owners = np.repeat(rows, counts)
            positions = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(starts - query_starts[:-1], counts)
            sample_tokens = query_starts[step.sampled] + step.sampled_ends - starts[step.sampled] - 1
        width = -(-max(ends.tolist()) // self._block_size)
        adapters = self._adapters[rows]
        return StepPlan(
            token_ids=self._tokens[owners, positions],
            positions=positions,
            query_starts=query_starts,
            context_lens=ends,
            block_tables=self._block_tables[:, :width][rows],
            sample_tokens=sample_tokens,
            sampling=self._sampling_rows(step.sampled_seqs, step.sampled_rows, step.sampled_ends),
            copies=step.copies,
            adapters=adapters if np.count_nonzero(adapters > NO_ADAPTER) else None,
            states=step.states,
            windows=step.windows,
        )

    def _sampling_rows(self, seqs: list[Sequence], rows: Rows, num_tokens: Ints) -> SamplingRows:
        settings = self._settings_for(seqs, rows)
        position = num_tokens - settings.num_prompt_tokens
        seen = banned = settings.none
        forced = self._forced_tokens(seqs, rows, num_tokens) if settings.are_limited else _NOTHING_FORCED
        if settings.are_penalized or settings.have_bans:
            tokens = [self._tokens[seq.row, :count] for seq, count in zip(seqs, num_tokens.tolist(), strict=True)]
            both = list(zip(seqs, tokens, strict=True))
            seen = tuple(so_far if seq.is_penalized else NO_TOKENS for seq, so_far in both)
            banned = tuple(seq.banned_ids(so_far) if seq.has_bans else NO_TOKENS for seq, so_far in both)
        masks, idle = self._request_masks(seqs, forced) if settings.are_guided or forced else (None, [])
        if idle or (forced and settings.have_bans):
            banned = tuple(self._banned_with(banned, seqs, forced, idle))
        return SamplingRows(
            **settings.values,
            position=position,
            seen=seen,
            banned=banned,
            biased=settings.biased,
            biases=settings.biases,
            masks=masks,
            num_logprobs=settings.num_logprobs,
        )

    def _forced_tokens(self, seqs: list[Sequence], rows: Rows, num_tokens: Ints) -> dict[int, int]:
        """Return the only token of each sampling row whose reasoning is over its budget.

        A pure function of each choice's tokens, of which drafted ones may still be rejected.
        """
        forced: dict[int, int] = {}
        for i in (num_tokens >= self._limited_from[rows]).nonzero()[0].tolist():
            seq, row = seqs[i], rows[i]
            if (state := seq.reasoning) is None:
                continue
            start, num_own = seq.num_prompt_tokens, int(self.num_tokens[row])
            state.push(self._tokens[row, start + state.num_seen : num_own].tolist())
            if state.is_over:
                self._limited_from[row] = NEVER
                continue
            if num_tokens[i] > num_own:
                state = state.copy()
                state.push(self._tokens[row, num_own : num_tokens[i]].tolist())
            if (token_id := state.forced_token) is not None:
                forced[i] = token_id
        return forced

    def _request_masks(self, seqs: list[Sequence], forced: Mapping[int, int]) -> tuple[TokenMasks | None, list[int]]:
        """Ask for the masks of a step; return them, and the sampling rows that still reason before a grammar."""
        guides: list[TokenGuide | None] = [self.guides.get(seq) for seq in seqs]
        idle = list[int]()
        for i, (seq, guide) in enumerate(zip(seqs, guides, strict=True)):
            if guide is None:
                continue
            guide.take(guide.new_tokens_of(self.tokens_of(seq)[seq.num_prompt_tokens :]))
            if guide.is_idle:
                idle.append(i)
            if guide.is_idle or i in forced:
                guides[i] = None
        if (first := next((guide for guide in guides if guide is not None), None)) is not None:
            return first.masks_of(guides, forced), idle
        if not forced:
            return None, idle
        limited = next(state for i in forced if (state := seqs[i].reasoning) is not None)
        masks = TokenMasks(np.isin(np.arange(len(seqs)), [*forced]), limited.vocab_size)
        masks.allow_only(forced)
        masks.finish()
        return masks, idle

    def _banned_with(
        self, banned: tuple[Ints, ...], seqs: list[Sequence], forced: Mapping[int, int], idle: list[int]
    ) -> Iterator[Ints]:
        """Yield the banned tokens of each row: none where one is forced, and no end before a grammar has begun."""
        for i, (seq, ids) in enumerate(zip(seqs, banned, strict=True)):
            if i in forced:
                yield NO_TOKENS
            else:
                yield np.union1d(ids, seq.end_ids) if i in idle else ids

    def _settings_for(self, seqs: list[Sequence], rows: Rows) -> _Settings:
        # The running batch seldom changes; until it does, the scheduler passes the same array.
        if rows is not self._last.rows:
            self._last = self._gather_settings(seqs, rows)
        return self._last

    def _gather_settings(self, seqs: list[Sequence], rows: Rows) -> _Settings:
        wanted = [seq.num_logprobs for seq in seqs]
        are_guided = any(seq in self.guides for seq in seqs)
        return _Settings(
            rows=rows,
            values={name: column[rows] for name, column in self._settings.items()},
            num_prompt_tokens=self._num_prompt_tokens[rows],
            none=(NO_TOKENS,) * len(seqs),
            are_penalized=any(seq.is_penalized for seq in seqs),
            biased=tuple(seq.biased for seq in seqs),
            biases=tuple(seq.biases for seq in seqs),
            have_bans=any(seq.has_bans for seq in seqs),
            are_limited=any(seq.reasoning is not None for seq in seqs),
            are_guided=are_guided,
            look_back=are_guided or any(seq.looks_back for seq in seqs),
            num_logprobs=np.array(wanted, dtype=np.int32) if max(wanted, default=NO_LOGPROBS) >= 0 else None,
        )


def _settings_of(seq: Sequence) -> dict[str, float]:
    return {name: getattr(seq.params, name) for name in _OPTIONS} | {
        "top_k": max(seq.params.top_k, 0),
        "seed": seq.seed,
        "choice": seq.choice,
        "num_seen_prompt": seq.num_prompt_tokens if seq.is_penalized else 0,
    }
