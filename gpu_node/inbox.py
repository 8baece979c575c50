"""From Redis to the engine: take what fits, turn it into tokens, hand it to the engine."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable
from functools import partial

from penstock.contract import wire
from penstock.contract.broker.node import NodeBroker, Room
from penstock.contract.broker.retry import patiently, pauses
from penstock.contract.errors import PenstockError, RequestError, UnavailableError
from penstock.contract.job import Chunk, Outcome, seed_of
from penstock.contract.wire import Request
from penstock.gpu_node.bell import Bell
from penstock.gpu_node.engine.records import ResumedChoice
from penstock.gpu_node.engine.tokenizer import Tokenizer
from penstock.gpu_node.ledger import HeldJob, Ledger
from penstock.gpu_node.worker import EngineWorker

log = logging.getLogger(__name__)

IDLE_TAKE_S = 1.0
"""Doorbells may be lost; the queue is looked at this often all the same."""


class Inbox:
    """Takes jobs for one node. `refuse` ends a job that cannot run."""

    def __init__(
        self,
        broker: NodeBroker,
        ledger: Ledger,
        worker: EngineWorker,
        tokenizer: Tokenizer,
        bell: Bell,
        *,
        kv_tokens: int,
        max_num_seqs: int,
        refuse: Callable[[HeldJob, Outcome], None],
    ) -> None:
        self._broker = broker
        self._ledger = ledger
        self._worker = worker
        self._tokenizer = tokenizer
        self._kv_tokens = kv_tokens
        self._max_num_seqs = max_num_seqs
        self._refuse = refuse
        self._bell = bell
        self._call = 0
        self._nonce = ""
        self.answered_call = 0
        """Last take whose answer has arrived: jobs of later ones are not yet known to us."""

    @property
    def kv_tokens_unclaimed(self) -> int:
        """KV tokens neither used nor still needed by jobs already taken."""
        return max(0, self._kv_tokens - self._ledger.num_claimed_tokens)

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
        slots = max(0, self._max_num_seqs - self._ledger.num_sequences)
        room = self.kv_tokens_unclaimed
        answer = await self._broker.take(
            self._call, self._nonce, Room((room,) * 3, (slots,) * 3, self._kv_tokens, self._max_num_seqs)
        )
        jobs = [HeldJob(taken) for taken in answer.jobs]
        for job in jobs:
            self._ledger.add(job)
        self.answered_call = self._call
        self._bell.depth = sum(answer.depth)
        if jobs:
            await self._admit_all(jobs)
        return min(IDLE_TAKE_S, answer.again_in_ms / 1000) if answer.again_in_ms else IDLE_TAKE_S

    async def _admit_all(self, jobs: list[HeldJob]) -> None:
        """Reads, tokenizes and adds the jobs in the order in which they were taken."""
        requests = await patiently(partial(self._broker.requests, [job.job_id for job in jobs]), math.inf)
        for job, request in zip(jobs, requests, strict=True):
            try:
                await self._admit(job, request)
            except UnavailableError:
                raise
            except PenstockError as error:
                self._refuse_for(job, error)

    async def _admit(self, job: HeldJob, data: bytes | None) -> None:
        if data is None:
            # Cancelled between take and read; finish will be told so.
            self._refuse(job, Outcome("cancelled", "cancelled", "the job was cancelled"))
            return
        request = wire.decode_request(data)
        logged: list[Chunk] = []
        if job.taken.num_chunks:
            logged = await patiently(partial(self._broker.log, job.job_id, job.taken.num_chunks), math.inf)
        token_ids = await asyncio.to_thread(_encode, self._tokenizer, request)
        job.replay(logged, request.params.n)
        job.prepare(request.params, len(token_ids))
        if job.is_complete:
            self._refuse(job, Outcome("done"))
            return
        resume = [ResumedChoice(*job.choice_so_far(i)) for i in range(request.params.n)] if logged else []
        if self._ledger.get(job.job_id) is not job:
            return  # lost while it was being read
        seed = seed_of(job.job_id, request.params)
        added = self._worker.add(job.taken.lease, token_ids, request.params, seed, resume)
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
            self._refuse(job, Outcome("failed", error.code, error.message, error.param or ""))
        else:
            log.error("the engine failed at a job", extra={"job_id": job.job_id}, exc_info=error)
            self._refuse(job, Outcome("failed", "internal_error", "the engine failed at this job"))


def _encode(tokenizer: Tokenizer, request: Request) -> list[int]:
    if request.prompt_token_ids is not None:
        return list(request.prompt_token_ids)
    if request.messages is not None:
        return tokenizer.encode_chat([{"role": m.role, "content": m.content} for m in request.messages])
    return tokenizer.encode(request.prompt or "")
