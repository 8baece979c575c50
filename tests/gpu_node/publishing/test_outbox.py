"""Sending while tokens come: the event loop stays free, no engine waits for ever, no failed call loses a token."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
from fakes.processes.reference_engine import ReferenceEngine
from fakes.waiting import until

from penstock.contract.errors import UnavailableError
from penstock.contract.job import SamplingParams
from penstock.contract.output import PROMPT_TOKENS_PER_CHUNK, Outcome, TokenLogprobs, Usage
from penstock.gpu_node.engine.records import StepOutput
from penstock.gpu_node.engine.worker import EngineWorker
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.jobs.held_jobs import HeldJobs, JobReports
from penstock.gpu_node.publishing import sending
from penstock.gpu_node.publishing.attempts import Attempts
from penstock.gpu_node.publishing.ended_jobs import EndedJobs
from penstock.gpu_node.publishing.outbox import ENDS_PER_PART, Outbox
from penstock.gpu_node.publishing.sending import BUSY_SHARE, Pace
from penstock.gpu_node.taking.taker import Bell
from penstock.queue.broker.node import MAX_EMIT_BYTES, Emission, JobEnd, NodeBroker, Taken
from penstock.queue.wire import decode_chunks

LEASE = "1:x:1"
MAX_UNSENT_BYTES = 1 << 10
PATIENCE_S = 60.0


class ScriptedBroker(NodeBroker):
    """Answers each call that sends chunks as the test sets."""

    def __init__(self) -> None:
        self.num_emitted = self.num_started = 0
        self.is_connected = False
        """Whether quick calls can start."""
        self.fails_quick_calls = False
        self.fails_finish = 0
        self.unanswered: list[Callable[[], None]] = []
        """The answers to quick calls, which the test lets arrive."""
        self.emitted: list[Emission] = []
        self.finished: list[Emission] = []
        self.answers: Iterator[str] = itertools.repeat("OK")
        self.on_emit: Callable[[], None] = lambda: None
        self.may_finish = asyncio.Event()
        self.may_finish.set()

    async def emit(self, emissions: Sequence[Emission]) -> list[str]:
        self.num_emitted += 1
        self.on_emit()
        self.emitted += emissions
        for _ in range(3):  # the answer takes a while
            await asyncio.sleep(0)
        return [next(self.answers) for _ in emissions]

    def start_emit(self, emissions: Sequence[Emission], on_answers: Callable[[list[str] | None], None]) -> bool:
        if not self.is_connected:
            return False
        self.num_started += 1
        if not self.fails_quick_calls:
            self.emitted += emissions
        answers = None if self.fails_quick_calls else [next(self.answers) for _ in emissions]
        self.unanswered.append(lambda: on_answers(answers))
        return True

    async def finish_many(self, ends: Sequence[JobEnd]) -> list[str]:
        if self.fails_finish:
            self.fails_finish -= 1
            raise UnavailableError("no connection")
        self.finished += [end.last for end in ends]
        await self.may_finish.wait()
        return ["OK" for _ in ends]


class CountingPace(Pace):
    """How often the outbox asked when something may leave."""

    num_asked = 0

    def until_next_s(self, num_pending: int, now_s: float, *, reader_waits: bool = False) -> float:
        self.num_asked += 1
        return super().until_next_s(num_pending, now_s, reader_waits=reader_waits)


def step(position: int, text: str = "a") -> list[StepOutput]:
    return [StepOutput(LEASE, 0, position, (position,), text, None)]


class Rig:
    """An outbox that holds one job; its engine's thread never starts."""

    def __init__(self) -> None:
        self.broker, self.pace = ScriptedBroker(), CountingPace(1.0, max_cpu_share=BUSY_SHARE)
        self.worker, held_jobs = EngineWorker(ReferenceEngine(), lambda outputs: None), HeldJobs()
        self.outbox = Outbox(
            self.broker,
            held_jobs,
            self.worker,
            JobReports(),
            Bell().capacity_freed,
            (
                EndedJobs(self.broker, held_jobs.counts, keep_s=30, max_bytes=1 << 20),
                Attempts(self.broker, max_attempts=1),
            ),
            max_unsent_bytes=MAX_UNSENT_BYTES,
            pace=self.pace,
        )
        self.job = HeldJob(Taken("p.1", LEASE, losses=0, num_chunks=0, cost=9, deadline_in_ms=0))
        self.job.open(SamplingParams(max_tokens=100))
        held_jobs.add(self.job)


