"""From Redis to the engine: take what fits, turn it into tokens, hand it to the engine."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from functools import partial

from penstock.contract import crash, wire
from penstock.contract.broker.node import NodeBroker, Room, TakeAnswer
from penstock.contract.broker.retry import patiently, pauses
from penstock.contract.errors import PenstockError, RequestError, UnavailableError
from penstock.contract.job import Chunk, Outcome, seed_of
from penstock.contract.wire import Request
from penstock.gpu_node.bell import Bell
from penstock.gpu_node.engine.records import ResumedChoice
from penstock.gpu_node.engine.tokenizer import Tokenizer
from penstock.gpu_node.ledger import HeldJob, Ledger
from penstock.gpu_node.outbox import Outbox, outcome_of
from penstock.gpu_node.relief import Relief
from penstock.gpu_node.worker import EngineWorker

log = logging.getLogger(__name__)

MAX_TAKEN_AT_ONCE = 128
"""Of take.lua: after a call that reached it there may be more."""
MAX_CHARS_ON_LOOP = 2048
"""A longer prompt is tokenized on a thread: what takes above half a millisecond would hold up the tokens of others."""
IDLE_TAKE_S = 1.0
"""Doorbells may be lost; the queue is looked at this often all the same."""


class Inbox:
    """Takes jobs for one node; those that cannot run go straight to the outbox, or to a node where they might."""

    def __init__(
        self,
        broker: NodeBroker,
        ledger: Ledger,
        worker: EngineWorker,
        tokenizer: Tokenizer,
        bell: Bell,
        outbox: Outbox,
        relief: Relief,
        *,
        room: tuple[int, int],
    ) -> None:
        """`room`: KV tokens and sequences of the whole node."""
        self._broker = broker
        self._ledger = ledger
        self._worker = worker
        self._tokenizer = tokenizer
        self._kv_tokens, self._max_num_seqs = room
        self._outbox = outbox
        self._relief = relief
        self._bell = bell
        self._call = 0
        self._nonce = ""
        self.num_tokenizer_failures = 0
        """Prompts at which the tokenizer failed, other than by refusing them."""
        self.answered_call = 0
        """Last take whose answer has arrived: jobs of later ones are not yet known to us."""

    @property
    def kv_tokens_unclaimed(self) -> int:
        """KV tokens neither used nor still needed by jobs already taken."""
        return self._room().kv_tokens[-1]

    @property
    def hears_doorbell(self) -> bool:
        """Whether the queue can ring."""
        return self._bell.is_heard

    @property
    def has_backlog(self) -> bool:
        """Whether jobs waited when the queue was last seen."""
        return self._bell.depth > 0

    async def run(self) -> None:
        """Takes until cancelled. Raises SweptError when the pool believes this node dead."""
        patience = pauses()
        wait_s = 0.0
        while True:
            await self._bell.wait(wait_s)
            try:
                wait_s = await self._take()
                patience = pauses()
            except UnavailableError as error:
                log.warning("redis is away", extra={"reason": error.message})
                wait_s = next(patience)

    async def _take(self) -> float:
        """One call; the same call again until its answer has arrived. Answers how long to sleep."""
        if self._call == self.answered_call:
            self._call += 1
            self._nonce = secrets.token_hex(16)
        answer = await self._broker.take(self._call, self._nonce, self._room(), hold_ms=self._ledger.hold_ms)
        jobs = self._hold(answer)
        self._bell.depth = sum(answer.depth)
        if jobs:
            crash.point("before", "admission")
            await self._admit_all(jobs)
            crash.point("after", "admission")
        if len(jobs) == MAX_TAKEN_AT_ONCE:
            return 0.0
        return min(IDLE_TAKE_S, answer.again_in_ms / 1000) if answer.again_in_ms else IDLE_TAKE_S

    def _room(self) -> Room:
        """What each class could have: less urgent jobs would give way to it."""
        tokens, sequences = self._ledger.claims()
        return Room(
            *(_left_of(self._kv_tokens, tokens), _left_of(self._max_num_seqs, sequences)),
            *(self._kv_tokens, self._max_num_seqs),
        )

    async def close(self) -> None:
        """Learns what a call that was cut short had taken, so that it can be given back."""
        if self._call != self.answered_call:
            nothing = Room((0,) * 3, (0,) * 3, self._kv_tokens, self._max_num_seqs)
            self._hold(await self._broker.take(self._call, self._nonce, nothing))

    def _hold(self, answer: TakeAnswer) -> list[HeldJob]:
        jobs, now_s = [HeldJob(taken) for taken in answer.jobs], time.monotonic()
        for job in jobs:
            if job.taken.deadline_in_ms:
                job.expires_s = now_s + job.taken.deadline_in_ms / 1000
            if (older := self._ledger.get(job.job_id)) is not None:
                self._outbox.drop(older)
            self._ledger.add(job)
        counts = self._ledger.counts
        counts.taken += len(jobs)
        counts.taken_over += sum(bool(job.taken.num_chunks or job.taken.losses) for job in jobs)
        self.answered_call = self._call
        return jobs

    async def _admit_all(self, jobs: list[HeldJob]) -> None:
        """Reads, tokenizes and adds the jobs in the order in which they were taken."""
        apart = [job.job_id for job in jobs if not job.taken.request]
        read = await patiently(partial(self._broker.requests, apart), math.inf) if apart else []
        data = dict(zip(apart, read, strict=True))
        opened = [(job, await self._open(job, job.taken.request or data[job.job_id])) for job in jobs]
        asked = [(job, request) for job, request in opened if request is not None]
        encoded = await asyncio.gather(*(self._encode(request) for _, request in asked), return_exceptions=True)
        for (job, request), token_ids in zip(asked, encoded, strict=True):
            if not isinstance(token_ids, BaseException):
                self._start(job, request, token_ids)
            elif not _is_for_want_of_adapter(token_ids):
                self.num_tokenizer_failures += not isinstance(token_ids, PenstockError)
                self._refuse_for(job, token_ids)  # whatever the tokenizer's library raises concerns this job alone
        errors = {job: said for (job, _), said in zip(asked, encoded, strict=True) if isinstance(said, BaseException)}
        await self._hand_on({job: error for job, error in errors.items() if _is_for_want_of_adapter(error)})

    async def _hand_on(self, lacking: dict[HeldJob, BaseException]) -> None:
        """Another node may have the adapters that these jobs found missing or broken; without one they end here."""
        jobs = [job for job in lacking if self._ledger.get(job.job_id) is job]
        for job in await patiently(partial(self._relief.give_back, jobs, "lacking"), math.inf) if jobs else ():
            self._refuse_for(job, lacking[job])

    async def _open(self, job: HeldJob, data: bytes | None) -> Request | None:
        """A job's request, once what an earlier node logged is read; None when the job ends here."""
        if data is None:
            # Cancelled between take and read; finish will be told so.
            self._outbox.end(job, Outcome("cancelled", "cancelled", "the job was cancelled"))
            return None
        try:
            request = wire.decode_request(data)
            logged: list[Chunk] = []
            if job.taken.num_chunks:
                logged = await patiently(partial(self._broker.log, job.job_id, job.taken.num_chunks), math.inf)
            job.open(request.params, logged)
        except Exception as error:
            self._refuse_for(job, error)
            return None
        return request

    async def _encode(self, request: Request) -> list[int]:
        """A request's tokens, once all else is prepared; what takes long is done side by side, on threads."""
        if request.params.structured_outputs is not None or request.adapter is not None:
            await asyncio.to_thread(self._worker.prepare, request.params, request.adapter)
        if _num_chars(request) <= MAX_CHARS_ON_LOOP:
            return _encode(self._tokenizer, request)
        return await asyncio.to_thread(_encode, self._tokenizer, request)

    def _start(self, job: HeldJob, request: Request, token_ids: list[int]) -> None:
        self._ledger.open(job, len(token_ids))
        if job.is_complete:
            self._outbox.end(job, outcome_of(job))
            return
        if self._ledger.get(job.job_id) is not job or job.outcome is not None:
            return  # lost or cancelled while it was being read
        params, taken = request.params, job.taken
        resume = [ResumedChoice(*job.choice_so_far(i)) for i in range(params.n)] if taken.num_chunks else []
        job.is_in_engine = True
        added = self._worker.add(
            *(taken.lease, token_ids, params, seed_of(job.job_id, params), resume),
            priority=taken.urgency,
            tenant=taken.tenant,
            weight=taken.weight,
            adapter=request.adapter,
        )
        # Not awaited: the engine answers between two steps, and the next job need not wait for that.
        asyncio.wrap_future(added).add_done_callback(partial(self._heed_answer, job))

    def _heed_answer(self, job: HeldJob, answer: asyncio.Future[None]) -> None:
        if answer.cancelled() or (error := answer.exception()) is None:
            return
        self._refuse_for(job, error)

    def _refuse_for(self, job: HeldJob, error: BaseException) -> None:
        if isinstance(error, PenstockError):
            if not isinstance(error, RequestError):
                log.error("job cannot be run", extra={"job_id": job.job_id}, exc_info=error)
            self._outbox.end(job, Outcome("failed", error.code, error.message, error.param or ""))
        else:
            log.error("the engine failed at a job", extra={"job_id": job.job_id}, exc_info=error)
            self._outbox.end(job, Outcome("failed", "internal_error", "the engine failed at this job"))


def _is_for_want_of_adapter(error: BaseException) -> bool:
    """Whether it concerns an adapter that is not here, another one by now, or cannot be read."""
    return isinstance(error, PenstockError) and error.param == "adapter"


def _left_of(whole: int, claims: tuple[int, int, int]) -> tuple[int, int, int]:
    first, second, third = (max(0, whole - claimed) for claimed in claims)
    return first, second, third


def _num_chars(request: Request) -> int:
    """Of text that is to be tokenized."""
    turns = sum(len(message.content) for message in request.messages or ())
    return len(request.prompt or "") + turns + len(request.tools or "")


def _encode(tokenizer: Tokenizer, request: Request) -> list[int]:
    if request.prompt_token_ids is not None:
        return list(request.prompt_token_ids)
    if request.messages is not None:
        return tokenizer.encode_chat([m.model_dump(exclude_defaults=True) for m in request.messages], request.tools)
    return tokenizer.encode(request.prompt or "")
