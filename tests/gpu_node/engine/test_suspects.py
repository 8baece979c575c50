"""Steps that fail as a whole because of one request: that one ends, the others say what they would have said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fakes.engine_runs import check_idle, tokens_of

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, StepOutput

PROMPTS = [[5 + i, *range(10 * i + 3, 10 * i + 43 + i)] for i in range(9)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

MakeEngine = Callable[..., Engine]


class PoisonError(MemoryError):
    """What a runner raises at a plan that it cannot run."""


def _poison(engine: Engine, monkeypatch: pytest.MonkeyPatch, is_poison: Callable[[Any], bool]) -> None:
    submit = engine._runner.submit

    def poisoned(plan: Any) -> Any:
        if is_poison(plan):
            raise PoisonError
        return submit(plan)

    monkeypatch.setattr(engine._runner, "submit", poisoned)


def _run(engine: Engine) -> tuple[list[StepOutput], int]:
    outputs, num_failures = [], 0
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, GREEDY, seed=0)
    while engine.has_work() and num_failures < 100:
        try:
            outputs += engine.step()
        except PoisonError:
            num_failures += 1
        engine.check_integrity()
    return outputs, num_failures


@pytest.mark.parametrize("position", [3, 30, 50])
@pytest.mark.parametrize("guilty", [0, 4, 8])
def test_one_that_makes_every_step_fail_ends_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, guilty: int, position: int
) -> None:
    want = [generation.choices[0].token_ids for generation in make_engine().generate(PROMPTS, GREEDY)]
    engine = make_engine(num_kv_blocks=20, num_swap_blocks=10)

    def is_poison(plan: Any) -> bool:
        step = engine._scheduler._in_flight
        assert step is not None
        spans = zip(step.seqs, step.starts.tolist(), step.ends.tolist(), strict=True)
        return any(seq.request_id == str(guilty) and start <= position < end for seq, start, end in spans)

    _poison(engine, monkeypatch, is_poison)
    outputs, num_failures = _run(engine)
    for i, tokens in enumerate(want):
        got = tokens_of(outputs, str(i))
        assert got == list(tokens[: len(got)]) and (len(got) == len(tokens)) == (i != guilty)
    ends = {output.request_id: output.finish_reason for output in outputs if output.finish_reason is not None}
    assert ends == {str(i): "error" if i == guilty else "length" for i in range(len(PROMPTS))}
    assert num_failures < 20
    check_idle(engine)


def test_a_runner_that_computes_nothing_ends_nobody(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    _poison(engine, monkeypatch, lambda plan: True)
    outputs, num_failures = _run(engine)
    assert outputs == [] and num_failures == 100 and engine.stats().num_waiting == len(PROMPTS)
