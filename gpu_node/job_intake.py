"""From a job that was taken to a request in the engine: read it, turn it into tokens, hand it over."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from functools import partial
from weakref import WeakValueDictionary

from penstock.contract.errors import PenstockError, RequestError
from penstock.contract.job import Chunk, Outcome, seed_of
from penstock.gpu_node.engine.records import EngineRequest, ResumedChoice
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.engine_worker import EngineWorker
from penstock.gpu_node.ledger import HeldJob, Ledger
from penstock.gpu_node.load_shedder import LoadShedder
from penstock.gpu_node.outbox import Outbox
from penstock.gpu_node.outcomes import outcome_of
from penstock.gpu_node.packed_chunks import SealedChunk, seal
from penstock.gpu_node.threads import Threads
from penstock.queue import wire
from penstock.queue.broker.node import NodeBroker
from penstock.queue.broker.retry import patiently
from penstock.queue.wire import Request
from penstock.runtime import crash_points
from penstock.runtime.cancellation import cancel_until_done
from penstock.runtime.cooperative import CooperativeTurns

log = logging.getLogger(__name__)

MAX_BYTES_ON_LOOP = 1 << 15
"""A longer request is read on a thread."""
MAX_CHARS_ON_LOOP = 2048
"""A longer prompt is tokenized on a thread: what takes above half a millisecond would hold up the tokens of others."""
MAX_TRIALS_AWAITED = 64
MAX_TRIALS_OF_TENANT = 4


class JobIntake:
    """Receives each job by itself, so that none waits for another's grammar, adapter or long prompt.

    Jobs without these get into the engine in the order in which they were taken. What cannot run goes straight to the
    outbox, or to a node where it might.
    """

    def __init__(
        self,
        broker: NodeBroker,
        ledger: Ledger,
        worker: EngineWorker,
        tokenizer: Tokenizer,
        outbox: Outbox,
        relief: LoadShedder,
        threads: Threads,
    ) -> None:
        self._broker = broker
        self._ledger = ledger
        self._worker = worker
        self._tokenizer = tokenizer
        self._outbox = outbox
        self._relief = relief
        self._threads = threads
        self._turns = CooperativeTurns()
        self._trying = Threads(MAX_TRIALS_AWAITED)
        """Those that wait for a grammar's trial, so that none of them keeps a long prompt waiting."""
        self._trials_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By tenant: so that one tenant's grammars keep no other tenant's waiting."""
        self._receiving: set[asyncio.Task[None]] = set()
        self.num_tokenizer_failures = 0
        """Prompts at which the tokenizer failed, other than by refusing them."""

    def admit(self, job: HeldJob) -> None:
        """Receives a job that the ledger has just begun to hold."""
        task = asyncio.create_task(self._receive(job), name=f"penstock reception {job.job_id}")
        self._receiving.add(task)
        task.add_done_callback(partial(self._received, job))

    async def close(self) -> None:
        """Leaves the jobs that are not in the engine yet to whoever gives them back."""
        await cancel_until_done(self._receiving)

    def _received(self, job: HeldJob, task: asyncio.Task[None]) -> None:
        self._receiving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._refuse_for(job, error)  # or it would be held by nobody's doing for ever

    async def _receive(self, job: HeldJob) -> None:
        crash_points.point("before", "admission")
        try:
            request = await self._open(job)
            if request is None:
                # Between take and read; finish will be told so.
                self._outbox.end(job, Outcome("cancelled", "cancelled", "the job was cancelled"))
                return
            prepared = await self._prepare(request, job.taken.tenant)
            token_ids = await self._encode(request)
        except Exception as error:
            # Whatever a library raises concerns this job alone.
            await self._turn_away(job, error)
        else:
            self._start(job, request, token_ids, prepared)
        crash_points.point("after", "admission")

    async def _turn_away(self, job: HeldJob, error: Exception) -> None:
        if self._ledger.get(job.job_id) is not job:
            return
        if isinstance(error, PenstockError) and error.param == "adapter":
            # It is not here, another one by now, or cannot be read: another node may have it.
            if await patiently(lambda: self._relief.give_back([job], "lacking"), math.inf):
                self._refuse_for(job, error)
            return
        self._refuse_for(job, error)

    async def _open(self, job: HeldJob) -> Request | None:
        """A job's request, once what an earlier node logged is read; None when it was cancelled."""
        data: bytes | None = job.taken.request
        if not data:
            (data,) = await patiently(lambda: self._broker.requests([job.job_id]), math.inf)
        if data is None:
            return None
        if len(data) <= MAX_BYTES_ON_LOOP:
            request = wire.decode_request(data)
        else:
            request = await self._threads.run(partial(wire.decode_request, data))
        logged: list[Chunk] = []
        if job.taken.num_chunks:
            logged = await patiently(lambda: self._broker.log(job.job_id, job.taken.num_chunks), math.inf)
        job.open(request.params, logged, await self._sealed(logged))
        return request

    async def _sealed(self, logged: Sequence[Chunk]) -> list[SealedChunk]:
        """Chunks packed again. Log-probabilities take long: behind each such chunk the event loop is left to others."""
        sealed = list[SealedChunk]()
        for chunk in logged:
            sealed.append(seal(chunk))
            if chunk.logprobs or chunk.prompt_logprobs:
                await self._turns.wait()
        return sealed

    async def _prepare(self, request: Request, tenant: str) -> object:
        """What the engine needs of a request besides its tokens, as long as the answer is kept."""
        if request.params.structured_outputs is None and request.adapter is None:
            return None
        prepare = partial(self._worker.prepare, request.params, request.adapter, tenant)
        if request.params.structured_outputs is None:
            return await self._threads.run(prepare)
        async with self._trials_of.setdefault(tenant, asyncio.Semaphore(MAX_TRIALS_OF_TENANT)):
            return await self._trying.run(prepare)

    async def _encode(self, request: Request) -> list[int]:
        """A request's tokens; what takes long is done on threads."""
        try:
            if _num_chars(request) <= MAX_CHARS_ON_LOOP:
                return _encode(self._tokenizer, request)
            return await self._threads.run(partial(_encode, self._tokenizer, request))
        except Exception as error:
            self.num_tokenizer_failures += not isinstance(error, PenstockError)
            raise

    def _start(self, job: HeldJob, request: Request, token_ids: list[int], prepared: object) -> None:
        self._ledger.open(job, len(token_ids))
        if job.is_complete:
            self._outbox.end(job, outcome_of(job))
            return
        if self._ledger.get(job.job_id) is not job or job.outcome is not None:
            return  # lost or cancelled while it was being read
        params, taken = request.params, job.taken
        job.is_in_engine = True
        added = self._worker.add(
            EngineRequest(
                *(taken.lease, token_ids, params),
                seed=seed_of(job.job_id, params),
                resume=[ResumedChoice(*job.choice_so_far(i)) for i in range(params.n)] if taken.num_chunks else (),
                priority=taken.urgency,
                tenant=taken.tenant,
                weight=taken.weight,
                adapter=request.adapter,
            )
        )
        # Not awaited: the engine answers between two steps, and the next job need not wait for that.
        asyncio.wrap_future(added).add_done_callback(partial(self._heed_answer, job, prepared))

    def _heed_answer(self, job: HeldJob, prepared: object, answer: asyncio.Future[None]) -> None:
        """`prepared` is kept until here."""
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


def _num_chars(request: Request) -> int:
    """Of text that is to be tokenized."""
    messages = request.messages or ()
    turns = sum(len(message.content) for message in messages)
    calls = sum(len(call.arguments) for message in messages for call in message.tool_calls)
    return len(request.prompt or "") + turns + calls + len(request.tools or "")


def _encode(tokenizer: Tokenizer, request: Request) -> list[int]:
    if request.prompt_token_ids is not None:
        return list(request.prompt_token_ids)
    if request.messages is not None:
        return tokenizer.encode_chat([m.model_dump(exclude_defaults=True) for m in request.messages], request.tools)
    return tokenizer.encode(request.prompt or "")
