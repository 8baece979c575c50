"""Two tenants use one grammar's text. What one of them makes of it ends no choice of the other one, and passes."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.engine_runs import check_idle, drain, tokens_of
from fakes.guided import mask_of

from penstock.contract.errors import TooCostlyError
from penstock.contract.job import SamplingParams
from penstock.contract.sampling import StructuredOutputs
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.engine.structured import compiler, protocol
from penstock.gpu_node.engine.structured.lanes import GrammarCounts, Lanes
from penstock.gpu_node.engine.structured.process import Worker
from penstock.gpu_node.engine.structured.shared_page import NO_SLOT, SharedPage
from penstock.gpu_node.engine.structured.tenant_grammar import Grammar

MIB = 1 << 20
PROMPT = [3, 4, 5]
SCHEMA = {"type": "object", "properties": {f"field_{i}": {"type": ["string", "null"]} for i in range(1500)}}
"""Its compilation takes a tenth of a second or more, so the worker for costly grammars serves it."""
TEXTS: dict[str, dict[str, Any]] = {
    "json_object": {"json_object": True},
    "regex": {"regex": "[a-c]{40,60}"},
    "schema": {"json": json.dumps(SCHEMA)},
}


@pytest.fixture(scope="module")
def engine(demo_file: Path) -> Iterator[Engine]:
    made = Engine(EngineConfig(model=str(demo_file), runner="native", num_kv_blocks=400))
    yield made
    made._guides.close()


@pytest.mark.parametrize("text", TEXTS)
def test_a_refusal_ends_no_choice_of_another_tenant(engine: Engine, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guides, wanted, now_s = engine._guides, StructuredOutputs(**TEXTS[text]), 1000.0
    monkeypatch.setattr(compiler, "time", SimpleNamespace(monotonic=lambda: now_s))
    of_attacker, of_neighbor = (guides.prepare(wanted, tenant) for tenant in ("attacker", "neighbor"))
    running = guides.new_guide(of_neighbor)
    of_attacker.refusal = TooCostlyError("its masks took more than 64 MiB")
    assert mask_of(guides, running).words.any() and running.failure is None
    assert guides.prepare(wanted, "neighbor") is of_neighbor
    assert mask_of(guides, guides.new_guide(of_neighbor)).words.any()
    of_attacker.refused_s = now_s
    with pytest.raises(TooCostlyError):
        guides.new_guide(guides.prepare(wanted, "attacker"))
    now_s += compiler.FIRST_REFUSAL_S + 1
    again = guides.prepare(wanted, "attacker")
    assert again is not of_attacker and mask_of(guides, guides.new_guide(again)).words.any()


def test_a_refused_trial_is_no_refusal_for_another_tenant(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    guides, wanted = engine._guides, StructuredOutputs(json_schema=json.dumps({**SCHEMA, "title": "refused"}))
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "TRIAL_CPU_S", 0.01)  # It may take longer at one time than at another.
        with pytest.raises(TooCostlyError):
            guides.prepare(wanted, "attacker")
    assert guides.prepare(wanted, "neighbor").refusal is None
    with pytest.raises(TooCostlyError):
        guides.prepare(wanted, "attacker")


class _Killer(threading.Thread):
    """Ends the worker that compiles a grammar of the attacker, with the signal of a limit of processor time."""

    def __init__(self, engine: Engine, grammar: Grammar) -> None:
        super().__init__(daemon=True)
        self.num_killed = 0
        self._host, self._grammar = engine._guides._host, grammar
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.0002):
            for worker in [*self._host._lanes.workers.values()]:
                try:
                    task: Any = worker.tasks.get(worker.current)
                except ValueError:  # It has just been closed.
                    continue
                if task is not None and task.grammar is self._grammar and task.guide is None:
                    self._kill_all()

    def _kill_all(self) -> None:
        template = self._host._processes.template
        assert template is not None
        children = Path(f"/proc/{template.pid}/task/{template.pid}/children").read_text().split()
        for pid in children:
            os.kill(int(pid), signal.SIGPROF)
        self.num_killed += 1
        self._is_over.set()

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def test_a_kill_ends_the_choices_of_the_tenant_that_caused_it_alone(engine: Engine) -> None:
    wanted = {"json": json.dumps({**SCHEMA, "title": "not compiled yet"})}
    params = SamplingParams(temperature=1.0, max_tokens=48, structured_outputs=wanted)
    engine.add(EngineRequest("alone", PROMPT, params, seed=7, tenant="neighbor"))
    alone = tokens_of(drain(engine), "alone")
    mine = engine.prepare(params, tenant="attacker")
    assert mine.grammar is not None
    killer = _Killer(engine, mine.grammar)
    killer.start()
    try:
        engine.add(EngineRequest("running", PROMPT, params, seed=7, tenant="neighbor"))
        outputs = [output for _ in range(4) for output in engine.step()]
        engine.add(EngineRequest("attack", PROMPT, params, seed=7, tenant="attacker", prepared=mine))
        engine.add(EngineRequest("new", PROMPT, params, seed=7, tenant="neighbor"))
        outputs += drain(engine)
    finally:
        killer.stop()
    ends = {one.request_id: (one.finish_reason, one.error) for one in outputs if one.finish_reason is not None}
    assert mine.grammar.is_costly and killer.num_killed == 1
    assert ends["attack"][0] == "error" and isinstance(ends["attack"][1], TooCostlyError)
    assert tokens_of(outputs, "running") == tokens_of(outputs, "new") == alone
    with pytest.raises(TooCostlyError):
        engine.add(EngineRequest("again", PROMPT, params, seed=7, tenant="attacker"))
    check_idle(engine)


class _Lane:
    """A worker without a process, and the lanes that get its replies."""

    def __init__(self) -> None:
        self._ends = socket.socketpair()
        self.worker = Worker(self._ends[0], SharedPage(-1, 0))
        self.lanes = Lanes(GrammarCounts())

    def reply(self, grammar: Grammar, cpu_s: float, memory: int) -> None:
        """Take a worker's reply to a task. `memory`: the bytes that it has, 0 if they were not measured."""
        number = self.lanes._note(self.worker, _task_of(grammar))
        self.lanes.handle_replies(self.worker, [[number, "", cpu_s, memory]])

    def close(self) -> None:
        self.worker.close()
        self._ends[1].close()


