"""Blocks of windows: a sequence holds those of its last tokens, and a prompt starts only behind a cached window.

`LabelledCache` asserts in each step that every sequence reads exactly its own tokens, none of them behind its window.
Random orders of events are in `test_any_load.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from fakes.schedules import BLOCK_SIZE, GivenSequences, LabelledCache, check_plan, new_scheduler
from fakes.slots import Beams, UncertainGuide

from penstock.gpu_node.engine.kv_cache.windows import WindowCache
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.model.protocol import FAILED_TOKEN, WindowSizes

WINDOW = 10
SYSTEM = list(range(100, 126))
"""Six full blocks and two tokens."""


class Load(GivenSequences):
    """A scheduler with a model of both kinds of blocks. Every sequence gets the token 1000 again and again."""

    def __init__(
        self, *, num_windows: int = 60, alignment: int = 1, num_blocks: int = 200, budget: int = 64, **settings: Any
    ) -> None:
        self.budget, sizes = budget, WindowSizes(num_windows, 1, WINDOW, alignment)
        self.whole, self.windowed = LabelledCache(), LabelledCache(sizes)
        self.scheduler, self.memory = new_scheduler(
            num_blocks, budget=budget, windows=sizes, **{"max_num_seqs": 8} | settings
        )
        assert self.memory.windows is not None
        self.windows: WindowCache = self.memory.windows

    @property
    def num_held(self) -> int:
        """Blocks of windows that sequences hold."""
        return self.windows.pool.num_total - self.windows.pool.num_free

    def launch(self) -> Step:
        """Schedule a step, and compute it."""
        step = self.scheduler.schedule()
        assert step is not None
        plan = check_plan(self.scheduler, step, self.budget)
        self.whole.run(self.scheduler, step, plan)
        self.windowed.run(self.scheduler, step, plan)
        self.scheduler.check_integrity()
        return step

    def step(self, token: int = 1000, late: Collection[Sequence] = ()) -> Step:
        """Run a step."""
        step = self.launch()
        undrawn = [i for i, seq in enumerate(step.sampled_seqs) if seq in late]
        self.scheduler.commit(step, np.full(len(step.sampled_seqs), token, dtype=np.int32), undrawn)
        self.scheduler.check_integrity()
        return step

    def run(self) -> None:
        """Run all sequences to their end."""
        while self.scheduler.running or self.scheduler.queues:
            self.step()

    def serve(self, prompt: list[int], num_output: int = 3, **fields: Any) -> Sequence:
        """Run a sequence to its end, and return it."""
        seq = self.add(prompt, num_output, **fields)
        self.run()
        return seq

    def evict_windows(self) -> None:
        """Use all free blocks of windows for something else."""
        blocks = self.windows.take(self.windows.pool.num_free)
        self.windows.pool.free(blocks)


# --- what a sequence holds


@pytest.mark.parametrize("alignment", [1, 8])
def test_a_long_sequence_holds_its_window_and_a_steps_tokens_at_most(alignment: int) -> None:
    load = Load(alignment=alignment, budget=16)
    seq = load.add(list(range(150)), num_output=60)
    most_in_prompt = load.windows.blocks_of_window + 16 // BLOCK_SIZE
    while seq.num_prompt_tokens > load.scheduler.tokens_of(seq).size - 1:
        load.step()
        assert load.num_held <= most_in_prompt
    for _ in range(50):
        load.step()
        assert load.num_held <= load.windows.blocks_of_window
    assert len(seq.blocks) == 200 // BLOCK_SIZE
    load.run()
    assert load.num_held == 0


def test_memory_for_two_windows_computes_prompts_of_any_number_and_length() -> None:
    load = Load(num_windows=12, num_blocks=400, budget=16)
    seqs = [load.add(list(range(1000 * i, 1000 * i + 90))) for i in range(6)]
    load.run()
    assert all(len(seq.token_ids) == 93 for seq in seqs)


def test_a_pool_of_one_window_goes_on_token_by_token() -> None:
    load = Load(num_windows=4, num_blocks=400, budget=64)
    assert load.windows.blocks_of_window == 4
    assert len(load.serve(list(range(90))).token_ids) == 93


# --- cached prefixes


def test_a_prompt_with_the_same_beginning_starts_behind_it() -> None:
    load = Load()
    found = [load.serve([*SYSTEM, *range(200 + 20 * i, 215 + 20 * i)]).cached_tokens for i in range(3)]
    assert found == [0, 24, 24]


def test_the_next_turn_of_a_chat_starts_at_its_last_full_block() -> None:
    load = Load()
    first = load.serve([*SYSTEM, *range(200, 220)], num_output=9)
    turn = [*first.token_ids.tolist(), *range(300, 310)]
    assert load.serve(turn).cached_tokens == (len(first.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_without_a_window_at_its_end_a_cached_prefix_is_computed_again() -> None:
    load = Load()
    load.serve(SYSTEM)
    load.evict_windows()
    assert load.serve(SYSTEM).cached_tokens == 0
    assert load.windows.missed_tokens == 24
    assert load.serve(SYSTEM).cached_tokens == 24


def test_a_prefix_is_used_as_far_as_a_window_before_its_end_is_cached() -> None:
    load = Load()
    load.serve(SYSTEM)
    hashes = load.new(SYSTEM)
    hashes.hash_full_blocks(hashes.token_ids, BLOCK_SIZE)
    load.windows.drop([hashes.block_hashes[5]])
    assert load.serve(SYSTEM).cached_tokens == 20
    load.windows.drop([hashes.block_hashes[1]])
    assert load.serve(SYSTEM).cached_tokens == 24


def test_sequences_of_one_step_share_the_blocks_that_it_fills() -> None:
    load = Load()
    seqs = [load.add(SYSTEM) for _ in range(3)]
    load.step()
    assert [seq.cached_tokens for seq in seqs] == [0, 24, 24]
    load.run()


def test_a_long_prompt_does_not_displace_a_window_that_was_used_again() -> None:
    load = Load(num_windows=60, num_blocks=800, budget=16)
    for _ in range(5):
        load.serve(SYSTEM)
    load.serve(list(range(2000, 2400)))
    assert load.windows.pool.num_evictions > 0
    assert load.serve(SYSTEM).cached_tokens == 24


# --- sequences that share, compute a token again, are preempted or fail


@pytest.mark.parametrize("num_prompt", [25, 26, 28, 1])
def test_choices_share_the_window_of_their_prompt_and_diverge(num_prompt: int) -> None:
    load = Load()
    choices = [load.new(list(range(num_prompt)), num_output=30, choice=i) for i in range(4)]
    load.scheduler.add(*choices)
    load.run()
    assert load.num_held == 0 and all(len(seq.token_ids) == num_prompt + 30 for seq in choices)


def test_beams_copy_the_last_block_of_the_window_that_they_share() -> None:
    load = Load()
    seqs = [load.new(SYSTEM, num_output=40, choice=i) for i in range(3)]
    search = Beams(seqs)
    load.scheduler.add(*seqs)
    for turn in range(30):
        step = load.launch()
        for seq in step.sampled_seqs:
            load.scheduler.park(seq)
        load.scheduler.commit(step, np.full(len(step.sampled_seqs), 0, np.int32), range(len(step.sampled_seqs)))
        load.scheduler.continue_beams(search.next([turn % 3, turn % 2, 0]))
        load.scheduler.check_integrity()
    for seq in seqs:
        load.scheduler.remove(seq)
    assert load.num_held == 0


def test_a_row_whose_mask_is_late_computes_its_token_again() -> None:
    load, guide = Load(), UncertainGuide()
    seq = load.new(SYSTEM, num_output=20)
    load.scheduler.add(seq, guides={seq: guide})
    for turn in range(12):
        load.step(late=[seq] if turn % 3 == 1 else [])
    load.run()
    assert len(seq.token_ids) == len(SYSTEM) + 20


def test_a_swapped_sequence_keeps_its_window_until_the_blocks_are_needed() -> None:
    load = Load(num_blocks=100, num_host_blocks=60, preemption="swap", num_windows=40)
    seq = load.add(list(range(50)), num_output=20)
    load.step()
    load.scheduler._preemptor.preempt(seq)
    assert load.num_held == 0 and list(load.scheduler.queues.swapped) == [seq]
    load.scheduler.check_integrity()
    load.step()
    assert seq.row >= 0 and load.scheduler.prefix_hits.lookup_tokens == 50
    load.scheduler._preemptor.preempt(seq)
    load.evict_windows()
    load.step()
    assert load.scheduler.prefix_hits.lookup_tokens > 50, "it was not computed again"
    load.run()
    assert len(seq.token_ids) == 70


@pytest.mark.parametrize("for_memory", [False, True])
def test_a_step_that_fails_leaves_nothing_of_it_in_the_cache(for_memory: bool) -> None:
    load = Load()
    seq = load.add(SYSTEM, num_output=9)
    step = load.launch()
    load.whole.fail(step, load.scheduler.plan(step), for_memory=for_memory)
    load.windowed.fail(step, load.scheduler.plan(step), for_memory=for_memory)
    load.scheduler.roll_back(step, for_memory=for_memory)
    load.scheduler.check_integrity()
    load.run()
    assert len(seq.token_ids) == len(SYSTEM) + 9 and load.serve(SYSTEM).cached_tokens == 24


def test_a_window_that_is_not_finite_is_never_used_again() -> None:
    load = Load()
    seq = load.add(SYSTEM, num_output=9)
    load.step(token=FAILED_TOKEN)
    assert seq.row < 0 and load.windows.pool.num_cached == 0
    load.windowed.spoil(set(range(1, 61)))
    assert load.serve(SYSTEM).cached_tokens == 0


def test_after_a_loss_of_all_blocks_every_sequence_starts_over() -> None:
    load = Load()
    seq = load.add(SYSTEM, num_output=9)
    load.step()
    load.launch()
    load.scheduler.lose_blocks()
    load.whole.spoil(set(range(1, 201)))
    load.windowed.spoil(set(range(1, 61)))
    load.scheduler.check_integrity()
    load.run()
    assert len(seq.token_ids) == len(SYSTEM) + 9
