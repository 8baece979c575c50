"""Prepares taken jobs: decodes and tokenizes them, gets their grammars and adapters, and adds them to the engine."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from penstock.contract.calls.opening import CallOpening, names_in
from penstock.contract.errors import InvariantError, PenstockError, RequestError, TooLargeError, UnsupportedKindError
from penstock.contract.job import Message, created_at, lowered_max_tokens, seed_of
from penstock.contract.output import Chunk, Outcome, TokenLogprobs
from penstock.contract.tasks import (
    DECODER_KINDS,
    MAX_OUTPUT_BYTES,
    MAX_TASK_TOKENS,
    QUERY,
    Classify,
    Detokenize,
    Embed,
    Score,
    TextTask,
    Tokenize,
)
from penstock.contract.tools import CONTINUES, GENERATION_PROMPT
from penstock.gpu_node.engine.pair_scores import PairScores
from penstock.gpu_node.engine.records import EngineRequest, Prepared, ResumedChoice
from penstock.gpu_node.engine.served_model import truncated
from penstock.gpu_node.engine.text.chat import MAX_RENDERS_AT_ONCE
from penstock.gpu_node.engine.text.encoder import MAX_SMALL_WHOLE_CHARS, TokenizerFailedError, spans_of
from penstock.gpu_node.engine.text.reasoning import ReasoningRule
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.engine.texts import PackedTexts, TextEncoding
from penstock.gpu_node.engine.worker import EngineWorker
from penstock.gpu_node.jobs.held_job import HeldJob, SealedChunk, seal
from penstock.gpu_node.jobs.held_jobs import HeldJobs, JobReports
from penstock.gpu_node.publishing.outbox import Outbox
from penstock.gpu_node.taking.load_shedder import LoadShedder
from penstock.queue import wire
from penstock.queue.broker.connection import with_retries
from penstock.queue.broker.node import NodeBroker
from penstock.queue.results import encode_detokenized, encode_tokenized
from penstock.queue.wire import Request
from penstock.runtime import crash_points
from penstock.runtime.event_loop import LoopYielder, Threads, cancel_until_done

log = logging.getLogger(__package__)


IDS_PER_PART = 4096
"""Tokens whose spellings are in memory as texts at once."""


def run_task(tokenizer: Tokenizer, request: Request, tenant: str, max_model_len: int, now: datetime) -> bytes:
    """Return the packed output of a task that the tokenizer answers alone: tokenization, or the text of tokens.

    Raises RequestError if the request or its output is too large. `now`: the time that a chat template may print.
    """
    task = request.task
    if isinstance(task, Detokenize):
        output = encode_detokenized(tokenizer.text_of(request.prompt_token_ids or ()))
    elif isinstance(task, Tokenize):
        output = _tokenized(tokenizer, request, task, tenant, max_model_len, now)
    else:
        raise InvariantError("the request has no task for a tokenizer")
    if len(output) > MAX_OUTPUT_BYTES:
        message = f"the output has {len(output)} bytes; the limit is {MAX_OUTPUT_BYTES}"
        raise TooLargeError(message, code="output_too_large", param="prompt")
    return output


def _tokenized(
    tokenizer: Tokenizer, request: Request, task: Tokenize, tenant: str, max_model_len: int, now: datetime
) -> bytes:
    spans: list[tuple[int, int] | None] | None = None
    if request.messages is not None:
        variables = request.chat_template_kwargs
        if not task.add_generation_prompt:
            variables = json.dumps({**json.loads(variables or "{}"), GENERATION_PROMPT: False})
        token_ids = tokenizer.encode_chat(
            [message.model_dump(exclude_defaults=True) for message in request.messages],
            request.tools,
            variables,
            framed=bool(task.add_special_tokens),
            now=now,
            owner=(tenant, None),
        )
    else:
        token_ids = tokenizer.encode(request.prompt or "", framed=task.add_special_tokens is not False)
        if task.return_spans:
            spans = spans_of(tokenizer.backend, request.prompt or "", framed=task.add_special_tokens is not False)
    if len(token_ids) > MAX_TASK_TOKENS:
        message = f"prompt has {len(token_ids)} tokens; the limit of this task is {MAX_TASK_TOKENS}"
        raise RequestError(message, param="prompt")
    starts = range(0, len(token_ids), IDS_PER_PART)
    strs = (one for at in starts for one in tokenizer.names_of(token_ids[at : at + IDS_PER_PART]))
    return encode_tokenized(
        len(token_ids),
        max_model_len,
        token_ids if task.return_tokens else None,
        strs if task.return_token_strs else None,
        spans,
    )


T = TypeVar("T")

MAX_BYTES_ON_LOOP = 1 << 15
"""A longer request is decoded on a thread."""
MAX_CHARS_ON_LOOP = 2048
"""A longer prompt is tokenized on a thread. Above half a millisecond it would delay the tokens of other jobs."""
CHARS_AROUND_MESSAGE = 32
"""The characters whose tokenization takes as long as a message or a call without text."""
MAX_TASKS_AT_ONCE = 2
"""Long tasks that are tokenized at once, on threads of their own: a flood of tasks then delays no job's prompt."""
MAX_TASKS_OF_TENANT = 1
"""The same for the long tasks of one tenant, so that its flood leaves a thread to other tenants."""
MAX_LONG_PROMPTS_OF_TENANT = 2
"""Prompts above MAX_SMALL_WHOLE_CHARS of one tenant that are tokenized at once. They may wait for each other there, on
threads that other tenants need."""
MAX_TASKS_READ = MAX_TASKS_AT_ONCE + MAX_RENDERS_AT_ONCE
"""Long tasks whose requests are in memory at once: those on the threads, and chats at the template."""
MAX_CHATS_OF_TENANT = 2
"""Chats of one tenant that are rendered at once, so that costly ones leave workers to other tenants."""
MAX_TRIALS_AWAITED = 64
"""Grammar trials that this node may wait for at once."""
MAX_TRIALS_OF_TENANT = 4
"""The same for the trials of one tenant."""


