"""Faults at allocation, copy and forward: only a faulty sequence ends; the others' answers do not change."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.cover import each_value, pairwise
from fakes.engine_runs import TORCH, check_idle, tokens_of
from fakes.poison import poisoned
from fakes.runners.faulty_runner import FaultyRunner, Place
from fixtures.random_adapters import make_adapter
from transformers import AutoModelForCausalLM

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import PromptTooLongError
from penstock.contract.job import SamplingParams, seed_of
from penstock.gpu_node.engine import Engine, StepOutput
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.engine.scheduler import memory_trace
from penstock.gpu_node.engine.scheduler.memory_trace import MAX_RECORDS
from penstock.gpu_node.model.protocol import StepPlan

PROMPTS = [[5 + i, *range(10 * i + 3, 10 * i + 43 + i)] for i in range(8)]
PARAMS = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, seed=3, n=2)
NATIVE = {"runner": "native", "dtype": "bfloat16", "weight_cache": False}
TIGHT: dict[str, Any] = {"num_kv_blocks": 24, "num_swap_blocks": 40, "preemption": "swap", "max_num_seqs": 12}
MAX_FAILURES = 400

MakeEngine = Callable[..., Engine]
Answers = dict[tuple[str, int], list[int]]


def _add_all(engine: Engine) -> None:
    for i, prompt in enumerate(PROMPTS):
        engine.add(EngineRequest(str(i), prompt, PARAMS, seed=i))


def _drain(engine: Engine) -> list[StepOutput]:
    """Step as a node does, again after each failure."""
    outputs, num_failures = [], 0
    while engine.has_work():
        try:
            outputs += engine.step()
        except (RuntimeError, MemoryError):
            num_failures += 1
            assert num_failures < MAX_FAILURES
        engine.check_integrity()
    check_idle(engine)
    return outputs


def _answers(outputs: list[StepOutput]) -> Answers:
    return {(str(i), c): tokens_of(outputs, str(i), c) for i in range(len(PROMPTS)) for c in range(PARAMS.n)}


def _inject(engine: Engine, fault: Callable[[Place, StepPlan | None], Exception | None]) -> FaultyRunner:
    faulty = FaultyRunner(engine._runner, fault)
    engine._runner = faulty
    return faulty


@pytest.fixture(scope="module")
def want(make_engine: MakeEngine) -> Answers:
    """The answers of an engine without faults."""
    engine = make_engine(**NATIVE)
    _add_all(engine)
    return _answers(_drain(engine))


@pytest.mark.parametrize(
    ("place", "error", "policy"), pairwise(["start", "copy", "forward"], [RuntimeError, MemoryError], ["fcfs", "fair"])
)
def test_transient_faults_end_no_request(
    make_engine: MakeEngine, want: Answers, place: Place, error: type[Exception], policy: str
) -> None:
    engine, rng = make_engine(**NATIVE | TIGHT, scheduling_policy=policy), random.Random(0)
    rate = {"start": 0.07, "forward": 0.07, "copy": 0.7}
    faulty = _inject(engine, lambda at, _: error("now and then") if at == place and rng.random() < rate[at] else None)
    _add_all(engine)
    outputs = _drain(engine)
    assert _answers(outputs) == want
    assert {output.finish_reason for output in outputs} == {None, "length"}
    stats = engine.stats()
    assert stats.num_failed_steps == faulty.num_failures > 1
    assert stats.num_memory_failures == (faulty.num_failures if error is MemoryError else 0)


def test_plan_that_cannot_be_allocated_ends_no_request(
    make_engine: MakeEngine, want: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(**NATIVE | TIGHT)
    plan, rng = engine._scheduler.plan, random.Random(0)

    def failing(step: Any) -> StepPlan:
        if rng.random() < 0.07:
            raise MemoryError
        return plan(step)

    monkeypatch.setattr(engine._scheduler, "plan", failing)
    _add_all(engine)
    assert _answers(_drain(engine)) == want


@pytest.mark.parametrize(("most", "policy"), each_value([1, 5, 40], ["fcfs", "priority"]))
def test_out_of_memory_makes_steps_smaller_and_ends_no_request(
    make_engine: MakeEngine, want: Answers, policy: str, most: int
) -> None:
    engine = make_engine(**NATIVE | TIGHT, scheduling_policy=policy)
    faulty = _inject(engine, lambda at, plan: MemoryError() if at == "start" and len(plan.token_ids) > most else None)
    _add_all(engine)
    outputs = _drain(engine)
    assert _answers(outputs) == want
    assert {output.finish_reason for output in outputs} == {None, "length"}
    assert max(faulty.num_tokens) <= most and engine.stats().max_step_tokens < 512


def test_sequence_that_shares_blocks_of_a_failed_step_computes_them(make_engine: MakeEngine) -> None:
    engine, prefix = make_engine(**NATIVE), list(range(3, 99))
    one = PARAMS.model_copy(update={"n": 1})
    want = engine.generate([[*prefix, 7]], one)[0].choices[0].token_ids
    engine = make_engine(**NATIVE)
    failures = iter(range(1))
    _inject(engine, lambda at, _: MemoryError() if at == "start" and next(failures, None) is not None else None)
    for name, last in (("first", 5), ("second", 7)):
        engine.add(EngineRequest(name, [*prefix, last], one, seed=3))
    engine.step()
    with pytest.raises(MemoryError):
        engine.step()
    engine.abort("first")
    assert tuple(tokens_of(_drain(engine), "second")) == want


def test_steps_grow_again_once_there_is_memory(make_engine: MakeEngine, want: Answers) -> None:
    engine = make_engine(**NATIVE)
    failures = iter(range(6))
    faulty = _inject(
        engine, lambda at, _: MemoryError() if at == "forward" and next(failures, None) is not None else None
    )
    _add_all(engine)
    assert _answers(_drain(engine)) == want
    assert min(faulty.num_tokens) < 16 and engine.stats().max_step_tokens > 100
    _add_all(engine)
    assert _answers(_drain(engine)) == want
    assert engine.stats().max_step_tokens == 512


@pytest.mark.parametrize(
    ("failing", "position", "policy", "error"),
    pairwise([0, 3, 7], [2, 50], ["fcfs", "fair"], [RuntimeError, MemoryError]),
)
def test_request_that_fails_in_any_batch_ends_alone(
    make_engine: MakeEngine, want: Answers, failing: int, position: int, policy: str, error: type[Exception]
) -> None:
    engine = make_engine(**NATIVE | TIGHT, scheduling_policy=policy)

    def fault(at: Place, plan: StepPlan | None) -> Exception | None:
        step = engine._scheduler._in_flight
        if at != "forward" or step is None:
            return None
        spans = zip(step.seqs, step.starts.tolist(), step.ends.tolist(), strict=True)
        is_in_it = any(seq.request_id == str(failing) and start <= position < end for seq, start, end in spans)
        return error("always with this one") if is_in_it else None

    faulty = _inject(engine, fault)
    _add_all(engine)
    outputs = _drain(engine)
    ends = {output.request_id: output.finish_reason for output in outputs if output.finish_reason is not None}
    assert ends == {str(i): "error" if i == failing else "length" for i in range(len(PROMPTS))}
    for (name, choice), tokens in _answers(outputs).items():
        full = want[name, choice]
        assert tokens == (full[: len(tokens)] if name == str(failing) else full)
    assert faulty.num_failures < 60
    assert engine.stats().max_step_tokens == 512, "the one to blame is gone, so steps need not be small"


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_broken_runner_ends_no_request(make_engine: MakeEngine, error: type[Exception]) -> None:
    engine = make_engine(**NATIVE | TIGHT)
    _inject(engine, lambda at, _: error() if at == "start" else None)
    _add_all(engine)
    for _ in range(60):
        with suppress(error):
            assert engine.step() == []
        engine.check_integrity()
    stats = engine.stats()
    assert stats.num_failed_steps >= 30
    assert stats.num_running + stats.num_waiting + stats.num_swapped == 2 * len(PROMPTS)


class _FailingDetokenizer:
    """Fails at the fifth token."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._left = 5

    def push_one(self, token_id: int) -> str:
        self._left -= 1
        if not self._left:
            raise UnicodeError("no such text")
        return str(self._inner.push_one(token_id))

    def flush(self) -> str:
        return str(self._inner.flush())


