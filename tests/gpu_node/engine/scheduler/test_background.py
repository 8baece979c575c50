"""Background work runs in what foreground work leaves of a step, delays it by a bounded factor, and never starves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from fakes.cover import examples
from fakes.engine_runs import drain, tokens_of
from fakes.schedules import BLOCK_SIZE, check_plan, new_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.engine.scheduler.background import FOREGROUND_MEMORY_MS
from penstock.gpu_node.engine.scheduler.budget import StepLimits, StepWork
from penstock.gpu_node.engine.scheduler.scheduler import LearnedTimes, Scheduler
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.model.protocol import StepResult

LIMITS = StepLimits(
    block_size=BLOCK_SIZE,
    max_num_seqs=64,
    max_num_batched_tokens=256,
    max_prefill_beside_decode=256,
    max_model_len=4096,
    max_prefill_ms_beside_decode=30.0,
    background_slowdown=2.0,
)
FIXED_MS, TOKEN_MS = 4.0, 1.0
"""The machine of these tests: a step takes 4 ms, and 1 ms for each token."""


@dataclass
class Bench:
    """A scheduler on a machine whose step times it knows, and the steps that it has run."""

    limits: StepLimits = LIMITS
    num_blocks: int = 8192
    steps: list[Step] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.times = LearnedTimes("recompute", 1)
        for num_decoded, num_prefilled in ((1, 0), (32, 0), (8, 64), (0, 200), (64, 0)) * 60:
            work = StepWork(num_decoded, num_prefilled, 0, 0)
            self.times.step_time.note(work, FIXED_MS + TOKEN_MS * (num_decoded + num_prefilled))
        self.memory = KvCacheManager(self.num_blocks)
        self.scheduler = Scheduler(self.memory, self.limits, self.times)
        self.num_added = 0

    def add(self, num_prompt: int, num_output: int, *, background: bool, tenant: str = "default") -> Sequence:
        """Queue a sequence that shares no prefix with others."""
        self.num_added += 1
        first = 5000 * self.num_added
        seq = new_sequence(str(self.num_added), num_prompt, num_output, first_token=first, background=background)
        seq.tenant = tenant
        self.scheduler.add(seq)
        return seq

    def is_due(self) -> bool:
        """Return whether background work is below its share."""
        return self.scheduler.background.is_due

    def run(self, num_steps: int = 1) -> Step:
        """Run steps. Return the last one."""
        assert num_steps > 0
        for _ in range(num_steps):
            step = self.scheduler.schedule()
            assert step is not None
            check_plan(self.scheduler, step, self.limits.max_num_batched_tokens)
            took_ms = FIXED_MS + TOKEN_MS * step.num_tokens
            tokens = np.full(len(step.sampled), 7, np.int32)
            self.scheduler.commit(step, tokens)
            result = StepResult(tokens, forward_ms=took_ms, sample_ms=0.0)
            self.times.note_step(step, result, num_scored=0, whole_ms=took_ms)
            self.scheduler.background.note_step(step, took_ms)
            self.steps.append(step)
            self.times_ms.append(took_ms)
        return self.steps[-1]


def foreground_ms(step: Step) -> float:
    """Return what the foreground sequences of a step would take alone."""
    counts: list[int] = (step.ends - step.starts).tolist()
    return FIXED_MS + sum(count for seq, count in zip(step.seqs, counts, strict=True) if not seq.background)


@settings(max_examples=examples(15), deadline=None)
@given(
    foreground=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=6),
    background=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 10)), min_size=1, max_size=20),
    gap=st.integers(0, 12),
    slowdown=st.sampled_from((1.0, 1.5, 2.0, 3.0)),
    share=st.sampled_from((0.0, 0.1, 0.3)),
)
def test_no_step_takes_longer_than_the_bound_and_all_work_ends(
    foreground: list[tuple[int, int]], background: list[tuple[int, int]], gap: int, slowdown: float, share: float
) -> None:
    bench = Bench(replace(LIMITS, background_slowdown=slowdown, background_share=share))
    seqs = [bench.add(*sizes, background=True) for sizes in background]
    catches_up = 1 + max(slowdown - 1, 2 * share / (1 - share))
    for at in range(1000):
        if at % (gap + 1) == 0 and foreground:
            bench.add(*foreground.pop(), background=False)
        if not bench.scheduler.running and not bench.scheduler.queues:
            break
        was_due = bench.scheduler.background.is_due
        step = bench.run()
        took_ms, alone_ms = bench.times_ms[-1], foreground_ms(step)
        if alone_ms > FIXED_MS:
            # A step that may find no foreground sequence to start computes one background token.
            assert took_ms <= 1.05 * (catches_up if was_due else slowdown) * alone_ms + TOKEN_MS
        elif bench.scheduler.background.engine_time.since_foreground_ms < FOREGROUND_MEMORY_MS:
            assert took_ms <= 1.05 * LIMITS.background_step_ms
    assert all(seq.row < 0 and len(seq.token_ids) == seq.max_num_tokens for seq in seqs)
    bench.scheduler.check_integrity()


def test_background_rows_take_turns() -> None:
    bench = Bench()
    for _ in range(4):
        bench.add(4, 3000, background=False)
    seqs = {bench.add(4, 3000, background=True) for _ in range(40)}
    bench.run(60)
    last_at = dict.fromkeys(seqs, 60)
    most_skipped = 0
    for at in range(60, 400):
        for seq in set(bench.run().seqs) & seqs:
            most_skipped = max(most_skipped, at - last_at[seq])
            last_at[seq] = at
    # Four foreground rows take 8 ms, so 8 background rows run in a step.
    assert most_skipped <= 40 / 8 + 2
    assert min(last_at.values()) >= 400 - 40 / 8 - 2


def test_background_work_gets_its_share_beside_prompts_that_fill_every_step() -> None:
    bench = Bench(replace(LIMITS, background_share=0.1))
    seqs = [bench.add(20, 3000, background=True) for _ in range(40)]
    for _ in range(600):
        while bench.scheduler.queues.num_waiting < 5:
            bench.add(200, 1, background=False)
        bench.run()
    time = bench.scheduler.background.engine_time
    assert time.background_ms / (time.background_ms + time.foreground_ms) > 0.095
    assert sum(len(bench.scheduler.tokens_of(seq)) > 20 for seq in seqs) > 20


def test_background_work_gets_its_share_of_rows_that_foreground_work_always_fills() -> None:
    bench = Bench(replace(LIMITS, max_num_seqs=10, background_share=0.2))
    for _ in range(20):
        bench.add(8, 3000, background=True)
    for _ in range(1000):
        while bench.scheduler.queues.num_waiting < 30:
            bench.add(8, 10, background=False)
        bench.run()
    time = bench.scheduler.background.engine_time
    share = time.background_ms / (time.background_ms + time.foreground_ms)
    # Two of ten rows are its share of rows; alone in a step they add 2 of up to 14 ms.
    assert share > 0.1
    assert sum(seq.num_preemptions for seq in bench.scheduler.running) < 100


@pytest.mark.parametrize("num_arrivals", [1, 3])
def test_foreground_work_gets_rows_and_blocks_of_background_work_at_the_next_step(num_arrivals: int) -> None:
    for limits, num_blocks in ((replace(LIMITS, max_num_seqs=8), 4000), (LIMITS, 8 * 8 + 2)):
        bench = Bench(limits, num_blocks)
        bench.add(8, 2, background=False)  # so that background work has been bounded before
        for _ in range(12):
            bench.add(27, 200, background=True)
        bench.run(12)
        assert bench.scheduler.queues.num_waiting > 2, "the device is full"
        arrived = [bench.add(8, 10, background=False) for _ in range(num_arrivals)]
        assert set(arrived) <= set(bench.run().seqs)
        assert all(seq.num_preemptions == 0 for seq in arrived)


def test_foreground_work_that_grows_takes_blocks_of_background_work() -> None:
    bench = Bench(num_blocks=40)
    first = bench.add(40, 80, background=False)
    others = [bench.add(20, 60, background=True) for _ in range(5)]
    bench.run(120)
    assert first.row < 0 and first.num_preemptions == 0
    assert sum(seq.num_preemptions for seq in others) > 0


def test_steps_of_background_work_are_short_only_after_foreground_work() -> None:
    bench = Bench(num_blocks=64 * 800)
    for _ in range(60):
        bench.add(4, 3000, background=True)
    bench.run(40)
    assert bench.times_ms[-1] == FIXED_MS + 60
    bench.add(4, 2, background=False)
    bench.run(4)
    assert bench.times_ms[-1] <= 1.05 * LIMITS.background_step_ms
    assert bench.scheduler.background.num_left_out == len(bench.scheduler.running) - len(bench.steps[-1].seqs) > 0
    bench.run(int(FOREGROUND_MEMORY_MS / LIMITS.background_step_ms * 1.2))
    assert bench.times_ms[-1] == FIXED_MS + 60
    assert bench.scheduler.background.num_left_out == 0


def test_background_work_has_its_full_speed_five_seconds_after_the_last_chat() -> None:
    bench = Bench(num_blocks=64 * 800)
    for _ in range(60):
        bench.add(4, 3000, background=True)
    chat = bench.add(4, 20, background=False)
    while chat.row >= 0 or not bench.steps:
        bench.run()
    num_before = len(bench.times_ms)
    while bench.times_ms[-1] < FIXED_MS + 60:
        bench.run()
    assert sum(bench.times_ms[num_before:-1]) <= 5_000 + LIMITS.background_step_ms


def test_a_step_is_planned_ahead_only_where_both_are_short() -> None:
    for num_background, is_ahead in ((40, False), (10, True)):
        bench = Bench()
        for _ in range(num_background):
            bench.add(4, 3000, background=True)
        bench.add(4, 2, background=False)
        bench.run(20)
        assert bench.scheduler.schedule() is not None
        assert (bench.scheduler.schedule_ahead() is not None) == is_ahead


def test_nothing_depends_on_the_settings_without_background_work() -> None:
    def plans(limits: StepLimits) -> list[list[Any]]:
        bench = Bench(replace(limits, max_num_seqs=6), 60)
        rng = np.random.default_rng(0)
        found = []
        for at in range(300):
            if at % 5 == 0:
                bench.add(int(rng.integers(1, 60)), int(rng.integers(1, 30)), background=False, tenant=str(at % 3))
            if bench.scheduler.running or bench.scheduler.queues:
                step = bench.run()
                found.append([seq.request_id for seq in step.seqs] + step.starts.tolist() + step.ends.tolist())
        return found

    extreme = replace(LIMITS, background_slowdown=1.0, background_share=0.5, background_step_ms=0.1)
    assert plans(LIMITS) == plans(extreme)


def test_background_work_is_due_while_it_waits_outside_the_engine() -> None:
    bench = Bench()
    bench.add(4, 3000, background=False)
    bench.run(10)
    assert not bench.is_due()
    bench.scheduler.background.is_queued = True
    bench.run(10)
    assert bench.is_due()
    bench.add(4, 3000, background=True)
    bench.scheduler.background.is_queued = False
    bench.run(10)
    assert not bench.is_due(), "all of it runs in every step"


def test_deferred_background_rows_get_exactly_their_tokens(make_engine: Callable[..., Engine]) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [EngineRequest(str(i), [5 + i] * (3 + i), params, seed=i, background=i > 1) for i in range(8)]
    alone, mixed = make_engine(), make_engine(background_slowdown=1.0, background_step_ms=0.01)
    want = {}
    for request in requests:
        alone.add(request)
        want[request.request_id] = tokens_of(drain(alone), request.request_id)
    for request in requests:
        mixed.add(request)
    outputs = drain(mixed)
    assert {name: tokens_of(outputs, name) for name in want} == want
    stats = mixed.stats()
    assert stats.background_held_back > 0 and stats.kind_seconds["background"] > 0


def test_engine_time_of_each_class_adds_up_to_that_of_its_kind(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for at, (priority, background) in enumerate([(0, False), (1, False), (1, False), (0, True), (2, True)]):
        # As after a long wait: a more urgent level changes nothing.
        asked = EngineRequest(str(at), [5 + at] * 8, params, seed=at, level=0, background=background, priority=priority)
        engine.add(asked)
    drain(engine)
    seconds, kinds = engine.stats().level_seconds, engine.stats().kind_seconds
    assert [level for level, value in enumerate(seconds) if value > 0] == [0, 1, 3, 5]
    assert sum(seconds[:3]) == pytest.approx(kinds["foreground"])
    assert sum(seconds[3:]) == pytest.approx(kinds["background"])
    assert seconds[1] > seconds[0], "two sequences against one"
