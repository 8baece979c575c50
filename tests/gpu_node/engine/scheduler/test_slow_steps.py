"""Steps that take a large part of the watchdog's time: the faulty sequence is found and ended, others continue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from fakes.engine_runs import check_idle, drain, tokens_of

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, StepOutput
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.model.protocol import ModelRunner, StepPlan, StepResult

MakeEngine = Callable[..., Engine]
PROMPTS = [[5 + i, *range(10 * i + 3, 10 * i + 23 + i)] for i in range(9)]
PARAMS = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
POISON = 4
"""Number of the request, and its seed."""
SLOW_MS = 20_000.0
"""Of the 120 s after which a node ends."""


class SlowRunner:
    """Reports long times for some steps."""

    def __init__(self, runner: ModelRunner, is_slow: Callable[[StepPlan], bool]) -> None:
        self._runner = runner
        self._is_slow = is_slow
        self.num_slow = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def submit(self, plan: StepPlan) -> SlowStep:
        is_slow = self._is_slow(plan)
        self.num_slow += is_slow
        return SlowStep(self._runner.submit(plan).result(), is_slow)


class SlowStep:
    def __init__(self, result: StepResult, is_slow: bool) -> None:
        self._result = replace(result, forward_ms=SLOW_MS) if is_slow else result

    def result(self) -> StepResult:
        return self._result


def _has_poison(plan: StepPlan) -> bool:
    return POISON in plan.sampling.seed.tolist()


def _run(engine: Engine, numbers: range) -> list[StepOutput]:
    for i in numbers:
        engine.add(EngineRequest(str(i), PROMPTS[i], PARAMS, seed=i))
    outputs = drain(engine)
    check_idle(engine)
    return outputs


def _slow(engine: Engine, is_slow: Callable[[StepPlan], bool]) -> SlowRunner:
    runner = SlowRunner(engine._runner, is_slow)
    engine._runner = runner  # type: ignore[assignment]
    return runner


@pytest.mark.parametrize("settings", [{}, {"enable_prefix_caching": False}, {"max_num_seqs": 4}])
def test_a_request_whose_steps_are_slow_ends_alone(make_engine: MakeEngine, settings: dict[str, object]) -> None:
    want = _run(make_engine(**settings), range(9))
    engine = make_engine(**settings)
    runner = _slow(engine, _has_poison)
    outputs = _run(engine, range(9))
    ends = {output.request_id: output.finish_reason for output in outputs if output.finish_reason}
    assert ends.pop(str(POISON)) == "error"
    assert set(ends.values()) == {"length"}
    for i in range(9):
        if i != POISON:
            assert tokens_of(outputs, str(i)) == tokens_of(want, str(i))
    # By halves: 9, 4, 2, then 1 sequence; then alone until the isolator is sure.
    assert 3 <= runner.num_slow <= 9


def test_no_request_is_at_fault_where_every_step_is_slow(make_engine: MakeEngine) -> None:
    want = _run(make_engine(), range(5))
    engine = make_engine()
    _slow(engine, lambda plan: True)
    outputs = _run(engine, range(5))
    assert {output.finish_reason for output in outputs} == {None, "length"}
    for i in range(5):
        assert tokens_of(outputs, str(i)) == tokens_of(want, str(i))


def test_a_slow_prompt_is_no_fault(make_engine: MakeEngine) -> None:
    engine = make_engine()
    runner = _slow(engine, lambda plan: len(plan.token_ids) > len(plan.context_lens))
    outputs = _run(engine, range(9))
    assert runner.num_slow > 0
    assert {output.finish_reason for output in outputs} == {None, "length"}
