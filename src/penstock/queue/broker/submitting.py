"""Submissions: jobs as submit.lua takes them, its calls, and its refusals as errors."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar, cast

from redis.asyncio import Redis

from penstock.contract.errors import (
    BusyError,
    ConflictError,
    InvariantError,
    PenstockError,
    RequestError,
    TooLargeError,
    UnavailableError,
)
from penstock.contract.job import MEMORY, NO_RESPONSE, Durability, JobDef, ResponseRecord
from penstock.contract.output import UNKNOWN_WAIT, WaitEstimate
from penstock.contract.pauses import paused_error
from penstock.contract.tenant import UNLIMITED, Terms
from penstock.queue import keys, wire
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import Patience, error_of_reply, retried
from penstock.queue.broker.durable_calls import DurableCalls, not_confirmed
from penstock.queue.broker.pools import pauses_of
from penstock.queue.broker.scripts import Argument, PoolClocks
from penstock.queue.job_cost import RateTokens, estimate_output_bytes, spread_with_jobs
from penstock.queue.wire import MAX_BYTES as MAX_WIRE_BYTES
from penstock.queue.wire import pack, with_members
from penstock.runtime.event_loop import cancel_until_done
from penstock.runtime.tracing.context import Carried

# Calls that many callers share: what is asked for at the same time goes to Redis together.

Item = TypeVar("Item")
Answer = TypeVar("Answer")

MAX_SHARED_ITEMS = 128
"""Items of one call."""
MAX_SHARED_BYTES = 512 << 10
"""Bytes of the items of one call, so that it blocks Redis only shortly. A single larger item still goes out."""
MAX_SHARED_CALLS = 4
"""Calls of one key that may be in flight. Further items wait, and then share a call."""


class SharedCalls(Generic[Item, Answer]):
    """Items that wait for the next call, by a key: only items of the same key go together.

    An item alone leaves in the same round of the event loop, so no caller waits for others.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]],
        size_of: Callable[[Item], int] = lambda _: 0,
        *,
        max_items: int = MAX_SHARED_ITEMS,
    ) -> None:
        """`call` returns an answer for each item. `size_of` returns the bytes of an item."""
        self._max_items = max_items
        self._call = call
        self._size_of = size_of
        self._waiting: dict[Hashable, list[tuple[Item, asyncio.Future[Answer]]]] = {}
        self._num_calls = Counter[Hashable]()
        self._tasks = set[asyncio.Task[None]]()

    async def add(self, key: Hashable, item: Item) -> Answer:
        """Return the answer to an item. Raises the error of its call."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Answer] = loop.create_future()
        if (waiting := self._waiting.get(key)) is not None:
            waiting.append((item, done))
        else:
            self._waiting[key] = [(item, done)]
            loop.call_soon(self._send, key)
        return await done

    async def close(self) -> None:
        """Cancel all calls. Their callers get UnavailableError."""
        await cancel_until_done(list(self._tasks))

    def _send(self, key: Hashable) -> None:
        while self._num_calls[key] < MAX_SHARED_CALLS and (batch := self._next_batch(key)):
            self._num_calls[key] += 1
            task = asyncio.create_task(self._run(batch), name="penstock shared call")
            self._tasks.add(task)
            task.add_done_callback(partial(self._on_end, key, batch))
        if not self._num_calls[key]:
            del self._num_calls[key]

    def _next_batch(self, key: Hashable) -> list[tuple[Item, asyncio.Future[Answer]]]:
        """Take the items of the next call from those that wait, except those whose callers are gone."""
        waiting = [one for one in self._waiting.pop(key, ()) if not one[1].done()]
        num_bytes = 0
        for at, (item, _) in enumerate(waiting):
            num_bytes += self._size_of(item)
            if at == self._max_items or (at and num_bytes > MAX_SHARED_BYTES):
                self._waiting[key] = waiting[at:]
                return waiting[:at]
        return waiting

    async def _run(self, batch: Sequence[tuple[Item, asyncio.Future[Answer]]]) -> None:
        answers = await self._call([item for item, _ in batch])
        for (_, done), answer in zip(batch, answers, strict=True):
            if not done.done():
                done.set_result(answer)

    def _on_end(
        self, key: Hashable, batch: Sequence[tuple[Item, asyncio.Future[Answer]]], task: asyncio.Task[None]
    ) -> None:
        self._tasks.discard(task)
        self._num_calls[key] -= 1
        error: BaseException | None
        if task.cancelled():
            error = UnavailableError("the client was closed", code="client_closed")
        else:
            error = task.exception()
        for _, done in batch:
            if not done.done():
                done.set_exception(error or InvariantError("a shared call left an item without an answer"))
        self._send(key)


# Submissions.


@dataclass(frozen=True, slots=True)
class Submission:
    """A checked job with what the queue must know beside it. Submitting it again is harmless: same id, same bytes."""

    job: JobDef
    cost: int
    """Predicted KV tokens."""
    terms: Terms = UNLIMITED
    response: ResponseRecord = NO_RESPONSE
    rate_tokens: RateTokens | None = None
    """What it counts for the tenant's token rate; None counts the cost."""
    durability: Durability = MEMORY
    """What the answer waits for: Redis, its disk, or a replica."""
    model: str = ""
    """The name under which the caller asked for the model. Lists of jobs show it."""
    waits: bool = False
    """Whether the caller of foreground work lets it wait for a node and for the end of a pause."""
    is_repeated: bool = False
    """Whether the queue has accepted the job before and lost it, so that no pause refuses it."""

    def repeated(self) -> Submission:
        """Return the submission of a job that the queue lost. No limit or pause refuses it; it waits for no disk."""
        return replace(self, terms=self.terms.without_limits(), durability=MEMORY, is_repeated=True)


