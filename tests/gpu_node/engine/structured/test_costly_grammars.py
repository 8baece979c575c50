"""Grammars that cost too much are refused or ended with an error; streams in the same batch keep every token."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fakes.engine_runs import check_idle, drain, tokens_of
from fakes.waiting import Deadline, wait_until

from penstock.contract.errors import RequestError, TooCostlyError
from penstock.contract.job import SamplingParams
from penstock.contract.sampling import MAX_SCHEMA_CHARS
from penstock.gpu_node.engine import Engine, EngineConfig, StepOutput
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.engine.structured import host, lanes, protocol
from penstock.gpu_node.engine.structured.guide import GuidedMasks
from penstock.gpu_node.engine.structured.process import Template, Worker
from penstock.gpu_node.engine.structured.schema.objects import rust_pattern
from penstock.gpu_node.engine.structured.tenant_grammar import Grammar

LETTERS = "abcdefghijklmnopqrstuvwxyz"
HOSTILE = "start: " + " | ".join(
    f"/[a-z]*{LETTERS[i // 676 % 26]}{LETTERS[i // 26 % 26]}{LETTERS[i % 26]}[a-z]*/" for i in range(3000)
)
"""With an ordinary vocabulary each mask of it would take seconds, and 100 MiB."""
REGEX = {"regex": "[a-c]{40,60}"}
PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    made = Engine(
        EngineConfig(model=str(tiny_model), runner="native", dtype="bfloat16", num_kv_blocks=400, weight_cache=False)
    )
    made.generate([PROMPT], _params(REGEX))  # starts the grammar processes
    yield made
    made._guides.close()


def _params(wanted: dict[str, Any] | None, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 64, "structured_outputs": wanted, **options})


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # one that tried a grammar out ends by itself
            os.kill(pid, number)


def _run(engine: Engine, during: Callable[[int], None] = lambda step: None) -> list[StepOutput]:
    """Run a guided stream and one without a guide in the same batch."""
    for name, wanted in (("guided", REGEX), ("free", None)):
        params = _params(wanted, ignore_eos=wanted is None)
        engine.add(EngineRequest(name, PROMPT, params, seed=7))
    outputs, step = [], 0
    while engine.has_work():
        outputs += engine.step()
        step += 1
        during(step)
    return outputs


def test_a_hostile_grammar_is_refused_by_name_within_its_trial(engine: Engine) -> None:
    with pytest.raises(TooCostlyError) as caught:
        engine.prepare(_params({"grammar": HOSTILE}))
    assert (caught.value.code, caught.value.param) == ("too_costly", "structured_outputs.grammar")
    trials = engine.stats().grammar_trials
    with pytest.raises(TooCostlyError):
        engine.prepare(_params({"grammar": HOSTILE}))
    assert engine.stats().grammar_trials == trials


def test_a_pattern_that_backtracks_on_a_name_of_the_schema_ends_its_trial_alone(engine: Engine) -> None:
    schema = {"type": "object", "propertyNames": {"pattern": "^(a+)+$"}, "properties": {"a" * 60 + "b": {}}}
    with pytest.raises(TooCostlyError) as caught:
        engine.prepare(_params({"json": schema}))
    assert (caught.value.code, caught.value.param) == ("too_costly", "structured_outputs.json_schema")
    _run(engine)
    check_idle(engine)


def test_unclosed_braces_in_a_pattern_take_linear_time() -> None:
    began_s = time.thread_time()
    rust_pattern("\\p{" * (MAX_SCHEMA_CHARS // 3))
    assert time.thread_time() - began_s < 2  # 0.06 s; quadratic, it takes 14


def test_a_trial_that_takes_too_much_time_or_memory_is_killed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "TRIAL_CPU_S", 0.0001)
    engine = Engine(
        EngineConfig(model=str(tiny_model), runner="native", dtype="bfloat16", num_kv_blocks=40, weight_cache=False)
    )
    with pytest.raises(TooCostlyError, match="cannot be enforced: it is too costly"):
        engine.prepare(_params({"grammar": HOSTILE}))
    engine._guides.close()


def test_a_thousand_choices_with_one_prefix_are_cheap(engine: Engine) -> None:
    texts = ["the same beginning " * 12 + f"{i:04d}" for i in range(1024)]
    (answer,) = engine.generate([PROMPT], _params({"choice": texts}, max_tokens=400))
    assert answer.choices[0].text in texts
    with pytest.raises(ValueError, match="characters together; the limit is 262144"):
        _params({"choice": ["x" * 1000 + str(i) for i in range(1024)]})


def test_a_killed_grammar_process_changes_no_token(engine: Engine) -> None:
    whole = _run(engine)
    (template,) = engine._guides.process_ids

    def kill(step: int) -> None:
        if step in (8, 20):
            victims = _children(template) if step == 8 else [template]
            _signal(victims, signal.SIGKILL)

    beside = _run(engine, kill)
    for name in ("guided", "free"):
        assert tokens_of(beside, name) == tokens_of(whole, name)
    assert engine._guides.process_ids != [template]
    assert engine.stats().grammar_restarts > 0
    check_idle(engine)


def test_late_mask_delays_no_other_row(engine: Engine) -> None:
    """While the worker is stopped the free stream goes on, and then the guided one says what it would have said."""
    whole, late_before = _run(engine), engine.stats().late_masks
    (template,) = engine._guides.process_ids
    last_step_s, longest_s, stopped = time.monotonic(), 0.0, []

    def stop(step: int) -> None:
        nonlocal last_step_s, longest_s
        if step == 5:
            stopped.extend(_children(template))
        if step in (5, 40):
            _signal(stopped, signal.SIGSTOP if step == 5 else signal.SIGCONT)
        if 6 < step < 40:
            longest_s = max(longest_s, time.monotonic() - last_step_s)
        last_step_s = time.monotonic()

    beside = _run(engine, stop)
    for name in ("guided", "free"):
        assert tokens_of(beside, name) == tokens_of(whole, name)
    assert 0 < engine.stats().late_masks - late_before < 20  # held back, it is computed in no step in vain
    assert longest_s < 20.0  # of a loaded machine; the worker is stopped for all of these 34 steps
    check_idle(engine)


def test_only_the_choice_whose_masks_take_too_long_ends_with_a_named_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tokens_of(_run(engine), "free")
    monkeypatch.setattr(protocol, "GUIDE_CPU_S", -1.0)
    monkeypatch.setattr(protocol, "GUIDE_CPU_PER_TOKEN_S", 0.0)
    outputs = _run(engine)
    (last,) = (output for output in outputs if output.request_id == "guided" and output.finish_reason)
    assert last.finish_reason == "error" and isinstance(last.error, TooCostlyError)
    assert last.error.param == "structured_outputs.regex"
    assert tokens_of(outputs, "free") == whole
    check_idle(engine)


def test_grammar_that_kills_the_cheap_worker_continues_in_the_costly_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tokens_of(_run(engine), "guided")
    properties = {f"field_{i}": {"type": ["string", "null"]} for i in range(400)}
    wanted = _params({"json": {"type": "object", "properties": properties}})
    kills = engine.stats().grammar_kills
    # A slow moment of the machine must not make the trial costly.
    with monkeypatch.context() as patient:
        patient.setattr(protocol, "CHEAP_TRIAL_CPU_S", 60.0)
        patient.setattr(protocol, "CHEAP_MASK_CPU_S", 60.0)
        grammar = engine.prepare(wanted).grammar
    assert isinstance(grammar, Grammar) and not grammar.is_costly
    monkeypatch.setitem(lanes._CPU_S, "cheap", 0.001)  # its compilation takes twenty times as long
    (template,) = engine._guides.process_ids
    _signal(_children(template), signal.SIGKILL)
    (answer,) = engine.generate([PROMPT], wanted)
    assert answer.choices[0].text.startswith("{") and answer.choices[0].finish_reason in ("stop", "length")
    assert grammar.is_costly and engine.stats().grammar_kills == kills + 1
    monkeypatch.undo()
    assert tokens_of(_run(engine), "guided") == whole


class _FailingForks:
    """Makes some forks fail: those whose numbers, from 0, the test names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: Collection[int]) -> None:
        self.num_asked = 0
        fork = Template.fork

        def fork_or_fail(template: Template, *wanted: Any) -> Worker:
            self.num_asked += 1
            if self.num_asked - 1 in refused:
                raise OSError(errno.EMFILE, "too many open files")
            return fork(template, *wanted)

        monkeypatch.setattr(Template, "fork", fork_or_fail)