class JobPreparation:
    """The step from a taken job to an engine request. A short plain prompt takes it at once, any other job in a task.

    No job waits for another job's grammar, adapter, bad words or long prompt. Jobs without these reach the engine in
    the order in which they were taken. A job that cannot run ends in the outbox. One whose adapter this node lacks, or
    that it does not know, goes to another node.
    """

    def __init__(
        self,
        broker: NodeBroker,
        held_jobs: HeldJobs,
        worker: EngineWorker,
        tokenizers: tuple[Tokenizer, TextEncoding | None, PairScores | None],
        reports: JobReports,
        outbox: Outbox,
        load_shedder: LoadShedder,
        threads: Threads,
    ) -> None:
        self._broker = broker
        self._held_jobs = held_jobs
        self._worker = worker
        self._tokenizer, self._texts, self._pairs = tokenizers
        self._reports = reports
        self._outbox = outbox
        self._load_shedder = load_shedder
        self._threads = threads
        self._yielder = LoopYielder()
        self._task_threads = Threads(MAX_TASKS_AT_ONCE)
        # Keyed by tenant; no text of a request.
        self._tasks_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Semaphores by tenant."""
        self._long_tasks = asyncio.Semaphore(MAX_TASKS_READ)
        self._trial_threads = Threads(MAX_TRIALS_AWAITED)
        """Threads that wait for grammar trials; separate, so that trials do not delay long prompts."""
        # Keyed by tenant.
        self._trials_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Semaphores by tenant, so that one tenant's grammars do not delay another tenant's."""
        self._chat_threads = Threads(MAX_RENDERS_AT_ONCE)
        """Threads that wait for the chat template; separate, so that a slow template does not delay long prompts."""
        # Keyed by tenant; no text of a request.
        self._chats_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Semaphores by tenant."""
        # Keyed by tenant; no text of a request.
        self._long_prompts_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Semaphores by tenant."""
        self._running: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self.num_tokenizer_failures = 0
        """Prompts that the tokenizer failed at, not counting those that it refused as invalid."""

    def begin(self, job: HeldJob) -> None:
        """Start the preparation of a job that the node has just begun to hold."""
        if self._is_plain(job) and self._begin_at_once(job):
            return
        task = asyncio.create_task(self._run(job), name=f"penstock preparation {job.job_id}")
        self._running.add(task)
        task.add_done_callback(partial(self._on_end, job))

    @staticmethod
    def _is_plain(job: HeldJob) -> bool:
        """Whether nothing but the request itself may make the job wait."""
        return not job.is_task and not job.taken.num_chunks and 0 < len(job.taken.request) <= MAX_CHARS_ON_LOOP

    def _begin_at_once(self, job: HeldJob) -> bool:
        """Prepare a job whose request needs neither a thread nor another process. Return whether it was that.

        A task for each of thousands of short jobs would cost more than their preparation.
        """
        crash_points.point("before", "preparation")
        try:
            request = wire.decode_request(job.taken.request)
            if _needs_task(request):
                return False
            job.note_terms(request)
            job.open(request.params)
            token_ids = self._encode_now(job, request)
        except Exception:
            return False  # The task meets the same error, and handles it.
        try:
            self._start(job, request, token_ids, None)
        except Exception as error:
            self._fail(job, error)  # Otherwise the node would hold the job forever.
        crash_points.point("after", "preparation")
        return True

    async def close(self) -> None:
        """Cancel all preparations. The node holds the jobs until the caller gives them back."""
        await cancel_until_done(self._running)

    def _on_end(self, job: HeldJob, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(job, error)  # Otherwise the node would hold the job forever.

    async def _run(self, job: HeldJob) -> None:
        crash_points.point("before", "preparation")
        try:
            if job.is_task:
                await self._answer(job)
                return
            request = await self._open(job)
            if request is None:
                self._end_cancelled(job)
                return
            prepared = await self._prepare(request, job.taken.tenant)
            token_ids = await self._encode(job, request)
            prompt_ids: list[TokenLogprobs] = []
            # The engine reports the tokens of a prompt with log-probabilities.
            params = request.params
            if isinstance(token_ids, list) and params.return_token_ids and params.prompt_logprobs is None:
                prompt_ids = await self._threads.run(lambda: [TokenLogprobs((one,), (), (b"",)) for one in token_ids])
        except Exception as error:
            # A library may raise anything; the error concerns this job alone.
            await self._reject(job, error)
        else:
            job.report_prompt(prompt_ids)
            self._start(job, request, token_ids, prepared)
        crash_points.point("after", "preparation")

    async def _reject(self, job: HeldJob, error: Exception) -> None:
        if self._held_jobs.get(job.job_id) is not job:
            return
        is_of_adapter = isinstance(error, PenstockError) and error.param == "adapter"
        if is_of_adapter or isinstance(error, UnsupportedKindError):
            # The adapter is missing, has changed or is unreadable here, or a caller of a newer release sent the job.
            # Another node may be able to run it.
            if await with_retries(lambda: self._load_shedder.give_back([job], "lacking"), math.inf):
                self._fail(job, error)
            return
        self._fail(job, error)

    async def _open(self, job: HeldJob) -> Request | None:
        """Return a job's request, with the log of earlier nodes applied; None if the job was canceled."""
        data: bytes | None = job.taken.request
        if not data:
            (data,) = await with_retries(lambda: self._broker.requests([job.job_id]), math.inf)
        if data is None:
            return None
        if len(data) <= MAX_BYTES_ON_LOOP:
            request = wire.decode_request(data)
        else:
            request = await self._threads.run(partial(wire.decode_request, data))
        job.adapter = "" if request.adapter is None else request.adapter.name
        await self._reports.taken(job, request)
        logged: list[Chunk] = []
        if job.taken.num_chunks:
            logged = await with_retries(lambda: self._broker.log(job.job_id, job.taken.num_chunks), math.inf)
        job.note_terms(request)
        job.open(request.params, logged, await self._sealed(logged))
        return request

    async def _sealed(self, logged: Sequence[Chunk]) -> list[SealedChunk]:
        """Pack logged chunks again. Log-probabilities take long, so each chunk with them yields to the event loop."""
        sealed = list[SealedChunk]()
        for chunk in logged:
            sealed.append(seal(chunk))
            if chunk.logprobs or chunk.prompt_logprobs:
                await self._yielder.wait()
        return sealed

    async def _prepare(self, request: Request, tenant: str) -> Prepared | None:
        """Prepare what the engine needs besides tokens: grammar, adapter and bad words."""
        params = request.params
        if params.structured_outputs is None and request.adapter is None and not params.bad_words:
            return None
        prepare = partial(self._worker.prepare, params, request.adapter, tenant)
        if params.structured_outputs is None:
            return await self._threads.run(prepare)
        async with self._trials_of.setdefault(tenant, asyncio.Semaphore(MAX_TRIALS_OF_TENANT)):
            return await self._trial_threads.run(prepare)

    async def _answer(self, job: HeldJob) -> None:
        """Run a task and end its job. The engine takes no part in it.

        A long task is read and decoded only when it is its turn, which lasts until Redis has its output: a flood of
        them then takes little memory here.
        """
        tenant, packed = job.taken.tenant, job.taken.request
        is_long = not packed or len(packed) > MAX_CHARS_ON_LOOP
        turn = self._tasks_of.setdefault(tenant, asyncio.Semaphore(MAX_TASKS_OF_TENANT)) if is_long else nullcontext()
        async with turn, self._long_tasks if is_long else nullcontext():
            request = await self._open(job)
            if request is None:
                self._end_cancelled(job)
                return
            max_tokens, now = self._held_jobs.max_model_len, created_at(job.job_id)
            run = partial(run_task, self._tokenizer, request, tenant, max_tokens, now)
            job.output = await self._tokenized(run, job, request, self._task_threads)
            del run, request  # They have the text, and the output may wait long for Redis.
            self._outbox.end(job, Outcome("succeeded"))
            if is_long:
                await self._outbox.until_removed(job)

    def _end_cancelled(self, job: HeldJob) -> None:
        """End a job that was canceled between take and read. Redis answers the finish call accordingly."""
        self._outbox.end(job, Outcome("cancelled", "cancelled", "the job was cancelled"))

    async def _encode(self, job: HeldJob, request: Request) -> list[int] | PackedTexts:
        return await self._tokenized(partial(self._encode_now, job, request), job, request, self._threads)

    def _encode_now(self, job: HeldJob, request: Request) -> list[int] | PackedTexts:
        if self._texts is not None:
            return _packed_texts(self._texts, request)
        if isinstance(request.task, Score) and self._pairs is not None and len(request.task.texts) == 1:
            if request.prompt is None:
                raise RequestError(f"{QUERY}: must be a text, not token ids", param=QUERY)
            return self._pairs.encode(self._tokenizer, request.task, request.prompt, self._held_jobs.max_model_len - 1)
        if isinstance(request.task, TextTask) and (request.task.texts or request.task.kind not in DECODER_KINDS):
            raise UnsupportedKindError(f"this model generates text: it cannot {request.task.kind} texts together")
        if isinstance(task := request.task, Embed):
            before = self._tokenizer.embedding_prompts.before(task)
            if request.prompt is not None:  # Neither token ids nor a chat.
                request = replace(request, prompt=before + request.prompt)
            if task.normalize is False:
                raise RequestError("normalize: this model's embeddings have length 1", param="normalize")
        max_tokens = self._held_jobs.max_model_len if request.params.truncate_prompt_tokens is None else None
        return _encode(self._tokenizer, request, job.taken.tenant, job.job_id, max_tokens)

    async def _tokenized(self, call: Callable[[], T], job: HeldJob, request: Request, threads: Threads) -> T:
        """Make a call to the tokenizer; on a thread if the prompt is long or a template renders it."""
        try:
            if request.messages is not None:
                async with self._chats_of.setdefault(job.taken.tenant, asyncio.Semaphore(MAX_CHATS_OF_TENANT)):
                    return await self._chat_threads.run(call)
            if (num_chars := _num_chars(request)) <= MAX_CHARS_ON_LOOP:
                return call()
            if num_chars <= MAX_SMALL_WHOLE_CHARS or job.is_task:
                return await threads.run(call)
            turn = asyncio.Semaphore(MAX_LONG_PROMPTS_OF_TENANT)
            async with self._long_prompts_of.setdefault(job.taken.tenant, turn):
                return await threads.run(call)
        except Exception as error:
            is_known = isinstance(error, PenstockError) and not isinstance(error, TokenizerFailedError)
            self.num_tokenizer_failures += not is_known
            raise

    def _start(
        self, job: HeldJob, request: Request, encoded: list[int] | PackedTexts, prepared: Prepared | None
    ) -> None:
        self._held_jobs.open(job, len(encoded))
        if job.is_complete:
            self._outbox.end_complete(job)
            return
        if self._held_jobs.get(job.job_id) is not job or job.outcome is not None:
            return  # The job was lost or canceled during its preparation.
        params, taken = request.params, job.taken
        # The prompt may leave less of `max_total_tokens` than `max_tokens`.
        lowered = lowered_max_tokens(params.max_tokens, request.max_total_tokens, len(encoded))
        if lowered is not None:
            params = params.model_copy(update={"max_tokens": lowered})
        # Otherwise the output continues the prompt's text.
        begins_text = request.messages is not None and not json.loads(request.chat_template_kwargs or "{}").get(
            CONTINUES
        )
        job.is_in_engine = True
        self._worker.add(
            EngineRequest(
                taken.lease,
                () if isinstance(encoded, PackedTexts) else encoded,
                params,
                seed=seed_of(job.job_id, params),
                resume=[ResumedChoice(*job.choice_so_far(i)) for i in range(params.n)] if taken.num_chunks else (),
                level=taken.urgency,
                background=taken.is_background,
                priority=taken.priority,
                tenant=taken.tenant,
                weight=taken.weight,
                adapter=request.adapter,
                reports_prefill=request.return_progress and not taken.num_chunks,
                embed=request.task if isinstance(request.task, Embed) else None,
                score=request.task if isinstance(request.task, Score) and self._pairs is not None else None,
                texts=encoded if isinstance(encoded, PackedTexts) else None,
                begins_text=begins_text,
                reasoning=self._reasoning_of(request),
                prepared=prepared,
            ),
            # Not awaited: the engine answers between two steps, and the next job need not wait for that.
            partial(self._note_refusal, job),
        )

    def _reasoning_of(self, request: Request) -> ReasoningRule | None:
        """Return how an answer in a chat may reason. Other texts do not, whatever they contain."""
        if request.messages is None:
            return None
        rule = self._tokenizer.reasoning_rule(request.chat_template_kwargs)
        if rule is None or request.tools is None or request.params.structured_outputs is not None:
            return rule
        return replace(rule, calls=CallOpening.of(self._tokenizer.tool_format, names_in(request.tools)))

    def _note_refusal(self, job: HeldJob, error: Exception) -> None:
        """End a job that the engine refused. Runs on the engine's thread."""
        with suppress(RuntimeError):  # The event loop may be closed already.
            self._loop.call_soon_threadsafe(self._fail, job, error)

    def _fail(self, job: HeldJob, error: BaseException) -> None:
        if isinstance(error, PenstockError):
            if not isinstance(error, RequestError):
                log.error("job cannot be run", extra={"job_id": job.job_id}, exc_info=error)
            self._outbox.fail(job, Outcome("failed", error.code, error.message, error.param or ""))
        else:
            log.error("the engine failed on a job", extra={"job_id": job.job_id}, exc_info=error)
            self._outbox.fail(job, Outcome("failed", "internal_error", "the engine failed at this job"))


def _num_chars(request: Request) -> int:
    """Return how many characters to render and tokenize; what a template writes around a message counts too."""
    num_ids = len(request.prompt_token_ids or ()) if request.task is not None else 0
    chats = sum(map(_num_chars_of, request.messages or ()))
    texts = (request.prompt, request.tools, request.chat_template_kwargs)
    further = request.task.texts if isinstance(request.task, TextTask) else ()
    return chats + num_ids + sum(len(text or "") for text in (*texts, *further))


def _num_chars_of(message: Message) -> int:
    calls = sum(CHARS_AROUND_MESSAGE + len(call.name) + len(call.arguments) for call in message.tool_calls)
    return CHARS_AROUND_MESSAGE + len(message.content) + len(message.reasoning) + len(message.name or "") + calls


def _needs_task(request: Request) -> bool:
    """Return whether a job's preparation may wait for a thread, for files or for the record of its trace."""
    params = request.params
    is_plain = params.structured_outputs is None and not params.bad_words and not params.return_token_ids
    return not is_plain or request.adapter is not None or request.messages is not None or bool(request.trace)


def _encode(tokenizer: Tokenizer, request: Request, tenant: str, job_id: str, max_tokens: int | None) -> list[int]:
    """Return the prompt's tokens.

    Raises PromptTooLongError for a chat that certainly has more than `max_tokens` tokens; None: no limit.
    """
    whole = _encode_whole(tokenizer, request, tenant, job_id, max_tokens)
    if isinstance(request.task, TextTask) and request.task.truncation_side == "right":
        return whole[: request.task.truncate_prompt_tokens]
    return truncated(whole, request.params)


def _encode_whole(
    tokenizer: Tokenizer, request: Request, tenant: str, job_id: str, max_tokens: int | None
) -> list[int]:
    if request.prompt_token_ids is not None:
        return list(request.prompt_token_ids)
    if request.messages is not None:
        messages = [message.model_dump(exclude_defaults=True) for message in request.messages]
        owner, variables = (tenant, request.params.cache_salt), request.chat_template_kwargs
        # The time is part of the job, so that another node renders the same chat.
        now = created_at(job_id)
        return tokenizer.encode_chat(messages, request.tools, variables, now=now, owner=owner, max_tokens=max_tokens)
    return tokenizer.encode_prompt(request.prompt or "", (tenant, request.params.cache_salt))


def _packed_texts(texts: TextEncoding, request: Request) -> PackedTexts:
    """Return the tokens of a job for an encoder. Raises UnsupportedKindError for a job of another kind."""
    task = request.task
    if not isinstance(task, (Embed, Score, Classify)):
        raise UnsupportedKindError("this model is an encoder and generates no text")
    if request.messages is not None:
        raise RequestError("this model is an encoder: it takes texts, not chats", param="messages")
    ids = request.prompt_token_ids
    return texts.encode(task, (request.prompt or "") if ids is None else ids)
