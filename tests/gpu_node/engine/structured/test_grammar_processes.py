"""Grammar processes that fail at any moment, and large messages to them, neither delay nor end other requests."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes.engine_runs import check_idle, drain
from fakes.guided import mask_of
from fakes.waiting import wait_until

from penstock.contract.errors import RequestError, TooCostlyError, UnavailableError
from penstock.contract.job import SamplingParams
from penstock.contract.sampling import StructuredOutputs
from penstock.contract.tool_formats import FORMATS
from penstock.contract.tools import WantedCalls, WantedFunction
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.engine.structured import compiler, processes, protocol
from penstock.gpu_node.engine.structured.compiler import GrammarCompiler
from penstock.gpu_node.engine.structured.guide import GuidedMasks
from penstock.gpu_node.engine.structured.process import Template, Worker
from penstock.gpu_node.engine.structured.shared_page import NUM_SLOTS, SharedPage
from penstock.gpu_node.engine.structured.tenant_grammar import Grammar, TrialResult
from penstock.gpu_node.engine.text.tokenizer import Tokenizer

PROMPT = [3, 4, 5]
MIB = 1 << 20
LARGE = json.dumps({"type": "object", "description": "d" * 200_000})


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    made = _engine(tiny_model)
    yield made
    made._guides.close()


def _engine(model: Path) -> Engine:
    return Engine(
        EngineConfig(model=str(model), runner="native", dtype="bfloat16", num_kv_blocks=400, weight_cache=False)
    )


def _params(wanted: dict[str, Any] | StructuredOutputs, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 64, "structured_outputs": wanted, **options})


def _calls(num_functions: int, last: str = "{}") -> StructuredOutputs:
    functions = [WantedFunction(name=f"f{i}", parameters="{}") for i in range(num_functions - 1)]
    functions.append(WantedFunction(name="last", parameters=last))
    return StructuredOutputs(
        calls=WantedCalls(form=FORMATS["hermes"], functions=tuple(functions), required=False, answer=LARGE)
    )


def _peak_bytes(guides: GrammarCompiler, wanted: StructuredOutputs) -> tuple[int, RequestError | None]:
    """Return the peak memory of a compilation in this process, and its refusal."""
    refusal = None
    tracemalloc.start()
    try:
        guides.prepare(wanted)
    except RequestError as error:
        refusal = error
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak, refusal


def test_a_serving_engine_does_not_serialize_its_tokenizer(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would hold the interpreter's lock for 50 ms, and with it the event loop."""
    engine = _engine(tiny_model)

    def holds_the_lock(tokenizer: Tokenizer, vocab_size: int | None = None) -> str:
        raise AssertionError("a request serializes the tokenizer")

    monkeypatch.setattr(Tokenizer, "to_json", holds_the_lock)
    assert engine._guides.prepare(StructuredOutputs(regex="a+"))
    engine._guides.close()


def test_the_schema_of_an_answer_is_not_repeated_for_each_function(engine: Engine) -> None:
    engine.prepare(_params({"json": LARGE}))
    peak, refusal = _peak_bytes(engine._guides, _calls(64))
    assert refusal is None and peak < 4 * MIB
    peak, refusal = _peak_bytes(engine._guides, _calls(64, last='{"properties": {"a": {"contains": {}}}}'))
    assert refusal is not None and refusal.param == "tools" and "'last'" in refusal.message
    assert peak < 4 * MIB


def test_a_grammar_of_calls_that_is_too_large_is_refused_by_name(engine: Engine) -> None:
    large = [WantedFunction(name=f"f{i}", parameters=LARGE) for i in range(12)]
    with pytest.raises(TooCostlyError, match="the limit is 2 MiB") as caught:
        engine.prepare(_params(StructuredOutputs(calls=WantedCalls(form=FORMATS["hermes"], functions=tuple(large)))))
    assert caught.value.param == "tools"


def test_a_large_message_is_not_copied_at_each_partial_send() -> None:
    node, other = socket.socketpair()
    worker = Worker(node, SharedPage(-1, 0))
    worker.send([b"x" * (8 * MIB)])
    tracemalloc.start()
    try:
        other.recv(1 << 16)
        assert worker.flush() is False
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        worker.close()
        other.close()
    assert peak < MIB


def test_more_masks_than_slots_arrive(engine: Engine) -> None:
    grammar = engine.prepare(_params({"regex": "[a-c]{3}"})).grammar
    assert isinstance(grammar, Grammar)
    guides = [engine._guides.new_guide(grammar) for _ in range(NUM_SLOTS + 6)]
    for _ in range(2):  # The slots of the first round serve the second.
        engine._guides.write(GuidedMasks(guides))
        found = [mask_of(engine._guides, guide).words[0] for guide in guides]
        assert found[0].any() and all((one == found[0]).all() for one in found)
        allowed = int(np.unpackbits(found[0].view(np.uint8), bitorder="little").argmax())
        for guide in guides:
            guide.take([allowed])


