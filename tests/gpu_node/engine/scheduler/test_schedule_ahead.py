"""Steps planned before the previous step's tokens are known give the same answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from fakes.cover import examples
from fakes.engine_runs import TORCH, check_idle, drain, tokens_of
from fakes.poison import poisoned
from fakes.runners.ahead_runner import AheadRunner
from fakes.runners.faulty_runner import FaultyRunner
from fakes.schedules import BLOCK_SIZE, EOS, check_plan, new_scheduler, new_sequence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, ResumedChoice, StepOutput
from penstock.gpu_node.engine.policy.policy import FirstComeFirstServed, NumTokens
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.engine.scheduler import budget
from penstock.gpu_node.engine.scheduler.scheduler import Scheduler
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.model.protocol import FAILED_TOKEN

NATIVE: dict[str, Any] = {"runner": "native", "dtype": "bfloat16"}
MakeEngine = Callable[..., Engine]


def _commit(scheduler: Scheduler, step: Step, *tokens: int) -> list[str]:
    """Commit a step. Return the names of the sequences that ended."""
    outcome = scheduler.commit(step, np.array(tokens, dtype=np.int32))
    scheduler.check_integrity()
    return sorted(seq.request_id for seq in outcome.ended)


def _launched(scheduler: Scheduler, *, ahead: bool = False) -> tuple[Step, list[int]]:
    """Launch a step. Return it and its token ids."""
    step = scheduler.schedule_ahead() if ahead else scheduler.schedule()
    assert step is not None
    return step, check_plan(scheduler, step, 64).token_ids.tolist()


def test_decoding_sequence_is_planned_a_token_ahead_and_tokens_after_its_end_are_dropped() -> None:
    scheduler, memory = new_scheduler(20, budget=64)
    seqs = [new_sequence(name, 3, 9, first_token=100 * i) for i, name in enumerate("ab")]
    for seq in seqs:
        scheduler.add(seq)
    first, _ = _launched(scheduler)
    second, ids = _launched(scheduler, ahead=True)
    assert ids == [-1, -2] and second.starts.tolist() == [3, 3]
    assert _commit(scheduler, first, EOS, 1000) == ["a"] and memory.num_held == 1
    third, ids = _launched(scheduler, ahead=True)
    assert third.seqs == [seqs[1]] and ids == [-2]
    assert _commit(scheduler, second, 1234, 1001) == []
    assert scheduler.tokens_of(seqs[1])[3:].tolist() == [1000, 1001]
    assert seqs[0].token_ids.tolist() == [0, 1, 2, EOS]


def test_sequence_at_its_length_limit_is_in_no_later_step() -> None:
    scheduler, memory = new_scheduler(20, budget=64)
    scheduler.add(new_sequence("short", 3, 1))
    scheduler.add(new_sequence("long", 3, 2, first_token=100))
    first, _ = _launched(scheduler)
    second, ids = _launched(scheduler, ahead=True)
    assert ids == [-2] and scheduler.num_running == 2
    assert _commit(scheduler, first, 1000, 1000) == ["short"]
    assert scheduler.schedule_ahead() is None
    assert _commit(scheduler, second, 1001) == ["long"] and memory.num_held == 0


def test_reassigned_row_gets_no_token_of_its_former_sequence() -> None:
    scheduler, _ = new_scheduler(20, max_num_seqs=2, budget=64)
    stays, leaves, comes = (new_sequence(name, n, 9, first_token=100 * n) for name, n in (("s", 3), ("l", 3), ("c", 7)))
    for seq in (stays, leaves, comes):
        scheduler.add(seq)
    first, _ = _launched(scheduler)
    row = leaves.row
    scheduler.remove(leaves)
    second, ids = _launched(scheduler, ahead=True)
    assert comes.row == row and ids == [-1, *range(700, 707)]
    assert _commit(scheduler, first, 1000, 1001) == []
    assert scheduler.tokens_of(comes).tolist() == list(range(700, 707))
    assert _commit(scheduler, second, 1002, 1003) == []
    assert scheduler.tokens_of(comes)[7:].tolist() == [1003]


def test_block_is_cached_once_all_of_its_tokens_are_known() -> None:
    scheduler, memory = new_scheduler(20, budget=64)
    seq = new_sequence("a", BLOCK_SIZE - 1, 9)
    scheduler.add(seq)
    first, _ = _launched(scheduler)
    second, _ = _launched(scheduler, ahead=True)
    assert second.ends.tolist() == [BLOCK_SIZE] and second.cached_blocks == seq.block_hashes == []
    _commit(scheduler, first, 1000)
    assert second.cached_blocks == seq.blocks[:1] == memory.match(seq.block_hashes)
    scheduler.roll_back(second)
    assert memory.match(seq.block_hashes) == []


@pytest.mark.parametrize("for_memory", [False, True])
def test_failed_step_discards_the_step_that_was_planned_ahead(for_memory: bool) -> None:
    scheduler, memory = new_scheduler(20, budget=64)
    scheduler.add(new_sequence("one", BLOCK_SIZE + 1, 1))
    scheduler.add(*(new_sequence("two", 2 * BLOCK_SIZE, 5, choice=i, first_token=100) for i in range(2)))
    first, _ = _launched(scheduler)
    scheduler.add(new_sequence("late", BLOCK_SIZE, 5, first_token=200))
    _launched(scheduler, ahead=True)
    scheduler.roll_back(first, for_memory=for_memory)
    scheduler.check_integrity()
    assert memory.num_held == memory.device.num_cached == 0
    assert [scheduler.tokens_of(seq).min() for seq in scheduler.queues] == [0, 100, 100, 200]
    again, _ = _launched(scheduler)
    assert again.seqs[0].request_id == "one" and _commit(scheduler, again, *[1000] * len(again.sampled)) == ["one"]
    _launched(scheduler)
    assert scheduler.schedule_ahead() is None, "until it is clear who failed"


def test_step_that_needs_blocks_or_known_tokens_is_not_planned_ahead() -> None:
    scheduler, _ = new_scheduler(2, budget=64)
    scheduler.add(new_sequence("grows", 2 * BLOCK_SIZE - 2, 2))
    first, _ = _launched(scheduler)
    assert scheduler.schedule_ahead() is not None
    scheduler, _ = new_scheduler(3, budget=64)
    scheduler.add(new_sequence("a", BLOCK_SIZE, 9))
    scheduler.add(new_sequence("b", BLOCK_SIZE, 9, first_token=100))
    _launched(scheduler)
    assert scheduler.schedule_ahead() is None and scheduler.num_preemptions == 0
    scheduler, _ = new_scheduler(9, budget=64)
    scheduler.add(new_sequence("penalised", 3, 9, penalty=1.0))
    first, _ = _launched(scheduler)
    assert scheduler.schedule_ahead() is None
    _commit(scheduler, first, FAILED_TOKEN)


class _Urgent(FirstComeFirstServed):
    """A policy in which every waiting sequence requests preemption."""

    def preemption_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], num_tokens: NumTokens
    ) -> tuple[Sequence, list[Sequence]] | None:
        seq = next(iter(waiting), None)
        return None if seq is None else (seq, running[::-1])


def test_urgent_sequence_preempts_after_the_running_step_completes() -> None:
    scheduler, _ = new_scheduler(4, max_num_seqs=1, budget=64, policy=_Urgent())
    runs, presses = (new_sequence(name, 3, 9, first_token=100 * i) for i, name in enumerate("rp"))
    scheduler.add(runs)
    first, _ = _launched(scheduler)
    scheduler.add(presses)
    assert scheduler.schedule_ahead() is None and scheduler.num_preemptions == 0
    _commit(scheduler, first, 1000)
    _launched(scheduler)
    assert scheduler.num_preemptions == 1


CONFIGS: list[dict[str, Any]] = [
    {"num_kv_blocks": 200, "max_num_seqs": 16},
    {"num_kv_blocks": 14, "num_swap_blocks": 24, "preemption": "swap", "scheduling_policy": "priority"},
    {"num_kv_blocks": 14, "max_num_batched_tokens": 24, "max_num_seqs": 6, "scheduling_policy": "fair"},
    {"num_kv_blocks": 14, "max_num_batched_tokens": 24, "max_num_seqs": 6, "scheduling_policy": "round_robin"},
    {"num_kv_blocks": 200, "max_num_seqs": 16, "scheduling_policy": "fair"},
    {"num_kv_blocks": 60, "speculative": "ngram"},
    {"num_kv_blocks": 60, "speculative": "ngram", "scheduling_policy": "fair"},
]


@pytest.fixture(scope="module")
def alone(make_engine: MakeEngine) -> Engine:
    """An engine with blocks for every sequence that plans no step ahead."""
    return make_engine(**NATIVE, enable_prefix_caching=False)


@pytest.fixture
def many_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give tenants steps of their own wherever these would be shorter."""
    monkeypatch.setattr(budget, "MAX_SLOWDOWN", 0.0)
    monkeypatch.setattr(budget, "MIN_REMAINDER", 1.05)


