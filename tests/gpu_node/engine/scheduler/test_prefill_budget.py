"""Prefill lengthens the steps of decoding sequences by at most a bounded time, on any machine and for any prompts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fakes.schedules import EOS
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.scheduler.budget import StepLimits, StepTime, StepWork
from penstock.gpu_node.engine.scheduler.scheduler import LearnedTimes, Scheduler
from penstock.gpu_node.engine.sequence import PromptScores, Sequence
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.engine.text.output import EndRule
from penstock.gpu_node.model.protocol import StepResult

LIMIT_MS = 40.0
MAX_STEP_TOKENS = 512


class Machine:
    """Computes step times: a linear cost whose weights the scheduler does not know."""

    def __init__(self, fixed: float, decoded: float, prefilled: float, context: float, scored: float) -> None:
        self.fixed, self.decoded, self.prefilled, self.context, self.scored = fixed, decoded, prefilled, context, scored

    def step_ms(self, work: StepWork) -> float:
        return (
            self.fixed
            + self.decoded * work.num_decoded
            + self.prefilled * work.num_prefilled
            + self.context * work.num_attended / 1000
            + self.scored * work.num_scored
        )


SLOW = Machine(6.0, 2.0, 2.4, 0.8, 0.9)
FAST = Machine(3.0, 0.02, 0.01, 0.002, 0.003)


def sequence(name: str, num_prompt: int, num_output: int, *, tenant: str, scored: bool = False) -> Sequence:
    token_ids = np.random.default_rng(abs(hash(name))).integers(EOS + 1, 50_000, num_prompt, dtype=np.int32)
    seq = Sequence(
        request_id=name,
        choice=0,
        params=SamplingParams(),
        seed=0,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt,
        end_rule=EndRule(frozenset((EOS,)), 0, num_output),
        tenant=tenant,
    )
    seq.prompt_results = PromptScores(token_ids.tolist(), 20) if scored else None
    return seq


@pytest.fixture
def times() -> LearnedTimes:
    return LearnedTimes("recompute", 1)


def new_scheduler(times: LearnedTimes) -> Scheduler:
    limits = StepLimits(
        block_size=16,
        max_num_seqs=32,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        max_prefill_beside_decode=MAX_STEP_TOKENS,
        max_model_len=16_000,
        max_prefill_ms_beside_decode=LIMIT_MS,
    )
    return Scheduler(KvCacheManager(4000), limits, times)


def work_of(step: Step) -> StepWork:
    counts = (step.ends - step.starts).astype(np.int64)
    chunks = counts > 1
    scored = sum(int(n) for seq, n in zip(step.seqs, counts, strict=True) if seq.prompt_results is not None and n > 1)
    attended = int((counts[chunks] * step.starts[chunks]).sum())
    return StepWork(int(counts[~chunks].sum()), int(counts[chunks].sum()), attended, scored)


def run(scheduler: Scheduler, times: LearnedTimes, machine: Machine, num_steps: int) -> list[tuple[StepWork, float]]:
    """Run steps. Return the work and the milliseconds of each."""
    ran = []
    for _ in range(num_steps):
        if (step := scheduler.schedule()) is None:
            break
        work = work_of(step)
        took_ms = machine.step_ms(work)
        tokens = np.full(len(step.sampled_seqs), EOS + 1, np.int32)
        scheduler.commit(step, tokens)
        result = StepResult(tokens, forward_ms=took_ms, sample_ms=0.0)
        times.note_step(step, result, num_scored=work.num_scored, whole_ms=took_ms)
        ran.append((work, took_ms))
    return ran


@pytest.mark.parametrize("scored", [False, True])
def test_a_long_prompt_of_another_tenant_adds_at_most_the_limit_to_a_step(scored: bool, times: LearnedTimes) -> None:
    scheduler = new_scheduler(times)
    for i in range(2):
        scheduler.add(sequence(f"stream-{i}", 20, 4000, tenant="reader"))
    undisturbed_ms = run(scheduler, times, SLOW, 20)[-1][1]
    for i in range(3):
        scheduler.add(sequence(f"prompt-{i}", 8000, 1, tenant="other", scored=scored))
    steps = run(scheduler, times, SLOW, 1500)
    with_prompt = [took_ms for work, took_ms in steps if work.num_prefilled]
    assert len(with_prompt) > 500
    # The first steps teach what a prompt token costs here.
    assert max(with_prompt[10:]) < undisturbed_ms + 1.25 * LIMIT_MS
    assert np.mean(with_prompt) > undisturbed_ms + 0.6 * LIMIT_MS, "prompts get the time that they may have"


def test_prompts_get_at_least_half_of_the_time_where_decoding_takes_longer_than_the_limit(times: LearnedTimes) -> None:
    scheduler = new_scheduler(times)
    for i in range(30):
        scheduler.add(sequence(f"stream-{i}", 4, 4000, tenant="reader"))
    run(scheduler, times, SLOW, 40)
    scheduler.add(sequence("prompt", 6000, 1, tenant="other"))
    decode_ms = SLOW.step_ms(StepWork(30, 0, 0, 0))
    assert decode_ms > 1.5 * LIMIT_MS
    with_prompt = [took_ms for work, took_ms in run(scheduler, times, SLOW, 400) if work.num_prefilled][10:]
    assert 1.6 * decode_ms < np.median(with_prompt) < 2.3 * decode_ms


def longest(tenant: str, *, num_resumed: int = 0, num_prompts: int = 8, length: int = 1000, after: int = 10) -> float:
    """Return the milliseconds of the longest step of a reader's stream beside prompts of `length` tokens."""
    times = LearnedTimes("recompute", 1)
    scheduler = new_scheduler(times)
    scheduler.add(sequence("stream", 20, 4000, tenant="reader"))
    run(scheduler, times, SLOW, 20)
    for i in range(num_prompts):
        seq = sequence(f"prompt-{i}", length, 1, tenant=tenant)
        seq.num_resumed = num_resumed
        scheduler.add(seq)
    return max(took_ms for _, took_ms in run(scheduler, times, SLOW, 60)[after:])