def test_trial_is_repeated_if_the_system_refuses_its_process(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    forks = _FailingForks(monkeypatch, range(5))
    wanted = _params({"regex": "tried again"})
    assert engine.prepare(wanted).grammar is not None
    assert forks.num_asked == 6
    assert engine.generate([PROMPT], wanted)[0].choices[0].text == "tried again"


def test_refused_start_of_one_worker_does_not_delay_masks_of_the_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheap, costly = _params(REGEX, seed=5), _params({"regex": "[a-d]{40,60}"}, seed=5)
    engine.prepare(cheap)
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "CHEAP_TRIAL_CPU_S", -1.0)
        grammar = engine.prepare(costly).grammar
    assert grammar is not None and grammar.is_costly
    whole = [engine.generate([PROMPT], one)[0].choices[0].token_ids for one in (cheap, costly)]
    (template,), workers = engine._guides.process_ids, engine._guides._host._lanes
    _signal(_children(template), signal.SIGKILL)
    wait_until(lambda: not workers.workers)
    forks = _FailingForks(monkeypatch, [1])  # after that of the other worker, in the same call
    for name, params in (("cheap", cheap), ("costly", costly)):
        engine.add(EngineRequest(name, PROMPT, params, seed=5))
    outputs, deadline = [], Deadline()
    while engine.has_work() and deadline.left_s():
        outputs += engine.step()
    assert [tuple(tokens_of(outputs, name)) for name in ("cheap", "costly")] == whole
    assert forks.num_asked == 3
    check_idle(engine)