def test_the_choices_of_a_prepared_request_do_not_look_up_its_grammar(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = _params({"regex": "[a-c]{3}"}, n=4)
    prepared = engine.prepare(params)

    def read(*_: Any, **__: Any) -> str:
        raise AssertionError("the request's grammar was read again")

    monkeypatch.setattr(StructuredOutputs, "model_dump_json", read)
    engine.add(EngineRequest("x", PROMPT, params, seed=1, prepared=prepared))
    assert len({output.choice for output in drain(engine)}) == 4
    check_idle(engine)


def test_a_grammar_whose_masks_become_slow_moves_between_two_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = _params({"regex": "[a-e]{40,50}"}, n=3)
    (whole,) = engine.generate([PROMPT], params)
    grammar = engine.prepare(params).grammar
    assert isinstance(grammar, Grammar)
    was_costly = grammar.is_costly
    monkeypatch.setattr(protocol, "CHEAP_MASK_CPU_S", -1.0)
    (answer,) = engine.generate([PROMPT], params)
    assert (was_costly, grammar.is_costly, engine.stats().grammar_kills) == (False, True, 0)
    assert [choice.token_ids for choice in answer.choices] == [choice.token_ids for choice in whole.choices]
    check_idle(engine)


def test_failed_starts_disable_structured_output_only_until_a_start_succeeds(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, num_failed = _engine(tiny_model), 0

    def refused(*wanted: Any, **options: Any) -> subprocess.Popen[bytes]:
        nonlocal num_failed
        num_failed += 1
        raise OSError(errno.EAGAIN, "no process is left")

    monkeypatch.setattr(processes, "_RESTART_AFTER_S", 0.0001)
    params = _params({"regex": "ab"})
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refused)
        with pytest.raises(UnavailableError, match="did not start"):
            engine.prepare(params)
    assert num_failed > 3
    assert engine.generate([PROMPT], params)[0].choices[0].text == "ab"
    engine._guides.close()


def _sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_a_template_that_ends_right_after_a_trials_process_starts_anew(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, fork = _engine(tiny_model), Template.fork
    stopped: list[int] = []

    def fork_and_stop(template: Template, *wanted: Any) -> Worker:
        worker = fork(template, *wanted)
        if not stopped:
            stopped.append(template.pid)
            while not (children := Path(f"/proc/{template.pid}/task/{template.pid}/children").read_text().split()):
                time.sleep(0.001)
            while not _sleeps(template.pid):
                time.sleep(0.001)  # Before it waits again, it closes its end of the trial's socket.
            os.kill(template.pid, signal.SIGSTOP)  # It does not report how the trial's process ended.
            os.kill(int(children[0]), signal.SIGKILL)
        return worker

    monkeypatch.setattr(Template, "fork", fork_and_stop)
    with ThreadPoolExecutor(1) as pool:
        prepared = pool.submit(engine.prepare, _params({"regex": "ab"}))
        wait_until(lambda: engine._guides._host._processes._dying)
        os.kill(stopped[0], signal.SIGKILL)
        grammar = prepared.result(20).grammar
    assert isinstance(grammar, Grammar)
    assert not mask_of(engine._guides, engine._guides.new_guide(grammar)).late
    assert engine.generate([PROMPT], _params({"regex": "ab"}))[0].choices[0].text == "ab"
    assert engine.stats().grammar_host_failures == 0
    engine._guides.close()


def test_trial_ends_although_its_template_hangs(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, fork, kill_all = _engine(tiny_model), Template.fork, Template.kill_all
    usual_s, stopped = protocol.TASK_WALL_S, list[int]()

    def kill(template: Template) -> None:
        monkeypatch.setattr(protocol, "TASK_WALL_S", usual_s)  # The next one has time, on a busy machine, too.
        kill_all(template)

    def stop_and_fork(template: Template, *wanted: Any) -> Worker:
        if not stopped:
            stopped.append(template.pid)
            os.kill(template.pid, signal.SIGSTOP)  # It neither forks the trial's process nor kills it.
        return fork(template, *wanted)

    monkeypatch.setattr(Template, "fork", stop_and_fork)
    monkeypatch.setattr(Template, "kill_all", kill)
    monkeypatch.setattr(protocol, "TASK_WALL_S", 0.1)
    with ThreadPoolExecutor(1) as pool:
        assert isinstance(pool.submit(engine.prepare, _params({"regex": "ab"})).result(20).grammar, Grammar)
    assert len(stopped) == 1
    assert engine.generate([PROMPT], _params({"regex": "ab"}))[0].choices[0].text == "ab"
    engine._guides.close()


def test_a_refusal_ends_and_the_next_one_lasts_longer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    guides, wanted, now_s, tried_s = engine._guides, StructuredOutputs(regex="a refused text"), 1000.0, []

    def killed(*_: Any) -> TrialResult:
        tried_s.append(now_s)
        return TrialResult(is_too_costly=True, is_killed=True)

    monkeypatch.setattr(compiler, "time", SimpleNamespace(monotonic=lambda: now_s))
    with monkeypatch.context() as patch:
        patch.setattr(guides._host, "try_out", killed)
        for asked_s in (1000.0, 1119.0, 1121.0, 1360.0, 1362.0):
            now_s = asked_s
            with pytest.raises(TooCostlyError, match="killed from outside"):
                guides.prepare(wanted)
    assert tried_s == [1000.0, 1121.0, 1362.0]
    now_s = 1362.0 + 481.0
    refused = guides.prepare(wanted)
    refused.refusal, refused.refused_s = TooCostlyError("killed"), now_s
    assert guides.prepare(wanted) is refused
    now_s += 3600.0
    assert guides.prepare(wanted).refusal is None


def test_a_mask_host_that_failed_is_counted_and_ends_its_requests(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine(tiny_model)

    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(processes.GrammarProcesses, "maintain", fail)
    with pytest.raises(UnavailableError):
        engine.prepare(_params({"regex": "ab"}))
    assert engine.stats().grammar_host_failures == 1
