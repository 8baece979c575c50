"""States of recurrent layers: no token is seen twice or skipped, and prompts start from the snapshots of earlier ones.

`LabelledSlots` asserts in each step that every sequence continues the state of exactly its own tokens. Random orders of
events are in `test_any_load.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pytest
from fakes.schedules import BLOCK_SIZE, GivenSequences, check_plan, new_scheduler, new_sequence
from fakes.slots import Beams, LabelledSlots, UncertainGuide

from penstock.gpu_node.engine.kv_cache.states import StateCache
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.model.protocol import FAILED_TOKEN, NO_STATE

SYSTEM = list(range(100, 126))
"""Six full blocks and two tokens."""


class Load(GivenSequences):
    """A scheduler with a model of its slots. Every sequence gets the token 1000 again and again."""

    def __init__(self, *, num_slots: int = 16, num_blocks: int = 100, budget: int = 64, **settings: Any) -> None:
        self.slots = LabelledSlots()
        self.budget = budget
        self.scheduler, self.memory = new_scheduler(
            num_blocks, budget=budget, num_slots=num_slots, **{"max_num_seqs": 8} | settings
        )
        assert self.memory.states is not None
        self.states: StateCache = self.memory.states

    def launch(self) -> Step:
        """Schedule a step, and compute it."""
        step = self.scheduler.schedule()
        assert step is not None
        self.slots.run(self.scheduler, step, check_plan(self.scheduler, step, self.budget))
        self.scheduler.check_integrity()
        return step

    def step(self, *, tokens: Mapping[Sequence, int] | None = None, late: Collection[Sequence] = ()) -> Step:
        """Run a step."""
        step = self.launch()
        drawn = [(tokens or {}).get(seq, 1000) for seq in step.sampled_seqs]
        undrawn = [i for i, seq in enumerate(step.sampled_seqs) if seq in late]
        self.scheduler.commit(step, np.array(drawn, dtype=np.int32), undrawn)
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


def start_of(step: Step, seq: Sequence) -> int:
    """Return the first token that a sequence computes in a step."""
    return int(step.starts[step.seqs.index(seq)])


# --- snapshots


def test_the_third_prompt_with_a_system_prompt_starts_behind_it() -> None:
    load = Load()
    found = [load.serve([*SYSTEM, *range(200 + 20 * i, 215 + 20 * i)]).cached_tokens for i in range(4)]
    assert found == [0, 0, 24, 24]
    # The second prompt had the blocks, but the only snapshot stood behind them.
    assert (load.states.num_hits, load.states.missed_tokens) == (2, 24)


@pytest.mark.parametrize("length", [5, 8, 9, 31])
def test_a_short_prompt_hits_at_its_second_request(length: int) -> None:
    load = Load()
    prompt = list(range(length))
    assert [load.serve(prompt).cached_tokens for _ in range(2)] == [0, (length - 1) // BLOCK_SIZE * BLOCK_SIZE]


def test_a_prompt_in_small_chunks_saves_the_same_snapshot_and_none_for_each_chunk() -> None:
    load = Load(budget=5)
    seq = load.add(list(range(31)))
    load.step()
    load.step()
    assert load.states.num_snapshots == 0
    load.run()
    assert load.serve(list(range(31))).cached_tokens == 28
    assert seq.cached_tokens == 0


@pytest.mark.parametrize("num_output", [1, 2, 5, 9, 17, 40])
def test_the_next_turn_of_a_chat_starts_less_than_a_block_before_the_new_message(num_output: int) -> None:
    load = Load()
    prompt = list(range(22))
    load.serve(prompt, num_output)
    # The last token of an answer is never computed.
    computed = 22 + num_output - 1
    following = load.serve([*prompt, *[1000] * num_output, *range(50, 60)])
    assert following.cached_tokens == computed // BLOCK_SIZE * BLOCK_SIZE


def test_a_running_answer_has_one_snapshot_beside_that_of_its_prompt() -> None:
    load = Load()
    load.add(list(range(10)), 60)
    for _ in range(59):
        load.step()
        assert load.states.num_snapshots <= 2
        assert load.states.num_slots - load.states.num_free <= 2
    assert load.states.num_snapshots == 2 and load.states.num_evictions == 0


def test_a_snapshot_goes_with_its_block() -> None:
    load = Load(num_blocks=12)
    load.serve(list(range(13)))
    assert load.states.num_snapshots == 1
    load.serve(list(range(500, 544)), 1)
    assert load.states.num_evictions == 0 and load.states.num_snapshots == 1
    assert load.serve(list(range(13))).cached_tokens == 0


def test_snapshots_move_to_the_host_with_their_blocks() -> None:
    load = Load(num_blocks=12, num_host_blocks=12)
    load.serve(list(range(13)))
    load.serve(list(range(500, 544)), 1)
    assert load.serve(list(range(13))).cached_tokens == 12


def test_the_least_recently_used_snapshot_is_evicted() -> None:
    load = Load(num_slots=16, max_num_seqs=1)
    for i in range(16):
        load.serve([i, *range(8)], 1)
    load.serve([0, *range(8)], 1)
    for i in range(20, 30):
        load.serve([i, *range(8)], 1)
    assert load.states.num_evictions > 0
    assert load.serve([0, *range(8)], 1).cached_tokens == 8
    assert load.serve([1, *range(8)], 1).cached_tokens == 0


def test_a_flood_of_one_tenant_evicts_no_snapshot_of_a_tenant_below_its_share() -> None:
    load = Load(num_slots=16, num_blocks=400)
    load.serve(list(range(20)), 1, tenant="small")
    for i in range(50):
        load.serve([100 + i, *range(20)], 1, tenant="large")
    assert load.states.num_evictions > 0
    assert load.serve(list(range(20)), 1, tenant="small").cached_tokens == 16


def test_prompts_that_start_together_share_blocks_but_not_a_state_that_is_not_computed_yet() -> None:
    load = Load()
    seqs = [load.add(list(range(21))) for _ in range(3)]
    step = load.step()
    assert step.starts.tolist() == [0, 0, 0]
    load.run()
    assert [seq.cached_tokens for seq in seqs] == [0, 0, 0]
    assert load.serve(list(range(21))).cached_tokens == 20


def test_without_prefix_caching_no_slot_is_taken_for_snapshots() -> None:
    load = Load(enable_prefix_caching=False)
    load.serve(list(range(21)), 20)
    assert load.states.num_snapshots == 0
    assert load.serve(list(range(21))).cached_tokens == 0


def test_many_conversations_in_few_slots_stay_right_and_within_memory() -> None:
    load = Load(num_slots=32, max_num_seqs=16, num_blocks=2000, budget=256)
    chats = [[i, *SYSTEM] for i in range(64)]
    for turn in range(3):
        seqs = [load.add(chat, 6) for chat in chats]
        load.run()
        chats = [[*seq.token_ids.tolist(), 300 + turn, 301] for seq in seqs]
    assert load.states.num_evictions > 0 and load.states.num_slots == load.states.num_free == 32


# --- states of sequences that compute a token again, fork, branch or fail


def test_a_late_mask_costs_one_token_and_not_the_prompt() -> None:
    load = Load()
    seq = load.new(list(range(22)), 12)
    guide = UncertainGuide()
    load.scheduler.add(seq, guides={seq: guide})
    starts = []
    for i in range(16):
        step = load.step(late=[seq] if i in (0, 1, 4, 5, 9) else ())
        starts.append(start_of(step, seq))
    assert starts == [0, 21, 21, 22, 23, 23, 23, 24, 25, 26, 26, 27, 28, 29, 30, 31]


def test_a_row_without_a_slot_for_the_state_before_its_last_token_starts_over_if_its_mask_is_late() -> None:
    # One row and one slot: less than a node ever has.
    load = Load(num_slots=1, max_num_seqs=1)
    seq = load.new(list(range(9)), 4)
    load.scheduler.add(seq, guides={seq: UncertainGuide()})
    load.step(late=[seq])
    assert start_of(load.step(), seq) == 0
    load.run()
    assert len(seq.token_ids) == 13


def test_forks_start_from_the_state_before_the_last_prompt_token() -> None:
    load = Load()
    seqs = [load.new(list(range(14)), 5) for _ in range(4)]
    for i, seq in enumerate(seqs):
        seq.request_id, seq.choice = "one", i
    load.scheduler.add(*seqs)
    assert load.step().seqs == seqs[:1]
    assert load.step().starts.tolist() == [14, 13, 13, 13]
    load.run()
    assert load.states.num_free == load.states.num_slots


def test_forks_with_logged_tokens_start_behind_the_prompt() -> None:
    load = Load()
    load.serve([*range(14), 7, 8, 9, 10, 11], 2)
    leader, *forks = [load.new(list(range(14)), 8) for _ in range(3)]
    for seq, logged in ((leader, [7, 8, 9, 10, 11]), (forks[0], [7, 8]), (forks[1], [])):
        seq.token_ids = np.array([*range(14), *logged], dtype=np.int32)
    load.scheduler.add(leader, *forks)
    # The snapshot behind the fork's beginning is of no use to the fork.
    assert load.step().starts.tolist() == [0]
    assert load.step().starts.tolist() == [19, 14, 13]
    load.run()


def test_beams_continue_the_state_of_the_beam_that_they_branch_from() -> None:
    load = Load()
    search = Beams([load.new(list(range(14)), 20) for _ in range(3)])
    load.scheduler.add(*search.all_seqs)
    for turn in range(12):
        step = load.launch()
        for seq in step.sampled_seqs:
            load.scheduler.park(seq)
        load.scheduler.commit(step, np.full(len(step.sampled), 1000, dtype=np.int32), range(len(step.sampled)))
        load.scheduler.continue_beams(search.next([turn, 2 * turn, 1]))
        load.scheduler.check_integrity()
    for seq in search.all_seqs:
        load.scheduler.remove(seq)
    assert load.states.num_free == load.states.num_slots


def test_a_step_that_ran_out_of_memory_in_the_middle_loses_the_states_that_it_overwrote() -> None:
    load = Load()
    seq, other = load.add(list(range(14)), 30), load.add(list(range(50, 60)), 30)
    for _ in range(5):
        load.step()
    step = load.launch()
    load.slots.fail(load.scheduler.plan(step))
    load.scheduler.roll_back(step, for_memory=True)
    assert load.scheduler.running == []
    restarted = [load.step() for _ in range(20)]
    starts = {one: start_of(step, one) for step in restarted[::-1] for one in step.seqs}
    assert starts == {seq: 16, other: 12}
    load.run()


def test_a_step_that_had_no_memory_to_begin_leaves_all_states_as_they_were() -> None:
    load = Load()
    seq, other = load.add(list(range(14)), 30), load.add(list(range(50, 60)), 30)
    for _ in range(5):
        load.step()
    step = load.launch()
    load.slots.undo()
    load.scheduler.roll_back(step, for_memory=True, has_begun=False)
    # A step of one token follows, so one of them must wait.
    assert load.scheduler.running == [seq] and load.scheduler.tokens_of(other).shape == (15,)
    assert start_of(load.step(), seq) == 18
    load.run()


def test_after_a_loss_of_all_slots_every_sequence_starts_over() -> None:
    load = Load(num_host_blocks=40, preemption="swap")
    seqs = [load.add(list(range(14)), 30), load.add(list(range(50, 60)), 30)]
    for _ in range(5):
        load.step()
    load.scheduler._preemptor.preempt(seqs[1])
    step = load.launch()
    load.slots.spoil(set(range(load.states.num_slots)))
    load.scheduler.lose_blocks()
    load.scheduler.check_integrity()
    assert load.states.num_snapshots == 0 and load.states.num_free == load.states.num_slots
    again = load.step()
    assert again.starts.tolist() == [0] * len(again.seqs) and step.seqs[0] in again.seqs
    load.run()


def test_a_failed_step_leaves_no_snapshot() -> None:
    load = Load()
    load.add(list(range(21)))
    step = load.launch()
    load.slots.fail(load.scheduler.plan(step))
    load.scheduler.roll_back(step)
    assert load.states.num_snapshots == 0 and load.states.num_free == load.states.num_slots
    assert start_of(load.step(), step.seqs[0]) == 0
    load.run()


def test_a_sequence_without_finite_logits_leaves_no_snapshot_and_not_the_one_it_began_from() -> None:
    load = Load()
    # Its blocks stay cached, because this sequence holds them.
    load.add(list(range(21)), 60)
    load.step()
    prompt = [*range(21), *range(60, 80)]
    seq, other = load.add(prompt), load.add(prompt)
    step = load.step(tokens={seq: FAILED_TOKEN})
    assert (start_of(step, seq), start_of(step, other)) == (20, 20)
    assert load.states.num_hits == 2 and load.states.num_snapshots == 0
    again = load.add(prompt)
    assert start_of(load.step(), again) == 0
    load.run()


def test_a_swapped_sequence_keeps_its_state_until_the_slot_is_needed() -> None:
    load = Load(num_slots=16, num_host_blocks=40, preemption="swap")
    seq = load.add(list(range(21)), 30)
    for _ in range(4):
        load.step()
    load.scheduler._preemptor.preempt(seq)
    assert load.scheduler.num_swaps == 1
    assert start_of(load.step(), seq) == 24
    load.run()


def test_a_swapped_sequence_whose_slot_was_needed_is_computed_again_from_a_snapshot() -> None:
    load = Load(num_slots=4, max_num_seqs=2, num_host_blocks=40, preemption="swap")
    seq = load.add(list(range(21)), 30)
    for _ in range(6):
        load.step()
    load.scheduler._preemptor.preempt(seq)
    for _ in range(4):
        slot = load.states.take()
        assert slot is not None
        load.states.free(slot)
    held = [load.states.take() for _ in range(4)]
    for slot in held:
        assert slot is not None
        load.states.free(slot)
    step = load.step()
    assert start_of(step, seq) == 0 and load.states.num_evictions > 0
    load.run()


def test_a_model_without_states_has_none_in_its_steps() -> None:
    scheduler, memory = new_scheduler(20)
    scheduler.add(new_sequence("1", 9, 3))
    step = scheduler.schedule()
    assert step is not None and step.states is None and scheduler.plan(step).states is None and memory.states is None


def test_the_first_token_follows_no_state() -> None:
    load = Load()
    load.add([1])
    step = load.launch()
    assert step.states is not None and step.states.reads.tolist() == [NO_STATE]