def test_choice_whose_tokens_cannot_be_decoded_ends_alone(
    make_engine: MakeEngine, want: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(**NATIVE)
    new, count = engine.tokenizer.new_detokenizer, iter(range(1_000))
    monkeypatch.setattr(
        engine.tokenizer, "new_detokenizer", lambda **_: _FailingDetokenizer(new()) if next(count) == 3 else new()
    )
    _add_all(engine)
    outputs = _drain(engine)
    broken = ("1", 1)
    ends = {(o.request_id, o.choice): o.finish_reason for o in outputs if o.finish_reason is not None}
    assert ends == {key: "error" if key == broken else "length" for key in want}
    assert _answers(outputs) == {key: tokens[:5] if key == broken else tokens for key, tokens in want.items()}


def test_sequence_preempted_after_its_stop_string_is_not_resumed(make_engine: MakeEngine) -> None:
    engine, rng = make_engine(**NATIVE, num_kv_blocks=24, max_num_seqs=24, max_num_batched_tokens=96), random.Random(0)
    params = [PARAMS.model_copy(update={"n": 1, "stop": stop, "max_tokens": 24}) for stop in (("e",), ("t", "a"))]
    num_added = num_ended = 0
    while num_added < 200 or engine.has_work():
        for _ in range(min(3, 200 - num_added)):
            prompt = rng.choices(range(3, 380), k=rng.randint(1, 40))
            engine.add(EngineRequest(str(num_added), prompt, rng.choice(params), seed=num_added))
            num_added += 1
        num_ended += sum(output.finish_reason is not None for output in engine.step())
        stats = engine.stats()
        assert stats.num_running + stats.num_waiting + stats.num_swapped <= num_added - num_ended
    assert stats.num_preemptions > 0
    check_idle(engine)


def test_out_of_memory_errors_of_torch_are_recognized(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(**TORCH)
    runner: Any = engine._runner
    with monkeypatch.context() as patch:
        patch.setattr(runner._decoder, "logits", lambda *_: torch.empty(1 << 60))
        engine.add(EngineRequest("0", PROMPTS[0], PARAMS, seed=0))
        engine.step()
        with pytest.raises(MemoryError):
            engine.step()
    assert {output.finish_reason for output in _drain(engine)} == {None, "length"}
    assert engine.stats().num_memory_failures == 1


@pytest.mark.parametrize("fails_at_once", [False, True])
def test_blocks_of_a_choice_with_nonfinite_logits_are_used_again(make_engine: MakeEngine, fails_at_once: bool) -> None:
    engine = make_engine(
        **TORCH, num_kv_blocks=12, max_num_batched_tokens=512 if fails_at_once else 16, max_num_seqs=16
    )
    good = engine.generate([PROMPTS[0]], PARAMS)[0].choices
    with poisoned(engine._runner, 300):
        engine.add(EngineRequest("bad", [10] * 20 + [300], PARAMS, seed=0))
        engine.add(EngineRequest("0", PROMPTS[0], PARAMS, seed=seed_of("", PARAMS)))
        outputs = _drain(engine)
    assert {(o.request_id, o.finish_reason) for o in outputs} == {("0", None), ("0", "length"), ("bad", "error")}
    assert [tuple(tokens_of(outputs, "0", c)) for c in range(2)] == [choice.token_ids for choice in good]
    assert engine.generate([PROMPTS[0]] * 4, PARAMS)[3].choices == good


def test_memory_trace_names_the_largest_holders_at_an_out_of_memory_error(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(num_kv_blocks=40)
    engine.add(EngineRequest("small", PROMPTS[0], PARAMS, seed=0))
    engine.add(EngineRequest("large", PROMPTS[1] * 5, PARAMS, seed=0))
    for _ in range(3):
        engine.step()
    _inject(engine, lambda at, _: MemoryError("no 3 MiB") if at == "start" else None)
    with caplog.at_level(logging.ERROR), pytest.raises(MemoryError):
        engine.step()
        engine.step()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    last = record.trail[-1]  # type: ignore[attr-defined]
    assert last == engine.memory_trail()[-1]
    assert "step failed: MemoryError('no 3 MiB')" in last and "most: large 28, small 6" in last
    assert " 4 run 0 wait 0 swapped  steps of 512 " in last and "kv 19 held" in last


def test_growth_of_memory_is_logged_at_once(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, now_s = make_engine(), iter(range(1_000_000))
    engine._memory_trace._now_s = lambda: next(now_s)
    with caplog.at_level(logging.INFO, logger="penstock"):
        for mib in (100, 105, 109, 120, 110, 131, 200):
            monkeypatch.setattr(memory_trace, "resident_bytes", lambda mib=mib: mib << 20)
            engine.step()
    told = [record.record for record in caplog.records if record.message == "memory grew"]  # type: ignore[attr-defined]
    assert [next(mib for mib in (100, 120, 200) if f" {mib} MiB " in line) for line in told] == [100, 120, 200]


def test_memory_trace_counts_events_between_two_records_and_is_bounded(make_engine: MakeEngine) -> None:
    engine = make_engine(**NATIVE, num_kv_blocks=12)
    now_s = iter(i * 0.3 for i in range(1_000_000))
    engine._memory_trace._now_s = lambda: next(now_s)
    for _ in range(4):
        engine.generate(PROMPTS, PARAMS)
    with pytest.raises(PromptTooLongError):
        engine.add(EngineRequest("x", [1] * 5000, PARAMS, seed=0))
    engine.generate(PROMPTS[:1], PARAMS)
    lines = engine.memory_trail()
    assert any("preempted 1" in line for line in lines)
    assert sum("refused 1" in line for line in lines) == 1
    for _ in range(20):
        engine.generate(PROMPTS[:1], PARAMS)
    assert len(engine.memory_trail()) == MAX_RECORDS


def test_a_scheduler_that_fails_once_loses_no_token(
    make_engine: MakeEngine, want: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(**NATIVE)
    schedule, count = engine._scheduler.schedule, iter(range(1_000))

    def failing() -> Any:
        if next(count) in (5, 9):
            raise MemoryError
        return schedule()

    monkeypatch.setattr(engine._scheduler, "schedule", failing)
    _add_all(engine)
    assert _answers(_drain(engine)) == want
    assert next(count) > 9


def test_an_adapter_that_cannot_be_loaded_ends_its_own_requests_alone(
    make_engine: MakeEngine, want: Answers, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for seed, name in enumerate(("bad", "good")):
        make_adapter(tmp_path / name, base, seed=seed)
    engine = make_engine(**NATIVE, lora_dir=tmp_path, max_loras=2)
    good = EngineRequest("good", PROMPTS[0], PARAMS, seed=0, adapter=AdapterRef(name="good"))
    bad = replace(good, request_id="bad", adapter=AdapterRef(name="bad"))
    engine.add(good)
    alone = _drain(engine)
    set_adapter, digests = engine._runner.set_adapter, engine.adapters()

    def failing(slot: int, adapter: Any) -> None:
        if adapter.digest == digests["bad"]:
            raise RuntimeError("this one does not fit")
        set_adapter(slot, adapter)

    monkeypatch.setattr(engine._runner, "set_adapter", failing)
    engine.add(bad)
    engine.add(good)
    _add_all(engine)
    outputs = _drain(engine)
    assert _answers(outputs) == want
    assert [tokens_of(outputs, "good", c) for c in range(2)] == [tokens_of(alone, "good", c) for c in range(2)]
    assert {output.finish_reason for output in outputs if output.request_id == "bad"} == {"error"}
    assert {output.finish_reason for output in outputs if output.request_id != "bad"} == {None, "length"}