@pytest.fixture
def slow_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two sends there is time for a test."""
    monkeypatch.setattr(sending, "FEW_INTERVAL_S", 0.5)
    monkeypatch.setattr(sending, "SEND_S", 0.5)


@asynccontextmanager
async def running_rig() -> AsyncIterator[Rig]:
    rig = Rig()
    task = asyncio.create_task(rig.outbox.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield rig
    finally:
        task.cancel()
        await asyncio.wait((task,))


@pytest.mark.usefixtures("slow_pace")
async def test_token_that_arrives_during_a_send_waits_without_polling() -> None:
    async with running_rig() as rig:
        rig.broker.on_emit = lambda: rig.outbox.deliver(step(1)) if rig.broker.num_emitted == 1 else None
        rig.outbox.deliver(step(0))
        await until(lambda: rig.broker.num_emitted >= 2)
        assert rig.job.choice_so_far(0)[0] == (0, 1)
        assert rig.pace.num_asked < 20


@pytest.mark.usefixtures("slow_pace")
async def test_engine_paused_by_the_backlog_of_a_job_resumes_when_that_job_is_lost() -> None:
    def fail() -> None:
        raise UnavailableError("away")

    async with running_rig() as rig:
        rig.broker.on_emit = fail
        rig.outbox.deliver(step(0, "a" * 2 * MAX_UNSENT_BYTES))
        await until(lambda: rig.worker.is_paused)
        await asyncio.sleep(0.1)  # it has waited out its pause, and waits for the next send
        rig.outbox.drop(rig.job)
        await until(lambda: not rig.worker.is_paused)


@pytest.mark.parametrize("has_ended", [False, True], ids=["running", "ended"])
async def test_a_large_backlog_leaves_in_bounded_calls_and_in_order(has_ended: bool) -> None:
    """So much waits after an outage of Redis, or after a long prompt whose log-probabilities are wanted."""
    rig = Rig()
    for position in range(12):
        rig.outbox.deliver(step(position, "a" * (MAX_EMIT_BYTES // 4)))
        rig.outbox._collect()
        rig.job.emission()  # what has accumulated becomes a chunk
    if has_ended:
        rig.outbox.end(rig.job, Outcome("failed", "internal_error", "a test ends it"))
    await rig.outbox.flush()
    sent = rig.broker.emitted + rig.broker.finished
    assert len(rig.broker.finished) == has_ended
    assert len(sent) == 4
    assert all(sum(map(len, emission.chunks)) <= MAX_EMIT_BYTES for emission in sent)
    indices = [emission.index + i for emission in sent for i in range(len(emission.chunks))]
    assert indices == [*range(12)]


async def test_an_ended_job_that_was_lost_in_mid_backlog_is_dropped_without_a_finish_call() -> None:
    rig = Rig()
    for position in range(8):
        rig.outbox.deliver(step(position, "a" * (MAX_EMIT_BYTES // 2)))
        rig.outbox._collect()
        rig.job.emission()
    rig.outbox.end(rig.job, Outcome("failed", "internal_error", "a test ends it"))
    rig.broker.answers = iter(["OK", "FENCED"])
    await rig.outbox.flush()
    assert not rig.broker.finished and rig.outbox._held_jobs.counts.dropped == 1 and not len(rig.outbox._held_jobs)


def connected_rig() -> Rig:
    rig = Rig()
    rig.broker.is_connected = True
    return rig


async def one_round() -> None:
    """Let the callbacks run that are due in the event loop."""
    await asyncio.sleep(0)


async def test_steps_during_a_call_leave_together_after_its_answer() -> None:
    rig = connected_rig()
    rig.outbox.deliver(step(0))
    await one_round()
    for position in (1, 2, 3):
        rig.outbox.deliver(step(position))
        await one_round()
    assert [(e.index, len(e.chunks)) for e in rig.broker.emitted] == [(0, 1)]
    rig.broker.unanswered.pop()()
    await until(lambda: rig.broker.unanswered)
    rig.broker.unanswered.pop()()
    assert [(e.index, len(e.chunks)) for e in rig.broker.emitted] == [(0, 1), (1, 1)]
    assert rig.job.choice_so_far(0)[0] == (0, 1, 2, 3)
    assert rig.job.num_acknowledged == 2


async def test_a_failed_quick_call_is_repeated_by_a_flush_with_the_same_chunks() -> None:
    async with running_rig() as rig:
        rig.broker.is_connected = rig.broker.fails_quick_calls = True
        rig.outbox.deliver(step(0))
        await one_round()
        rig.outbox.deliver(step(1))
        assert rig.broker.num_started == 1 and rig.broker.num_emitted == 0
        rig.broker.unanswered.pop()()
        await until(lambda: rig.job.num_acknowledged >= 2)
        assert [e.index for e in rig.broker.emitted] == [0]
        assert len(rig.broker.emitted[0].chunks) == 2


async def test_without_an_open_connection_tokens_leave_by_a_flush() -> None:
    async with running_rig() as rig:
        rig.outbox.deliver(step(0))
        await until(lambda: rig.job.num_acknowledged)
        assert (rig.broker.num_started, rig.broker.num_emitted) == (0, 1)


@pytest.mark.parametrize("answer", ["FENCED", "GONE"])
async def test_a_quick_call_that_finds_the_job_lost_drops_it(answer: str) -> None:
    rig = connected_rig()
    rig.broker.answers = iter([answer])
    rig.outbox.deliver(step(0))
    await one_round()
    rig.broker.unanswered.pop()()
    assert not len(rig.outbox._held_jobs) and rig.outbox._held_jobs.counts.dropped == 1


async def test_chunks_that_redis_lost_are_sent_again_from_the_one_that_it_names() -> None:
    async with running_rig() as rig:
        rig.broker.is_connected = True
        rig.broker.answers = iter(["OK", "NEED 0", "OK"])
        for position in (0, 1):
            rig.outbox.deliver(step(position))
            await rig.outbox.flush() if position == 0 else await one_round()
            while rig.broker.unanswered:
                rig.broker.unanswered.pop()()
            await asyncio.sleep(0.03)
        while rig.broker.unanswered or rig.job.num_acknowledged < 2:
            while rig.broker.unanswered:
                rig.broker.unanswered.pop()()
            await asyncio.sleep(0.001)
        assert rig.broker.emitted[-1].index == 0 and len(rig.broker.emitted[-1].chunks) == 2
        assert rig.outbox._held_jobs.counts.rewinds == 1


async def test_an_answer_that_ends_the_job_ends_it_in_redis() -> None:
    async with running_rig() as rig:
        rig.broker.is_connected = True
        rig.broker.answers = iter(["CANCEL"])
        rig.outbox.deliver(step(0))
        await one_round()
        rig.broker.unanswered.pop()()
        await until(lambda: rig.broker.finished)
        assert rig.job.outcome is not None and rig.job.outcome.state == "cancelled"


async def test_sends_chunks_and_their_cpu_time_are_counted() -> None:
    rig = connected_rig()
    rig.outbox.deliver(step(0))
    await one_round()
    rig.broker.unanswered.pop()()
    sending = rig.outbox._held_jobs.counts.sending
    assert (sending.sends, sending.chunks) == (1, 1)
    assert 0 < sending.cpu_s < PATIENCE_S


async def test_a_job_that_is_cancelled_while_its_end_is_stored_is_finished_and_counted_once() -> None:
    async with running_rig() as rig:
        held_jobs = rig.outbox._held_jobs
        rig.broker.may_finish.clear()
        rig.outbox.end(rig.job, Outcome("succeeded"))
        await until(lambda: rig.broker.finished)
        rig.outbox.end_as(rig.job.job_id, "CANCEL")
        rig.broker.may_finish.set()
        await until(lambda: not len(held_jobs) and not rig.outbox._is_flushing)
        assert len(rig.broker.finished) == 1
        assert held_jobs.counts.finished == 1


async def test_a_first_token_of_a_chat_waits_for_few_ends_of_background_jobs() -> None:
    async with running_rig() as rig:
        held_jobs = rig.outbox._held_jobs
        rig.broker.may_finish.clear()
        for number in range(100):
            taken = Taken(f"p.b{number}", f"1:x:b{number}", losses=0, num_chunks=0, cost=9, deadline_in_ms=0, level=5)
            job = HeldJob(taken)
            job.open(SamplingParams(max_tokens=1))
            held_jobs.add(job)
            rig.outbox.end(job, Outcome("succeeded"))
        await until(lambda: rig.broker.finished)
        num_before = len(rig.broker.finished)
        rig.outbox.deliver(step(0))
        num_ended_when_sent = list[int]()
        rig.broker.on_emit = lambda: num_ended_when_sent.append(len(rig.broker.finished))
        await asyncio.sleep(0.01)
        rig.broker.may_finish.set()
        await until(lambda: len(held_jobs) <= 1 and not rig.outbox._is_flushing)
        assert len({one.job_id for one in rig.broker.finished}) == len(rig.broker.finished) == 100
        assert num_ended_when_sent == [num_before]
        assert num_before <= ENDS_PER_PART


async def test_ends_of_background_jobs_that_fail_to_leave_are_sent_again() -> None:
    async with running_rig() as rig:
        held_jobs = rig.outbox._held_jobs
        rig.broker.fails_finish = 1
        for number in range(40):
            taken = Taken(f"p.b{number}", f"1:x:b{number}", losses=0, num_chunks=0, cost=9, deadline_in_ms=0, level=5)
            job = HeldJob(taken)
            job.open(SamplingParams(max_tokens=1))
            held_jobs.add(job)
            rig.outbox.end(job, Outcome("succeeded"))
        await until(lambda: len(held_jobs) <= 1)
        assert held_jobs.counts.outages == 1
        assert held_jobs.counts.finished == 40


async def test_a_last_chunk_that_a_backlog_fills_has_the_same_usage_as_the_result() -> None:
    rig, usage = Rig(), Usage(50, PROMPT_TOKENS_PER_CHUNK, 32)
    rig.job.num_prompt_tokens = 50
    logprobs = (TokenLogprobs((5,), (-1.0,), (b"a",)),)
    for position in range(PROMPT_TOKENS_PER_CHUNK):
        is_last = position == PROMPT_TOKENS_PER_CHUNK - 1
        output = StepOutput(LEASE, 0, position, (5,), "a", "length" if is_last else None, logprobs=logprobs)
        output.usage = usage if is_last else None
        rig.outbox.deliver([output])
    await rig.outbox.flush()
    (last,) = rig.broker.finished
    (chunk,) = [chunk for data in last.chunks for chunk in decode_chunks(data)]
    assert chunk.usage == usage