@dataclass(frozen=True, slots=True)
class Attached:
    """Answer of attach. If not `pushed`, the job has the maximum of readers; the caller must poll its log instead."""

    state: str
    num_chunks: int
    pushed: bool


@dataclass(frozen=True, slots=True)
class Submitted(Attached):
    """Answer of submit: the state of the job, which `existed` if its id or idempotency key was already known."""

    job_id: str
    existed: bool
    channel: str | None = None
    """The whole name of the channel that the submission asked for."""


@dataclass(frozen=True, slots=True)
class PackedSubmission:
    """A job as submit.lua takes it. Jobs of one pool and inbox may go in one call."""

    job: JobDef
    inbox: str
    terms: Terms
    row: dict[str, Any]
    request: bytes
    response: bytes


MAX_SHORT_BYTES = 64
"""The most bytes of a field with which Redis stores a job's record in its short form, as in prelude.lua."""


def short(text: str) -> str:
    """Return the beginning of a text in one line, without characters that do not print, in MAX_SHORT_BYTES."""
    if len(text) <= MAX_SHORT_BYTES and text.isascii() and text.isprintable() and " " not in text:
        return text  # The names of most models.
    head = text.lstrip()[: 4 * MAX_SHORT_BYTES]
    if not head.isprintable():
        head = "".join(char if char.isprintable() else " " for char in head)
    data = " ".join(head.split()).encode()
    if len(data) <= MAX_SHORT_BYTES:
        return data.decode()
    return data[: MAX_SHORT_BYTES - len("…".encode())].decode(errors="ignore") + "…"


def first_words(job: JobDef) -> str:
    """Return the first words of a job's prompt, of a chat those of the user's last message. Token ids have none."""
    if job.packed_prompt is not None:
        return job.packed_prompt.first_words
    if job.messages is not None:
        of_user = (message for message in reversed(job.messages) if message.role == "user")
        return short(next(of_user, job.messages[-1]).content)
    return short(job.prompt or "")


