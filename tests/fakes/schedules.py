"""Schedulers and sequences for tests without a model, and a KV cache that records what each slot contains."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.config import PreemptionName
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.kv_cache.states import StateCache
from penstock.gpu_node.engine.kv_cache.windows import WindowCache
from penstock.gpu_node.engine.policy.policy import SchedulingPolicy
from penstock.gpu_node.engine.scheduler.budget import StepLimits
from penstock.gpu_node.engine.scheduler.scheduler import LearnedTimes, Scheduler
from penstock.gpu_node.engine.sequence import Sequence, salted_root
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.engine.text.output import EndRule
from penstock.gpu_node.model.protocol import NO_WINDOWS, NULL_BLOCK, StepPlan, WindowSizes

BLOCK_SIZE = 4
EOS = 999


def new_sequence(
    name: str,
    num_prompt: int,
    num_output: int,
    *,
    choice: int = 0,
    first_token: int = 0,
    salt: str | None = None,
    penalty: float = 0.0,
    background: bool = False,
) -> Sequence:
    """Return a choice whose prompt tokens count up from `first_token`."""
    return Sequence(
        request_id=name,
        choice=choice,
        params=SamplingParams(presence_penalty=penalty),
        seed=0,
        token_ids=np.arange(first_token, first_token + num_prompt, dtype=np.int32),
        num_prompt_tokens=num_prompt,
        end_rule=EndRule(frozenset((EOS,)), 0, num_output),
        root_hash=salted_root(salt),
        background=background,
    )


class GivenSequences:
    """Sequences with given prompts for a scheduler. They are numbered as they are made."""

    scheduler: Scheduler
    _num_added = 0

    def new(self, prompt: list[int], num_output: int = 3, **fields: Any) -> Sequence:
        """Return a new sequence."""
        self._num_added += 1
        seq = new_sequence(str(self._num_added), len(prompt), num_output)
        seq.token_ids = np.array(prompt, dtype=np.int32)
        for name, value in fields.items():
            setattr(seq, name, value)
        return seq

    def add(self, prompt: list[int], num_output: int = 3, **fields: Any) -> Sequence:
        """Queue a sequence."""
        seq = self.new(prompt, num_output, **fields)
        self.scheduler.add(seq)
        return seq


def new_scheduler(
    num_blocks: int,
    num_host_blocks: int = 0,
    *,
    max_num_seqs: int = 8,
    budget: int = 16,
    preemption: PreemptionName = "recompute",
    policy: SchedulingPolicy | None = None,
    num_slots: int = 0,
    windows: WindowSizes = NO_WINDOWS,
    **memory_settings: Any,
) -> tuple[Scheduler, KvCacheManager]:
    """Return a scheduler with that many blocks and state slots, and with blocks of windows."""
    states = StateCache(num_slots) if num_slots else None
    beside = WindowCache(windows, BLOCK_SIZE) if windows.num_blocks else None
    memory = KvCacheManager(num_blocks, num_host_blocks, states=states, windows=beside, **memory_settings)
    limits = StepLimits(
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_prefill_beside_decode=max(1, budget // 2),
        max_model_len=(num_blocks + num_host_blocks) * BLOCK_SIZE,
    )
    return Scheduler(memory, limits, LearnedTimes(preemption, 1), policy=policy), memory


def check_plan(scheduler: Scheduler, step: Step, budget: int) -> StepPlan:
    """Return a step's plan after asserting that it agrees with the scheduler's state."""
    plan = scheduler.plan(step)
    counts = np.diff(plan.query_starts)
    assert counts.min() >= 1 and counts.sum() == len(plan.token_ids) <= budget
    in_step = set(step.seqs)
    assert step.seqs == [seq for seq in scheduler.running if seq in in_step]
    width = plan.block_tables.shape[1]
    starts, ends, first, last = (a.tolist() for a in (step.starts, step.ends, plan.query_starts, plan.query_starts[1:]))
    positions, token_ids, contexts = plan.positions.tolist(), plan.token_ids.tolist(), plan.context_lens.tolist()
    tables, sample_tokens = plan.block_tables.tolist(), set(plan.sample_tokens.tolist())
    for i, seq in enumerate(step.seqs):
        tokens, of_seq = slice(first[i], last[i]), scheduler.tokens_of(seq)
        assert positions[tokens] == list(range(starts[i], ends[i]))
        assert token_ids[tokens] == of_seq[starts[i] : ends[i]].tolist()
        assert contexts[i] == ends[i] <= len(seq.blocks) * BLOCK_SIZE
        assert tables[i] == (seq.blocks + [0] * width)[:width]
        assert (last[i] - 1 in sample_tokens) == (ends[i] == len(of_seq))
    sampled = [step.seqs[i] for i in np.searchsorted(plan.query_starts, plan.sample_tokens, side="right") - 1]
    assert plan.sampling.position.tolist() == [len(scheduler.tokens_of(seq)) - seq.num_prompt_tokens for seq in sampled]
    assert np.concatenate([[0], *plan.sampling.seen]).min() >= 0
    return plan


class LabelledCache:
    """A KV cache that stores, for each slot, the tokens for which it was computed, or that the step failed."""

    def __init__(self, windows: WindowSizes = NO_WINDOWS) -> None:
        """`windows`: it is that of the layers with windows, and no token reads what lies behind its own."""
        self._slots: dict[tuple[int, int], object] = {}
        self._windows = windows

    def run(self, scheduler: Scheduler, step: Step, plan: StepPlan) -> None:
        """Run a step as a runner does: copy, store, read. Assert that each sequence reads only its own tokens."""
        for source, target in self._copies(plan):
            for offset in range(BLOCK_SIZE):
                self._slots[target, offset] = self._slots.get((source, offset))
        labels = [self._labels(scheduler, seq) for seq in step.seqs]
        for i, of_seq in enumerate(labels):
            for at in range(step.starts[i], step.ends[i]):
                self._slots[self._slot(plan, i, at)] = of_seq[at]
        for i, of_seq in enumerate(labels):
            first, end = self._first_read(int(step.starts[i])), int(step.ends[i])
            assert [self._slots[self._slot(plan, i, at)] for at in range(first, end)] == of_seq[first:end]

    def fail(self, step: Step, plan: StepPlan, *, for_memory: bool) -> None:
        """Run a step that fails: the blocks that it copies to or writes to lose all their contents.

        After an out-of-memory error, blocks lose only the slots that the step would have written.
        """
        written = {block for _, block in self._copies(plan)}
        for i, (start, end) in enumerate(zip(step.starts.tolist(), step.ends.tolist(), strict=True)):
            if for_memory:
                self._slots |= {self._slot(plan, i, at): None for at in range(start, end)}
            else:
                written.update(self._table(plan, i)[start // BLOCK_SIZE : -(-end // BLOCK_SIZE)])
        self.spoil(written)

    def spoil(self, blocks: set[int]) -> None:
        """Lose the contents of some blocks."""
        self._slots |= {(block, offset): None for block in blocks for offset in range(BLOCK_SIZE)}

    @staticmethod
    def _labels(scheduler: Scheduler, seq: Sequence) -> list[object]:
        tokens = scheduler.tokens_of(seq).tolist()
        labels, so_far = [], hash(seq.root_hash)
        for token in tokens:
            so_far = hash((so_far, token))
            labels.append((so_far, token))
        return labels

    def _first_read(self, at: int) -> int:
        """Return the first token that a runner reads for the token at a position."""
        if not self._windows.num_blocks:
            return 0
        alignment = self._windows.alignment
        return max(0, at + 1 - self._windows.window) // alignment * alignment

    def _copies(self, plan: StepPlan) -> list[tuple[int, int]]:
        windows = plan.windows
        of_group = plan.copies if not self._windows.num_blocks or windows is None else windows.copies
        return [(source, target) for source, target in of_group.tolist()]

    def _table(self, plan: StepPlan, i: int) -> list[int]:
        windows = plan.windows
        tables = plan.block_tables if not self._windows.num_blocks or windows is None else windows.block_tables
        found: list[int] = tables[i].tolist()
        return found

    def _slot(self, plan: StepPlan, i: int, at: int) -> tuple[int, int]:
        block = self._table(plan, i)[at // BLOCK_SIZE]
        assert block != NULL_BLOCK
        return block, at % BLOCK_SIZE