@pytest.fixture(scope="module")
def engines(make_engine: MakeEngine) -> list[Engine]:
    """Engines with few blocks that plan steps ahead."""
    made = [make_engine(**NATIVE, **config) for config in CONFIGS]
    for engine in made:
        engine._runner = AheadRunner(engine._runner)
    return made


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], SamplingParams, int, int | None, int, bool]:
    """A prompt, its parameters, its class, the steps after which it is aborted and arrives, and its kind of work."""
    params = {
        "temperature": draw(st.sampled_from((0.0, 1.0))),
        "max_tokens": draw(st.integers(1, 30)),
        "n": draw(st.sampled_from((1, 1, 3))),
        "ignore_eos": draw(st.booleans()),
        "stop": draw(st.sampled_from(((), (), ("e",), ("a", "t")))),
        "stop_token_ids": draw(st.sampled_from(((), (), tuple(range(0, 384, 20))))),
        "min_tokens": draw(st.sampled_from((0, 0, 1))),
        "presence_penalty": draw(st.sampled_from((0.0,) * 7 + (1.0,))),
    }
    prompt = [5 + draw(st.integers(0, 1)), *range(20, 20 + draw(st.integers(0, 50)))]
    dropped = draw(st.sampled_from((None, None, None, 3, 8)))
    return (
        prompt,
        SamplingParams(**params),
        draw(st.integers(0, 2)),
        dropped,
        draw(st.integers(0, 6)),
        draw(st.booleans()),
    )