def test_refused_grammar_leaves_nothing_in_the_engine(engine: Engine) -> None:
    with pytest.raises(RequestError, match="cannot be enforced"):
        engine.add(EngineRequest("x", PROMPT, _params({"regex": "(a"}), seed=1))
    assert drain(engine) == []
    check_idle(engine)


def test_late_masks_and_preemptions_change_no_tokens(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"model": str(tiny_model), "runner": "native", "dtype": "bfloat16", "weight_cache": False}
    roomy = Engine(EngineConfig(**plain, num_kv_blocks=400))
    tight = Engine(EngineConfig(**plain, num_kv_blocks=30, max_num_batched_tokens=32, max_num_seqs=16))
    prompts = [[3 + i, *range(4, 20)] for i in range(12)]
    wanted = [_params(REGEX if i % 3 else None, seed=i, n=1 + i % 2, ignore_eos=i % 3 == 0) for i in range(12)]
    whole = [answer.choices for answer in roomy.generate(prompts, wanted)]
    begin = host.MaskHost.begin

    def begin_impatiently(self: host.MaskHost, masks: GuidedMasks) -> None:
        begin(self, masks)
        with self._lock:
            self._give_up_waiting()

    monkeypatch.setattr(host.MaskHost, "begin", begin_impatiently)
    assert [answer.choices for answer in tight.generate(prompts, wanted)] == whole
    assert tight.stats().late_masks > 10 and tight.stats().num_preemptions > 0
    check_idle(tight)
    for engine in (roomy, tight):
        engine._guides.close()
