"""From the engine to Redis: one emit for the whole batch, and one finish per job that ended.

While Redis is away or slow, steps pile up in the ledger, and what piled up leaves as one chunk per choice. So do tokens
that come faster than anybody reads (`pace.py`): until they leave, the engine's steps wake nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from penstock.contract.errors import InvariantError, UnavailableError
from penstock.contract.job import Outcome
from penstock.gpu_node.alarm import Alarm
from penstock.gpu_node.doorbell import Bell
from penstock.gpu_node.engine.records import StepOutput
from penstock.gpu_node.engine_worker import EngineWorker
from penstock.gpu_node.ledger import HeldJob, Ledger
from penstock.gpu_node.outcomes import BY_ANSWER, outcome_of
from penstock.gpu_node.publish_pace import Pace
from penstock.queue.broker.node import MAX_EMIT_JOBS, Emission, NodeBroker
from penstock.queue.broker.retry import pauses
from penstock.queue.msgpack_codec import new_pack
from penstock.runtime.cooperative import CooperativeTurns

log = logging.getLogger(__name__)

MAX_EMIT_BYTES = 4 << 20
"""Of one emit call, so that a backlog after an outage does not block Redis."""
MAX_CALLS_AT_ONCE = 16


class Outbox:
    """Sends what the ledger owes, and rings the bell when a job has left room for others."""

    def __init__(
        self, broker: NodeBroker, ledger: Ledger, worker: EngineWorker, bell: Bell, *, max_unsent_bytes: int, pace: Pace
    ) -> None:
        self._broker = broker
        self._ledger = ledger
        self._worker = worker
        self.max_unsent_bytes = max_unsent_bytes
        self._pace = pace
        self._bell = bell
        self._pack = new_pack()
        self._turns = CooperativeTurns()
        self._loop = asyncio.get_running_loop()
        self._delivered: deque[Sequence[StepOutput]] = deque()
        self._naps = False
        """Whether what was delivered may wait for the alarm."""
        self._alarm = Alarm()
        self._dirty: dict[str, HeldJob] = {}
        self._is_hurried = False
        """Whether somebody waits for what is owed: a first token, or an end."""
        self._emptied = asyncio.Event()
        self.num_finished_cost = 0
        """Cost of all jobs that ended here, in the backlog's measure."""

    def deliver(self, outputs: Sequence[StepOutput]) -> None:
        """Takes in one step, on the engine's thread. Raises RuntimeError when the loop is closed."""
        self._delivered.append(outputs)
        if not self._naps or any(map(_is_urgent, outputs)):
            self._loop.call_soon_threadsafe(self._heed_steps)

    def _heed_steps(self) -> None:
        self._collect()
        if self._dirty:
            self._set_alarm()

    def _collect(self) -> None:
        while self._delivered:
            self._accept_step(self._delivered.popleft())

    def _accept_step(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            job = self._ledger.of_lease(output.request_id)
            if job is None or job.outcome is not None:
                continue
            try:
                self._accept(job, output)
            except InvariantError as error:
                log.exception("engine and ledger disagree", extra={"job_id": job.job_id})
                self.end(job, Outcome("failed", error.code, error.message))
            self._note(job)

    def _note(self, job: HeldJob) -> None:
        self._dirty[job.taken.lease] = job
        self._is_hurried = self._is_hurried or _is_waited_for(job)

    def _owe(self, job: HeldJob) -> None:
        self._note(job)
        self._set_alarm()

    def _set_alarm(self) -> None:
        """For when the next of what is owed, or will be, leaves."""
        self._alarm.set(self._pace.until_next_s(len(self._dirty), self._loop.time(), hurried=self._is_hurried))
        self._naps = True

    def _accept(self, job: HeldJob, output: StepOutput) -> None:
        job.add_tokens(output)
        if output.finish_reason is None:
            return
        job.kv_ms += output.kv_ms
        if output.usage is not None:
            job.usage = output.usage
        if job.is_complete:
            job.outcome = outcome_of(job)
            self._ledger.learn(job)
            self._bell.room_grew()

    def end(self, job: HeldJob, outcome: Outcome) -> None:
        """Ends a job before its time, with what it has; nothing happens when it is no longer held."""
        if self._ledger.of_lease(job.taken.lease) is None:
            return
        if job.outcome is None:
            job.outcome = outcome
            self._worker.abort(job.taken.lease)
            self._bell.room_grew()
        self._owe(job)

    def end_as(self, job_id: str, answer: str) -> None:
        """Ends a job for what Redis says of it: CANCEL, EXPIRED or UNHEARD."""
        job = self._ledger.get(job_id)
        if job is not None:
            self.end(job, BY_ANSWER[answer])

    def forget(self, job: HeldJob) -> None:
        """Lets go of a job, wherever it was."""
        self._remove(job)
        self._dirty.pop(job.taken.lease, None)
        self._worker.abort(job.taken.lease)
        self._bell.room_grew()

    def drop(self, job: HeldJob) -> None:
        """Lets go of a job that turned out not to be ours any more."""
        self.forget(job)
        self._ledger.counts.dropped += 1
        log.warning("job is no longer ours", extra={"job_id": job.job_id, "lease": job.taken.lease})

    async def until_empty(self) -> None:
        """Until no job is held any more."""
        while len(self._ledger):
            self._emptied.clear()
            await self._emptied.wait()

    async def run(self) -> None:
        """Sends until cancelled; waits out absences of Redis."""
        patience = pauses()
        while True:
            await self._alarm.wait()
            self._naps = False
            self._collect()
            if not self._dirty:
                # The streams of the last departure have ended or wait for the engine, or what it was held for is lost.
                self._pause_engine_if_full()
                continue
            only_hurried = self._pace.until_next_s(len(self._dirty), self._loop.time()) > 0
            try:
                await self.flush(only_hurried=only_hurried)
                patience = pauses()
            except UnavailableError as error:
                self._ledger.counts.outages += 1
                self._pause_engine_if_full()
                log.warning("redis is away", extra={"reason": error.message})
                await asyncio.sleep(next(patience))
            self._pause_engine_if_full()
            self._set_alarm()

    async def flush(self, *, only_hurried: bool = False) -> None:
        """Sends what is owed now. Raises UnavailableError; what was not acknowledged stays owed."""
        self._collect()
        batch = [job for job in self._dirty.values() if not only_hurried or _is_waited_for(job)]
        # Also where nothing leaves: what was waited for when it was noted may have been on its way, or given up since.
        self._is_hurried = False
        if not batch:
            return
        self._pace.note(self._loop.time(), num_streams=None if only_hurried else len(batch))
        for job in batch:
            del self._dirty[job.taken.lease]
        try:
            calls = [partial(self._finish, job) for job in batch if job.outcome is not None]
            going = [job for job in batch if job.outcome is None]
            if at_once := [job for job in going if not job.has_unsealed_prompt]:
                calls.append(partial(self._emit, at_once))
            calls += [partial(self._emit, [job]) for job in going if job.has_unsealed_prompt]
            for start in range(0, len(calls), MAX_CALLS_AT_ONCE):
                await _all(*(call() for call in calls[start : start + MAX_CALLS_AT_ONCE]))
        except BaseException:
            for job in batch:
                if self._ledger.of_lease(job.taken.lease) is not None:
                    self._dirty.setdefault(job.taken.lease, job)
            raise

    async def _seal(self, job: HeldJob) -> None:
        """Packs a prompt's log-probabilities, and leaves the event loop to others behind each part."""
        while job.has_unsealed_prompt:
            job.seal_part(self._pack)
            await self._turns.wait()

    async def _emit(self, jobs: list[HeldJob]) -> None:
        for job in jobs:
            await self._seal(job)
        for part in _parts([(job, job.emission(self._pack)) for job in jobs]):
            began_s = self._loop.time()
            answers = await self._broker.emit([emission for _, emission in part])
            self._ledger.counts.emits.note(self._loop.time() - began_s)
            for (job, emission), answer in zip(part, answers, strict=True):
                self._heed(job, emission, answer)

    def _heed(self, job: HeldJob, emission: Emission, answer: str) -> None:
        kind, _, rest = answer.partition(" ")
        if kind in ("FENCED", "GONE"):
            self.drop(job)
        elif kind == "NEED":
            self._send_again(job, int(rest))
        elif kind == "ERR":
            log.error("emit failed", extra={"job_id": job.job_id, "reason": rest})
            job.acknowledge(emission)
            self.end(job, Outcome("failed", "internal_error", "the queue could not store this job's tokens"))
        else:
            job.acknowledge(emission)
            if kind != "OK":
                self.end(job, BY_ANSWER[kind])

    async def _finish(self, job: HeldJob) -> None:
        if job.outcome is None:
            raise InvariantError(f"{job.job_id} is finished without an outcome")
        await self._seal(job)
        emission = job.emission(self._pack)
        try:
            answer = await self._broker.finish(emission, job.outcome, job.result(), **job.used)
        except InvariantError as error:
            # This job's keys are damaged; the others' are not.
            log.error("finish failed", extra={"job_id": job.job_id, "reason": error.message})
            answer = "GONE"
        kind, _, rest = answer.partition(" ")
        if kind == "NEED":
            self._send_again(job, int(rest))
        elif kind == "OK":
            self.num_finished_cost += job.taken.cost
            self._ledger.counts.finished += 1
            self._remove(job)
        else:
            self.drop(job)

    def _send_again(self, job: HeldJob, index: int) -> None:
        self._ledger.counts.rewinds += 1
        job.send_again_from(index)
        self._owe(job)

    def _remove(self, job: HeldJob) -> None:
        self._ledger.remove(job)
        if not len(self._ledger):
            self._emptied.set()
            self._bell.room_grew()  # a suspect may wait for a node that holds nothing

    def _pause_engine_if_full(self) -> None:
        self._worker.set_paused(self._ledger.unsent_bytes > self.max_unsent_bytes)


def _is_urgent(output: StepOutput) -> bool:
    """Whether somebody waits for what this tells."""
    return output.position == 0 or output.finish_reason is not None


def _is_waited_for(job: HeldJob) -> bool:
    """Whether a first token of it is owed, or its end."""
    return not job.num_acknowledged or job.outcome is not None


def _parts(pairs: list[tuple[HeldJob, Emission]]) -> list[list[tuple[HeldJob, Emission]]]:
    """Splits by number of jobs and by bytes."""
    parts: list[list[tuple[HeldJob, Emission]]] = []
    num_bytes = 0
    for pair in pairs:
        size = sum(map(len, pair[1].chunks))
        if not parts or len(parts[-1]) >= MAX_EMIT_JOBS or num_bytes + size > MAX_EMIT_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(pair)
        num_bytes += size
    return parts


async def _all(*calls: Coroutine[Any, Any, None]) -> None:
    """Awaits all, then raises the first error: one job's failed call must not cancel another's."""
    if len(calls) == 1:
        return await calls[0]  # mostly, and a task would cost a first token a twentieth of a millisecond
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
    return None