def _run(engine: Engine, batch: list[Any]) -> list[StepOutput]:
    outputs, now = [], 0
    while now < 10 or engine.has_work():
        for i, (prompt, params, priority, dropped, comes, *background) in enumerate(batch):
            if comes == now:
                settings: dict[str, Any] = {"level": priority, "tenant": str(i % 2), "background": any(background)}
                engine.add(EngineRequest(str(i), prompt, params, seed=i, **settings))
            elif dropped is not None and comes + dropped == now:
                engine.abort(str(i))
        outputs += engine.step()
        engine.check_integrity()
        now += 1
    check_idle(engine)
    return outputs


def _ends(outputs: list[StepOutput]) -> dict[tuple[str, int], Any]:
    return {(o.request_id, o.choice): (o.finish_reason, o.usage) for o in outputs if o.finish_reason is not None}


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(batch=st.lists(requests(), min_size=1, max_size=8), which=st.integers(0, len(CONFIGS) - 1))
@pytest.mark.usefixtures("many_small_steps")
def test_planning_ahead_changes_no_tokens(alone: Engine, engines: list[Engine], batch: list[Any], which: int) -> None:
    want, got = _run(alone, [(*request[:3], None, 0) for request in batch]), _run(engines[which], batch)
    ends, ended = _ends(want), _ends(got)
    for i, (_, params, _, dropped, *_) in enumerate(batch):
        for choice in range(params.n):
            full, said = (tokens_of(outputs, str(i), choice) for outputs in (want, got))
            assert said == full[: len(said)]
            if dropped is None:
                assert said == full and ended[str(i), choice][0] == ends[str(i), choice][0]


