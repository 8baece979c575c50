"""The engine's thread: commands between steps, and what their callers may do."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from threading import Event

import pytest
from fakes.processes.reference_engine import ReferenceEngine

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.records import EngineRequest, StepOutput
from penstock.gpu_node.engine.worker import MAX_FAILED_STEPS, EngineWorker


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that failed is tried again at once."""
    monkeypatch.setattr("penstock.gpu_node.engine.worker.MAX_PAUSE_S", 0.001)


@pytest.fixture
def delivered() -> list[StepOutput]:
    return []


@pytest.fixture
def worker(delivered: list[StepOutput]) -> Iterator[EngineWorker]:
    worker = EngineWorker(ReferenceEngine(step_s=0.02), delivered.extend)
    yield worker
    worker.stop()
    worker.stopped.result(5)


def add(worker: EngineWorker, request: EngineRequest) -> Future[None]:
    """Add a request. The future ends when the engine has accepted or refused it."""
    done: Future[None] = Future()
    worker.add(request, done.set_exception)

    def accepted() -> None:
        if not done.done():
            done.set_result(None)

    worker.call(accepted)
    return done


def test_a_caller_that_gives_up_waiting_does_not_harm_the_engine(worker: EngineWorker) -> None:
    given_up = worker.stats()
    assert given_up.cancel(), "the thread has not started, so nothing runs yet"
    worker.start()
    assert worker.stats().result(5).steps == 0


def test_refusal_reaches_its_caller_and_the_next_request_runs(
    worker: EngineWorker, delivered: list[StepOutput]
) -> None:
    worker.start()
    refused = add(worker, EngineRequest("1", [1] * 5000, SamplingParams(max_tokens=2), seed=1))
    with pytest.raises(Exception, match="prompt has 5000 tokens"):
        refused.result(5)
    add(worker, EngineRequest("2", [1], SamplingParams(max_tokens=2), seed=1)).result(5)
    while worker.call(lambda: len(delivered)).result(5) < 2:
        pass
    assert [output.request_id for output in delivered] == ["2", "2"]


def test_a_paused_engine_answers_but_does_not_step(worker: EngineWorker, delivered: list[StepOutput]) -> None:
    worker.set_paused(True)
    worker.start()
    add(worker, EngineRequest("1", [1], SamplingParams(max_tokens=1), seed=1)).result(5)
    assert worker.stats().result(5).steps == 0
    assert delivered == []
    worker.set_paused(False)
    while worker.stats().result(5).steps < 1:
        pass


def test_commands_that_arrive_during_a_step_run_before_the_next_one() -> None:
    class Flying(ReferenceEngine):
        """Its first wait ends when a request has come."""

        def wait(self) -> None:
            if self.has_work() and not self.batches:
                waiting.set()
                asked.wait(5)

    waiting, asked, delivered = Event(), Event(), []
    engine = Flying()
    worker = EngineWorker(engine, delivered.extend)
    worker.start()
    params = SamplingParams(max_tokens=1)
    add(worker, EngineRequest("1", [1], params, seed=1))
    assert waiting.wait(5)
    added = add(worker, EngineRequest("2", [1], params, seed=1))
    asked.set()
    added.result(5)
    while worker.call(lambda: len(delivered)).result(5) < 2:
        pass
    worker.stop()
    worker.stopped.result(5)
    assert list(engine.batches) == [2]


class Failing(ReferenceEngine):
    """An engine whose first steps fail. As in the real engine, the next step reports the failure."""

    num_failures = 0
    is_launched = False

    def step(self) -> list[StepOutput]:
        if self.num_failures == 0:
            return super().step()
        self.is_launched = not self.is_launched
        if self.is_launched:
            return []
        self.num_failures -= 1
        raise MemoryError("no memory")


def run_to_first_output(engine: Failing, delivered: list[StepOutput]) -> None:
    worker = EngineWorker(engine, delivered.extend)
    worker.start()
    add(worker, EngineRequest("1", [1], SamplingParams(max_tokens=1), seed=1)).result(5)
    while worker.call(lambda: len(delivered)).result(5) < 1:
        pass
    worker.stop()
    worker.stopped.result(5)


def test_failed_step_is_repeated(delivered: list[StepOutput]) -> None:
    engine = Failing()
    engine.num_failures = MAX_FAILED_STEPS
    run_to_first_output(engine, delivered)


def test_steps_that_fail_now_and_then_end_nothing_though_those_between_give_no_output(
    delivered: list[StepOutput],
) -> None:
    class Prefilling(Failing):
        """Computes a part of a prompt, fails, and so on."""

        num_left = 2 * MAX_FAILED_STEPS

        def step(self) -> list[StepOutput]:
            self.num_left -= 1
            if self.num_left <= 0:
                return super().step()
            self.batches.append(0)
            if self.num_left % 2:
                raise MemoryError("no memory")
            return []

    run_to_first_output(Prefilling(), delivered)


def test_an_engine_whose_steps_only_fail_ends_the_worker_and_leaves_a_trail(
    delivered: list[StepOutput], caplog: pytest.LogCaptureFixture
) -> None:
    engine = Failing()
    engine.num_failures = MAX_FAILED_STEPS + 1
    worker = EngineWorker(engine, delivered.extend)
    worker.start()
    add(worker, EngineRequest("1", [1], SamplingParams(max_tokens=1), seed=1))
    with pytest.raises(MemoryError):
        worker.stopped.result(5)
    assert delivered == []
    last = caplog.records[-1]
    assert last.message == "the engine died" and "trail" in vars(last)
