"""Calls of the engine while a step is in flight have no effect that a client sees."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fakes.engine_runs import check_idle, drain, tokens_of

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.engine.records import EngineRequest

PROMPTS = ["the gate opens by pressure", "水門 🌊", "the gate opens and the turbine " * 6]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def greedy_alone(plain: Engine) -> list[tuple[int, ...]]:
    """Each prompt's greedy tokens, run alone."""
    return [plain.generate([prompt], GREEDY)[0].choices[0].token_ids for prompt in PROMPTS]


def test_outputs_of_a_step_are_returned_while_the_next_one_runs(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    may_land, submit, plans = threading.Semaphore(0), plain._runner.submit, []

    class Held:
        def __init__(self, plan: Any) -> None:
            plans.append(plan)
            self._handle = submit(plan)

        def result(self) -> Any:
            may_land.acquire()
            return self._handle.result()

    monkeypatch.setattr(plain._runner, "submit", Held)
    plain.add(EngineRequest("x", [5, 6, 7], GREEDY.model_copy(update={"max_tokens": 3}), seed=0))
    assert plain.step() == [] and len(plans) == 1
    for num_submitted in (2, 3, 3):
        may_land.release()
        (output,) = plain.step()
        assert len(plans) == num_submitted
    assert output.finish_reason == "length" and not plain.has_work()


def test_token_sampled_after_a_stop_string_is_neither_shown_nor_counted(plain: Engine) -> None:
    whole = plain.generate([PROMPTS[0]], GREEDY)[0].choices[0]
    stop = whole.text[6:9]
    counted_before = plain.stats().decode_tokens
    plain.add(
        EngineRequest(
            "x", plain.tokenizer.encode(PROMPTS[0]), GREEDY.model_copy(update={"stop": (stop,), "n": 2}), seed=0
        )
    )
    outputs = drain(plain)
    for choice in (0, 1):
        tokens = tokens_of(outputs, "x", choice)
        assert tuple(tokens) == whole.token_ids[: len(tokens)]
    assert outputs[-1].usage is not None
    assert outputs[-1].usage.completion_tokens == len(tokens_of(outputs, "x")) * 2 < 48
    assert plain.stats().decode_tokens - counted_before == outputs[-1].usage.completion_tokens
    check_idle(plain)


def test_request_id_can_be_reused_while_a_step_of_the_first_request_runs(
    plain: Engine, greedy_alone: list[tuple[int, ...]]
) -> None:
    plain.add(EngineRequest("x", plain.tokenizer.encode(PROMPTS[1]), GREEDY, seed=0))
    for _ in range(3):
        plain.step()
    plain.abort("x")
    plain.add(EngineRequest("x", plain.tokenizer.encode(PROMPTS[0]), GREEDY, seed=0))
    outputs = drain(plain)
    assert tuple(tokens_of(outputs, "x")) == greedy_alone[0]
    assert [output.position for output in outputs] == list(range(24))
    check_idle(plain)


def test_an_aborted_requests_step_may_still_fail(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = make_engine(), [10] * 40
    want = engine.generate([prompt], GREEDY)[0].choices[0].token_ids
    fresh = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(fresh._runner, "submit", lambda plan: 1 / 0)
        fresh.add(EngineRequest("x", prompt, GREEDY, seed=0))
        fresh.step()
        fresh.abort("x")
        with pytest.raises(ZeroDivisionError):
            fresh.step()
    again = fresh.generate([prompt], GREEDY)[0]
    assert (again.choices[0].token_ids, again.usage.cached_tokens) == (want, 0)
    check_idle(fresh)


def test_second_interrupt_ends_a_hanging_step_and_the_engine_stays_usable(
    plain: Engine, greedy_alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, hangs = plain._runner.submit, iter([True, True, True, False])

    class Hanging:
        def __init__(self, plan: Any) -> None:
            self._handle = submit(plan)

        def result(self) -> Any:
            while next(hangs, False):
                signal.raise_signal(signal.SIGINT)
            return self._handle.result()

    monkeypatch.setattr(plain._runner, "submit", Hanging)
    with pytest.raises(KeyboardInterrupt):
        plain.generate(PROMPTS, GREEDY)
    assert next(hangs)  # it was let through by the second
    hangs = iter([])
    assert [generation.choices[0].token_ids for generation in plain.generate(PROMPTS, GREEDY)] == greedy_alone
    check_idle(plain)


def test_interrupt_at_any_call_leaves_the_engine_usable(make_engine: MakeEngine) -> None:
    engine, uncached = make_engine(), make_engine(enable_prefix_caching=False)
    short, num_calls, interrupted_at = GREEDY.model_copy(update={"max_tokens": 3}), 0, 0

    def interrupt(frame: Any, event: str, _: object) -> None:
        nonlocal num_calls
        if event == "call" and "/engine/" in frame.f_code.co_filename:
            num_calls += 1
            if num_calls == interrupted_at:
                signal.raise_signal(signal.SIGINT)

    def generate(prompts: list[list[int]]) -> None:
        nonlocal num_calls
        num_calls = 0
        sys.setprofile(interrupt)
        try:
            engine.generate(prompts, short)
        finally:
            sys.setprofile(None)

    generate([[3] * 40, [4] * 33])
    handler, num_calls_uninterrupted = signal.getsignal(signal.SIGINT), num_calls
    for i in range(1, 30):
        interrupted_at = num_calls_uninterrupted * i // 32
        prompts = [[10 * i] * 40, [10 * i + 1] * 33]
        with pytest.raises(KeyboardInterrupt):
            generate(prompts)
        assert signal.getsignal(signal.SIGINT) is handler
        check_idle(engine)
        said, want = (one.generate(prompts, short) for one in (engine, uncached))
        assert [one.choices for one in said] == [one.choices for one in want]