def test_transient_faults_end_no_request(make_engine: MakeEngine, alone: Engine) -> None:
    batch = [
        ([5 + i, *range(20, 60)], SamplingParams(max_tokens=30, ignore_eos=True, n=2), 1, None, 0) for i in range(6)
    ]
    want, rng = _run(alone, batch), np.random.default_rng(0)
    for error in (RuntimeError, MemoryError):
        engine = make_engine(**NATIVE, num_kv_blocks=24, num_swap_blocks=40, preemption="swap", max_num_seqs=12)
        faulty = FaultyRunner(
            engine._runner, lambda at, _, error=error: error() if at == "forward" and rng.random() < 0.1 else None
        )
        engine._runner = ahead = AheadRunner(faulty)
        for i, (prompt, params, *_) in enumerate(batch):
            engine.add(EngineRequest(str(i), prompt, params, seed=i))
        got = []
        while engine.has_work():
            try:
                got += engine.step()
            except (RuntimeError, MemoryError):
                engine.check_integrity()
        check_idle(engine)
        assert {reason for reason, _ in _ends(got).values()} == {"length"}
        for i, choice in _ends(want):
            assert tokens_of(got, i, choice) == tokens_of(want, i, choice)
        assert 1 < engine.stats().num_failed_steps <= faulty.num_failures and ahead.num_ahead > 10


def test_request_that_fails_in_any_batch_ends_alone(make_engine: MakeEngine, alone: Engine) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    batch = [([300 + i, *range(20, 40)], params, 1, None, 0) for i in range(6)]
    want, engine = _run(alone, batch), make_engine(**NATIVE)
    faulty = FaultyRunner(
        engine._runner, lambda at, plan: RuntimeError() if at == "forward" and 303 in plan.token_ids else None
    )
    engine._runner = AheadRunner(faulty)
    for i, (prompt, *_) in enumerate(batch):
        engine.add(EngineRequest(str(i), prompt, params, seed=i))
    got = []
    while engine.has_work():
        with suppress(RuntimeError):
            got += engine.step()
    check_idle(engine)
    assert {i: end[0] for (i, _), end in _ends(got).items()} == {
        str(i): "error" if i == 3 else "length" for i in range(6)
    }
    for i in (0, 1, 2, 4, 5):
        assert tokens_of(got, str(i)) == tokens_of(want, str(i))


def test_takeover_from_a_node_that_planned_ahead_continues_exactly(make_engine: MakeEngine, alone: Engine) -> None:
    prompt, params = list(range(20, 50)), SamplingParams(max_tokens=20, ignore_eos=True)
    want, engine = _run(alone, [(prompt, params, 1, None, 0)]), make_engine(**NATIVE)
    engine._runner = ahead = AheadRunner(engine._runner)
    engine.add(EngineRequest("0", prompt, params, seed=0))
    outputs = [output for _ in range(9) for output in engine.step()]
    said = tuple(tokens_of(outputs, "0"))
    assert 0 < len(said) < 20 and ahead.num_ahead > len(said) - 1
    text = "".join(output.text for output in outputs)
    alone.add(EngineRequest("0", prompt, params, seed=0, resume=[ResumedChoice(said, text, None)]))
    assert [*said, *tokens_of(drain(alone), "0")] == tokens_of(want, "0")


def test_nonfinite_values_of_a_row_reach_no_other_sequence(make_engine: MakeEngine) -> None:
    engine = make_engine(**TORCH, num_kv_blocks=6)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    good = engine.generate([[5] * 20], params)[0].choices[0].token_ids
    alone = engine._runner
    engine._runner = AheadRunner(alone)
    for _ in range(3):
        with poisoned(alone, 300):
            engine.add(EngineRequest("bad", [10] * 20 + [300], params, seed=0))
            bad = drain(engine)
        assert [(output.finish_reason, output.token_ids) for output in bad] == [("error", ())]
        engine.add(EngineRequest("good", [5] * 20, params, seed=0))
        assert tuple(tokens_of(drain(engine), "good")) == good
        check_idle(engine)


def test_prompts_that_are_computed_in_several_steps_are_scored_once(make_engine: MakeEngine, alone: Engine) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=1, n=2, logprobs=1, prompt_logprobs=1)
    prompts = [list(range(20, 65)), list(range(100, 119))]
    want, engine = alone.generate(prompts, params), make_engine(**NATIVE, max_num_batched_tokens=16, max_num_seqs=8)
    engine._runner = ahead = AheadRunner(engine._runner)
    assert engine.generate(prompts, params) == want and ahead.num_ahead > 0