def custom_mark(custom_id: str) -> str:
    """Return the tag by which Redis finds the jobs of a custom_id. No tag of a caller begins with `#`."""
    return f"#{keys.key_hash(custom_id)}"


def _packed_submission(submission: Submission, inbox: str, trace: Carried) -> PackedSubmission:
    """Pack a job. Raises TooLargeError."""
    job, terms = submission.job, submission.terms
    request = wire.encode_request(job)
    if len(request) > MAX_WIRE_BYTES:
        raise TooLargeError(f"the request has {len(request)} bytes; the limit is {MAX_WIRE_BYTES}", param="prompt")
    record = submission.response
    body = hashlib.blake2b(request, digest_size=16).hexdigest()
    if trace:
        # Added after the hash, since the same request of another trace is still the same request.
        request = with_members(request, [("trace", [pack(trace)])])
    notes = {**(job.metadata or {}), **({} if job.custom_id is None else {wire.CUSTOM_ID: job.custom_id})}
    metadata = json.dumps(notes, separators=(",", ":"), ensure_ascii=False) if notes else ""
    rate = submission.rate_tokens
    limits = (job.params.max_tokens, job.max_total_tokens)
    row: dict[str, Any] = {
        "id": job.id,
        "level": job.level,
        "n": None if job.num_sequences == 1 else job.num_sequences,
        "cost": submission.cost,
        "body": body,
        "deadline_in_ms": job.deadline_ms or None,
        "channel": job.channel and job.channel.field,
        "needs_reader": job.reader_grace_ms if job.requires_reader else 0,
        "idem_hash": keys.key_hash(job.idempotency_key),
        "output": estimate_output_bytes(job, len(request)),
        "not_before_in_ms": job.not_before_ms or None,
        "keep_ms": record.keep_ms or None,
        "rate_prompt": rate and rate.prompt,
        "rate_n": rate and rate.num_choices,
        "rate_max": rate and rate.max_output,
        "most_tokens": rate and rate.may_use,
        "limits": None if None in limits else "{} {}".format(*limits),
        "max_wait_ms": job.max_wait_ms,
        "waits": 1 if submission.waits and not job.background else None,
        "is_repeated": 1 if submission.is_repeated else None,
        "in_feed": None if job.in_feed else 0,
        "ttl_in_ms": job.ttl_ms or None,
        "tags": " ".join((*job.tags, *map(custom_mark, filter(None, [job.custom_id])))),
        "metadata": metadata,
        "retry_of": (job.retry_of or "").rpartition(".")[2],
        "webhooks": " ".join(job.webhooks),
        "more": _rare_fields_of(job),
        "model": short(submission.model),
        "words": first_words(job),
    }
    # submit.lua has the defaults.
    for name in [name for name, value in row.items() if value is None or value == "" or value == {}]:
        del row[name]
    return PackedSubmission(job, inbox, terms, row, request, record.data)


def _rare_fields_of(job: JobDef) -> dict[str, str]:
    """Return the fields of a job's record that few jobs have."""
    if job.max_attempts is None and job.retry_backoff_ms is None and job.concurrency_key is None:
        return {}
    found = dict[str, str]()
    if not (job.max_attempts is None and job.retry_backoff_ms is None):
        terms = (job.max_attempts, job.retry_backoff_ms)
        found["retry"] = " ".join("-" if one is None else str(one) for one in terms)
    if job.concurrency_key is not None:
        found["key"], found["key_terms"] = job.concurrency_key, _key_terms_of(job)
    return found


def _key_terms_of(job: JobDef) -> str:
    """Return the limits of a job's key as its record has them: most jobs, and jobs in so many milliseconds."""
    most = "-" if job.max_concurrency is None else str(job.max_concurrency)
    if (rate := job.max_per_second) is None:
        return f"{most} - -"
    # Whole jobs in a span that is as much longer than a second.
    num_jobs = math.ceil(rate)
    return f"{most} {num_jobs} {math.ceil(1000 * num_jobs / rate)}"


