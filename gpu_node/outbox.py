"""From the engine to Redis: one emit for the whole batch, and one finish per job that ended.

While Redis is away or slow, steps pile up in the ledger, and what piled up leaves as one chunk per choice. So do the
tokens of many streams that come faster than anybody reads; see `pace.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from penstock.contract.broker.node import MAX_EMIT_JOBS, Emission, NodeBroker
from penstock.contract.broker.retry import pauses
from penstock.contract.errors import InvariantError, UnavailableError
from penstock.contract.job import Outcome
from penstock.contract.packing import new_pack
from penstock.gpu_node.bell import Bell
from penstock.gpu_node.engine.records import StepOutput
from penstock.gpu_node.ledger import HeldJob, Ledger
from penstock.gpu_node.pace import Pace
from penstock.gpu_node.worker import EngineWorker

log = logging.getLogger(__name__)

MAX_EMIT_BYTES = 4 << 20
"""Of one emit call, so that a backlog after an outage does not block Redis."""
MAX_FINISHES_AT_ONCE = 16
_OUTCOMES = {
    "CANCEL": Outcome("cancelled", "cancelled", "the job was cancelled"),
    "UNHEARD": Outcome("cancelled", "unread", "nobody reads this job any more"),
    "EXPIRED": Outcome("expired", "deadline_exceeded", "the deadline passed before the job was done"),
}


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
        self._owed, self._begun = asyncio.Event(), asyncio.Event()
        self._dirty: dict[str, HeldJob] = {}
        self._emptied = asyncio.Event()
        self.num_finished_cost = 0
        """Cost of all jobs that ended here, in the backlog's measure."""

    def accept(self, outputs: Sequence[StepOutput]) -> None:
        """Takes in one step of the engine."""
        for output in outputs:
            job = self._ledger.of_lease(output.request_id)
            if job is None or job.outcome is not None:
                continue
            try:
                self._accept(job, output)
            except InvariantError as error:
                log.exception("engine and ledger disagree", extra={"job_id": job.job_id})
                self.end(job, Outcome("failed", error.code, error.message))
            self._owe(job)

    def _owe(self, job: HeldJob) -> None:
        self._dirty[job.taken.lease] = job
        self._owed.set()
        if not job.num_acknowledged:
            self._begun.set()

    def _accept(self, job: HeldJob, output: StepOutput) -> None:
        job.add_tokens(output)
        if output.finish_reason is not None:
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
            self.end(job, _OUTCOMES[answer])

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
            await self._owed.wait()
            only_first = await self._until_due()
            try:
                await self.flush(only_first=only_first)
                patience = pauses()
            except UnavailableError as error:
                self._ledger.counts.outages += 1
                self._pause_engine_if_full()
                log.warning("redis is away", extra={"reason": error.message})
                await asyncio.sleep(next(patience))
            self._pause_engine_if_full()

    async def _until_due(self) -> bool:
        """Returns when something is to leave; whether that is only first tokens."""
        left_s = self._pace.until_all_s(len(self._dirty), time.monotonic())
        if left_s <= 0:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._begun.wait()
                await asyncio.sleep(self._pace.until_first_s(time.monotonic()))
                return True
        return False

    async def flush(self, *, only_first: bool = False) -> None:
        """Sends what is owed now. Raises UnavailableError; what was not acknowledged stays owed."""
        batch = [job for job in self._dirty.values() if not only_first or not job.num_acknowledged]
        self._pace.note(time.monotonic(), all_left=not only_first)
        self._begun.clear()
        for job in batch:
            del self._dirty[job.taken.lease]
        try:
            ending = [job for job in batch if job.outcome is not None]
            await self._emit([job for job in batch if job.outcome is None])
            for start in range(0, len(ending), MAX_FINISHES_AT_ONCE):
                await _all(*(self._finish(job) for job in ending[start : start + MAX_FINISHES_AT_ONCE]))
        except BaseException:
            for job in batch:
                if self._ledger.of_lease(job.taken.lease) is not None:
                    self._dirty.setdefault(job.taken.lease, job)
            raise
        finally:
            if not self._dirty:
                self._owed.clear()

    async def _emit(self, jobs: list[HeldJob]) -> None:
        for part in _parts([(job, job.emission(self._pack)) for job in jobs]):
            began_s = time.monotonic()
            answers = await self._broker.emit([emission for _, emission in part])
            self._ledger.counts.emits.note(time.monotonic() - began_s)
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
                self.end(job, _OUTCOMES[kind])

    async def _finish(self, job: HeldJob) -> None:
        if job.outcome is None:
            raise InvariantError(f"{job.job_id} is finished without an outcome")
        emission = job.emission(self._pack)
        try:
            answer = await self._broker.finish(emission, job.outcome, job.result(), kv_ms=job.kv_ms_used)
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


def outcome_of(job: HeldJob) -> Outcome:
    """How a job ends whose choices have all ended."""
    if job.has_failed_choice:
        said = "the model's output was not finite, or its steps failed where those of others did not"
        return Outcome("failed", "model_error", said)
    return Outcome("done")


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
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