def _task_of(grammar: Grammar) -> Any:
    return SimpleNamespace(grammar=grammar, guide=None, num_tokens=0, is_rebuilt=False, slot=NO_SLOT)


@pytest.fixture
def lane() -> Iterator[_Lane]:
    made = _Lane()
    yield made
    made.close()


def grammars() -> tuple[Grammar, Grammar]:
    attacker, neighbor = (Grammar("regex", "[a-c]*", "structured_outputs.regex", is_costly=True) for _ in range(2))
    return attacker, neighbor


def test_memory_of_small_tasks_is_not_charged_to_the_next_large_one(lane: _Lane) -> None:
    attacker, neighbor = grammars()
    lane.reply(neighbor, 0.002, 100 * MIB)
    for _ in range(30):
        lane.reply(attacker, 0.0009, 0)
    lane.reply(neighbor, 0.0011, 200 * MIB)
    assert neighbor.memory < 5 * MIB and neighbor.refusal is None
    assert attacker.memory > 90 * MIB
    assert attacker.refusal is not None and "64 MiB" in attacker.refusal.message


def test_an_account_of_memory_begins_anew(lane: _Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, _ = grammars()
    lane.reply(grammar, 0.002, 100 * MIB)
    lane.reply(grammar, 0.002, 160 * MIB)
    grammar.num_kills = 2
    assert grammar.memory == 60 * MIB
    grammar.account_s -= protocol.ACCOUNT_S + 1
    lane.reply(grammar, 0.002, 170 * MIB)
    assert (grammar.memory, grammar.num_kills, grammar.refusal) == (0, 0, None)
    lane.reply(grammar, 0.002, 230 * MIB)
    assert grammar.memory == 60 * MIB and grammar.refusal is None


@pytest.mark.parametrize(
    ("held_mib", "blamed"), [(20, "neighbor"), (300, "attacker")], ids=["in an empty worker", "in a full worker"]
)
def test_memory_that_ran_out_is_blamed_on_the_grammar_that_holds_it(
    lane: _Lane, held_mib: int, blamed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_GRAMMAR_MIB", 1000)
    attacker, neighbor = grammars()
    lane.reply(neighbor, 0.002, 100 * MIB)
    lane.reply(attacker, 0.002, (100 + held_mib) * MIB)
    lane.reply(neighbor, 0.002, (101 + held_mib) * MIB)
    number = lane.lanes._note(lane.worker, _task_of(neighbor))
    lane.lanes.died(lane.worker, number, -signal.SIGABRT)
    refused = {"attacker": attacker, "neighbor": neighbor}[blamed]
    assert [one for one in (attacker, neighbor) if one.refusal is not None] == [refused]


def test_time_that_ran_out_is_blamed_on_the_task_in_any_worker(lane: _Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_GRAMMAR_MIB", 1000)
    attacker, neighbor = grammars()
    lane.reply(neighbor, 0.002, 100 * MIB)
    lane.reply(neighbor, 0.002, 400 * MIB)
    number = lane.lanes._note(lane.worker, _task_of(attacker))
    lane.lanes.died(lane.worker, number, -signal.SIGPROF)
    assert attacker.refusal is not None and neighbor.refusal is None