def _packed_terms(terms: Terms) -> dict[str, Any]:
    fields = terms.model_dump(exclude_defaults=True)
    # As a text: Redis would write a number with all its digits.
    return fields | {"weight": str(terms.weight)} if "weight" in fields else fields


def _arguments_of(submissions: Sequence[PackedSubmission], seen_ms: int) -> tuple[Argument, ...]:
    """Return the arguments of submit.lua for jobs of one pool and inbox. `seen_ms`: the pool's time, see PoolClocks."""
    # By identity: most jobs share an object, and its hash costs more than sending it twice.
    numbers: dict[tuple[str, int], int] = {}
    terms, rows = list[dict[str, Any]](), list[dict[str, Any]]()
    for packed in submissions:
        key = (packed.job.tenant, id(packed.terms))
        if key not in numbers:
            numbers[key] = len(numbers) + 1
            terms.append(_packed_terms(packed.terms) | {"tenant": packed.job.tenant})
        rows.append(packed.row | {"terms": numbers[key]})
    payloads = (data for packed in submissions for data in (packed.request, packed.response))
    return submissions[0].inbox, seen_ms, scripts.packed(terms), scripts.packed(rows), *payloads


def _submitted(job: JobDef, answer: list[Any]) -> Submitted:
    kind, found, state, num_chunks, pushed = answer
    job_id = found.decode()
    channel = None if job.channel is None else keys.own_channel(job_id, job.tenant, job.channel.name)
    return Submitted(state.decode(), num_chunks, bool(pushed), job_id, kind == b"EXISTS", channel)


class Submissions:
    """The calls of submit.lua of one client."""

    def __init__(self, redis: Redis, patience: Patience | None, clocks: PoolClocks) -> None:
        self.patience = patience
        self._redis = redis
        self._clocks = clocks
        self._durable_calls: dict[Durability, DurableCalls] = {}
        self._calls = SharedCalls(self._call, lambda packed: len(packed.request) + len(packed.response))

    async def close(self) -> None:
        """End the calls, and close the connections of those that wait for the disk or a replica."""
        await self._calls.close()
        for one in self._durable_calls.values():
            await one.close()

    async def submit(self, submission: Submission, inbox: str, trace: Carried) -> Submitted:
        """Submit a job; see `ProducerBroker.submit`."""
        job, packed = submission.job, _packed_submission(submission, inbox, trace)
        if (durability := submission.durability) == MEMORY:
            answer = await self._calls.add((job.pool, inbox), packed)
            _check_accepted(job, answer)
            return _submitted(job, answer)
        if (calls := self._durable_calls.get(durability)) is None:
            calls = self._durable_calls[durability] = DurableCalls(self._redis, self.patience, durability)

        def check(answers: list[Any]) -> None:
            _check_accepted(job, answers[0])

        arguments = _arguments_of([packed], self._clocks.seen_ms(job.pool))
        answers, is_confirmed = await calls.call("submit", job.pool, arguments, check)
        if not is_confirmed:
            job_id = answers[0][1].decode()
            raise not_confirmed(durability, f"job {job_id} is queued", job_id=job_id)
        return _submitted(job, answers[0])

    @retried
    async def _call(self, submissions: Sequence[PackedSubmission]) -> list[list[Any]]:
        """Return the answers to jobs of one pool and inbox. Raises UnavailableError if a retry makes sense."""
        pool = submissions[0].job.pool
        arguments = _arguments_of(submissions, self._clocks.seen_ms(pool))
        answers = await scripts.call(self._redis, "submit", pool, *arguments)
        for packed, answer in zip(submissions, answers, strict=True):
            if answer[0] in (b"UNKNOWN_POOL", b"ERR"):
                error = submit_error(answer[0].decode(), answer, packed.job)
                if isinstance(error, UnavailableError):
                    raise error
        return cast(list[list[Any]], answers)


