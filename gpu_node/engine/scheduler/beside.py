"""What sequences hold beside the blocks of their whole text: states of recurrent layers, and blocks of windows.

One rule covers both. A sequence starts with cached blocks only up to where all of this is at hand too. What a swapped
sequence leaves behind may be taken by others; then it is computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np

from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.scheduler.input_batch import InputBatch
from penstock.gpu_node.engine.scheduler.states import SequenceStates
from penstock.gpu_node.engine.scheduler.windows import SequenceWindows
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Ints, Rows, Step


class BesideBlocks:
    """States and windows, as far as a model has them."""

    def __init__(self, memory: KvCacheManager, table: InputBatch, block_size: int, max_step_tokens: int) -> None:
        self._states = None if memory.states is None else SequenceStates(memory, memory.states, table, block_size)
        self._windows: SequenceWindows | None = None
        if memory.windows is not None:
            self._windows = SequenceWindows(memory.windows, table, block_size, max_step_tokens)
        self._each = tuple(one for one in (self._states, self._windows) if one is not None)
        self._caches_prefixes = memory.caches_prefixes

    @property
    def is_empty(self) -> bool:
        """Whether the model has neither."""
        return not self._each

    # --- blocks of windows

    @property
    def max_group(self) -> int | None:
        """The most choices that may start together; None: any number."""
        return None if self._windows is None else self._windows.max_group

    def fits(self, seq: Sequence, num_blocks: int, *, is_alone: bool, num_freed: int = 0) -> bool:
        """Return whether a waiting sequence finds blocks for its windows if `num_freed` more become free.

        It starts with the first `num_blocks` blocks of its text.
        """
        if (windows := self._windows) is None:
            return True
        if is_alone:
            return windows.num_missing(seq, num_blocks, windows.blocks_alone) <= windows.num_free + num_freed
        most = windows.blocks_of_sequence + windows.blocks_of_step
        return windows.num_missing(seq, num_blocks, most) + windows.num_promised() <= windows.num_free + num_freed

    def num_missing(self, seq: Sequence, num_blocks: int) -> int:
        """Return how many blocks must be free for the windows of a waiting sequence, beside running ones."""
        windows = self._windows
        return 0 if windows is None else windows.num_missing(seq, num_blocks, windows.blocks_of_sequence)

    def shortage(self) -> int:
        """Return how many blocks the windows of running sequences and the tokens of a step lack; negative for none."""
        windows = self._windows
        return 0 if windows is None else windows.num_promised() + windows.blocks_of_step - windows.num_free

    @property
    def num_free(self) -> int:
        """Blocks of windows that no sequence holds."""
        return 0 if self._windows is None else self._windows.num_free

    def num_held(self, seq: Sequence) -> int:
        """Return how many blocks of windows a sequence holds."""
        return 0 if self._windows is None else self._windows.num_held(seq)

    def lacking(self, rows: Rows, ends: Ints) -> Ints:
        """Return how many blocks of windows each of some rows lacks to compute up to `ends` tokens."""
        return np.zeros_like(ends) if self._windows is None else self._windows.lacking(rows, ends)

    def grow(self, seq: Sequence, end: int) -> int:
        """Take the blocks of a window up to `end` tokens, as far as they are free. Return how many they reach."""
        return end if self._windows is None else self._windows.grow(seq, end)

    def enter(self, seq: Sequence, at: int) -> None:
        """Cache a block of a window that a step fills."""
        if self._windows is not None and self._caches_prefixes:
            self._windows.enter(seq, at)

    def uncache_unheld(self, seq: Sequence) -> None:
        """Remove the blocks of a sequence's windows from the cache that no sequence holds."""
        if self._windows is not None:
            self._windows.uncache_unheld(seq)

    def own_last(self, seq: Sequence) -> None:
        """Copy the shared last block of the window of a newly started fork."""
        if self._windows is not None:
            self._windows.own_last(seq)

    # --- sequences that start, pause, branch and end

    def num_usable(self, seq: Sequence, num_blocks: int) -> int:
        """Return with how many of so many cached blocks a waiting sequence can start."""
        before = None
        while num_blocks != before:
            before = num_blocks
            for one in self._each:
                num_blocks = one.num_usable(seq, num_blocks)
        return num_blocks

    def start(self, seq: Sequence, num_stored: int, num_matched: int) -> None:
        """Give a sequence that starts, with its forks, what it needs after `num_stored` tokens.

        `num_matched`: its tokens with cached blocks.
        """
        for one in self._each:
            one.start(seq, num_stored, num_matched)

    def resume(self, seq: Sequence) -> None:
        """Give a swapped sequence back what it had."""
        for one in self._each:
            one.resume(seq)

    def swap_out(self, seq: Sequence, num_stored: int) -> None:
        """Keep what a swapped sequence has as long as no other one needs it."""
        for one in self._each:
            one.swap_out(seq, num_stored)

    def is_lost(self, seq: Sequence) -> bool:
        """Return whether another sequence has taken what a swapped one left, so that it must be computed again."""
        return any(one.is_lost(seq) for one in self._each)

    def release(self, seq: Sequence) -> None:
        """Free what a sequence has."""
        for one in self._each:
            one.release(seq)

    def share(self, leader: Sequence, fork: Sequence) -> None:
        """Let a fork that starts read what its leader has computed for it."""
        for one in self._each:
            one.share(leader, fork)

    def forget_forks(self, leader: Sequence) -> None:
        """Note that no fork of a sequence waits any more."""
        if self._states is not None:
            self._states.forget_forks(leader)

    def branch(self, pairs: Items[tuple[Sequence, Sequence]]) -> None:
        """Let parked beams continue from other ones: pairs of a sequence and the one that becomes its copy."""
        if self._states is not None:
            for source, target in pairs:
                self._states.branch(source, target)
        if self._windows is not None:
            self._windows.branch(pairs)

    def continue_beam(self, seq: Sequence) -> None:
        """Count the newest token of a parked beam as computed."""
        if self._states is not None:
            self._states.continue_beam(seq)

    # --- steps

    def plan(self, step: Step) -> Step:
        """Return a step with the states and windows of its sequences."""
        if self._states is not None:
            step = replace(step, states=self._states.plan(step))
        if self._windows is not None:
            step = replace(step, windows=self._windows.plan(step))
        return step

    def count(self, step: Step) -> None:
        """Note that the rows of a step count its tokens as computed, maybe while it still runs."""
        if self._states is not None:
            self._states.count(step)

    def free_behind(self, step: Step) -> None:
        """Free the blocks behind the windows of a step that is counted, whose forks have started."""
        if self._windows is not None:
            self._windows.free_behind(step)

    def commit(self, step: Step, failed: Collection[Sequence]) -> None:
        """Note that a step is computed. `failed`: its sequences with logits that are not finite."""
        if self._states is not None:
            self._states.commit(step, failed)
        if self._windows is not None:
            self._windows.commit(step)

    def take_lost(self) -> Iterator[Sequence]:
        """Yield the running sequences that must start over, because a state that they need again was not kept."""
        return iter(()) if self._states is None else self._states.take_lost()

    def roll_back(self) -> None:
        """Note that all submitted steps failed."""
        if self._states is not None:
            self._states.drop_submitted()
        if self._windows is not None:
            self._windows.roll_back()

    def is_intact(self, seq: Sequence, step: Step, *, has_begun: bool) -> bool:
        """Return whether a failed step left a running sequence what it had. `has_begun`: whether the runner took it."""
        has_state = self._states is None or not has_begun or self._states.is_intact(seq, step)
        return has_state and (self._windows is None or self._windows.is_intact(seq))

    def lose_all(self) -> None:
        """Forget the submitted steps and all that is cached: nothing has its content any more."""
        for one in self._each:
            one.lose_all()

    def check_integrity(self, seqs: Collection[Sequence]) -> None:
        """Raise InvariantError unless these sequences have all of it, and reference counts agree. For tests."""
        for one in self._each:
            one.check_integrity(seqs)