def test_a_tenant_that_is_alone_has_its_backlog_computed_in_longer_steps() -> None:
    assert longest("reader") > 3 * LIMIT_MS > 2 * longest("other") * 0.8


def test_streams_that_another_node_began_are_computed_in_longer_steps_beside_other_tenants() -> None:
    assert longest("other", num_resumed=900) > 3 * LIMIT_MS


@pytest.mark.parametrize("tenant", ["reader", "other"])
def test_a_single_stream_that_another_node_began_is_computed_in_longer_steps_too(tenant: str) -> None:
    short = {"num_prompts": 1, "length": 100, "after": 0}
    assert longest(tenant, num_resumed=90, **short) > 3 * LIMIT_MS > 2 * longest(tenant, **short)


def test_a_fast_machine_fills_its_steps(times: LearnedTimes) -> None:
    scheduler = new_scheduler(times)
    scheduler.add(sequence("stream", 20, 4000, tenant="reader"))
    run(scheduler, times, FAST, 20)
    scheduler.add(sequence("prompt", 8000, 1, tenant="other"))
    prefilled = [work.num_prefilled for work, _ in run(scheduler, times, FAST, 40)]
    assert max(prefilled) == MAX_STEP_TOKENS - 1


@given(
    weights=st.tuples(*[st.floats(0.3, 6.0)] * 5),
    works=st.lists(
        st.tuples(st.integers(1, 64), st.integers(0, 512), st.integers(0, 8000), st.booleans()), min_size=1, max_size=4
    ),
)
def test_predictions_come_close_for_every_machine(
    weights: tuple[float, ...], works: list[tuple[int, int, int, bool]]
) -> None:
    """The weights differ by a factor of 20 at most: a part that takes far less time than the others is learned late."""
    machine, model = Machine(*weights), StepTime()
    mixed = [StepWork(d, p, p * before, p if scored else 0) for d, p, before, scored in works]
    for _ in range(300):
        for work in mixed:
            model.note(work, machine.step_ms(work))
    for work in mixed:
        assert abs(math.log(model.step_ms(work) / machine.step_ms(work))) < math.log(1.5)


def test_one_late_step_changes_little() -> None:
    model, work = StepTime(), StepWork(4, 64, 64_000, 0)
    for _ in range(50):
        model.note(work, SLOW.step_ms(work))
    before = model.step_ms(work)
    model.note(work, 100 * before)
    assert before < model.step_ms(work) < 1.3 * before