# Refusals.


def _check_accepted(job: JobDef, answer: list[Any]) -> None:
    """Raise the error of a refusal."""
    if (kind := answer[0].decode()) not in ("OK", "EXISTS"):
        raise submit_error(kind, answer, job)


def channel_conflict(job_id: str) -> ConflictError:
    """Return the error for a job that publishes on another channel than the one that is asked for."""
    message = f"channel: job {job_id} already publishes on another channel, which its record names"
    return ConflictError(message, code="channel_conflict", param="channel")


def submit_error(kind: str, answer: list[Any], job: JobDef) -> PenstockError:
    """Return the error for a refused job; `kind` is the first element of the script's `answer`."""
    error = _refusal_of(kind, answer, job)
    error.pool = job.pool
    return error


def _refusal_of(kind: str, answer: list[Any], job: JobDef) -> PenstockError:
    match kind:
        case "UNKNOWN_POOL":
            # The client found the pool announced, so Redis lost it since. Its nodes announce it again within seconds.
            return UnavailableError(f"no node serves the pool {job.pool} now", code="no_node")
        case "ID_CONFLICT" | "IDEMPOTENCY_CONFLICT" | "CHANNEL_CONFLICT":
            return _conflict_of(kind, job)
        case "BAD_ID_AGE":
            message = f"job id {job.id} is older than {answer[1] // 60_000} min or from the future"
            return RequestError(message, code="bad_id", param="job_id")
        case "PAUSED":
            (pause,) = pauses_of(job.pool, {answer[1]: answer[2]})
            return paused_error(pause)
        case "BUSY":
            return _busy_error(answer[1].decode(), *answer[2:])
        case "ERR":
            return error_of_reply(answer[1].decode(errors="replace"))
    return InvariantError(f"submit answered {kind}")


def _conflict_of(kind: str, job: JobDef) -> ConflictError:
    match kind:
        case "ID_CONFLICT":
            return ConflictError(f"job id {job.id} belongs to another request", param="job_id")
        case "CHANNEL_CONFLICT":
            return channel_conflict(job.id)
    message = "this idempotency key was used with another request"
    return ConflictError(message, code="idempotency_conflict", param="idempotency_key")


def _busy_error(
    limit_name: str, limit: int, retry_after_ms: int, num_ahead: int, wait_ms: int, spread: int
) -> BusyError:
    wait = UNKNOWN_WAIT if wait_ms < 0 else WaitEstimate.of(wait_ms, spread_with_jobs(spread / 1000, num_ahead))
    busy = partial(
        BusyError,
        retry_after_ms=retry_after_ms,
        num_waiting_ahead=num_ahead,
        estimated_wait_ms=wait.estimated_wait_ms,
        estimated_wait_p10_ms=wait.estimated_wait_p10_ms,
        estimated_wait_p90_ms=wait.estimated_wait_p90_ms,
    )
    if limit_name == "wait":
        return busy(f"this job would wait about {wait_ms // 1000} s; the limit is {limit} s")
    if limit_name == "deadline":
        message = f"this job would wait at least {wait_ms // 1000} s, longer than its deadline_s of {limit} s"
        return busy(message, code="deadline_unreachable")
    if limit_name == "memory":
        message = f"the limit of {limit} % of Redis's memory is reached, including bytes that open jobs may still write"
        return busy(message, code="redis_full")
    if limit_name == "tenant's memory":
        message = (
            f"this tenant's share of Redis's memory is used up: its jobs and results may now take {limit} %, which "
            "depends on what other tenants leave free; free results that you have stored (ack), or wait until they "
            "expire"
        )
        return busy(message, code="memory_share_exceeded")
    tenant, _, rest = limit_name.rpartition("'s ")
    if tenant:
        message = f"this tenant's limit of {limit} {rest} is reached"
        return busy(message, code="rate_limit_exceeded")
    return busy(f"the pool's limit of {limit} {rest} is reached")
