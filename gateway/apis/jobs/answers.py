"""The answers of the jobs API: a job with its result, and a job's chunks as a stream of events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from penstock.contract.durability import Durability
from penstock.contract.errors import NotFoundError, PenstockError, RequestError, StreamDivergedError, error_of
from penstock.contract.output import Chunk, Usage
from penstock.contract.tasks import Embed
from penstock.gateway.budget import SharedBudget
from penstock.gateway.errors import error_body
from penstock.gateway.metrics import StreamMeter
from penstock.gateway.stream.answer import JOB_HEADER
from penstock.gateway.stream.dialect import ChunkEncoder
from penstock.gateway.stream.event_stream import (
    ChunkWriter,
    EventSink,
    EventSource,
    Waiting,
    batches_of,
    until_disconnected,
    while_connected,
)
from penstock.gateway.stream.writer import PIECE_BYTES, BodyWriter, CallerGoneError, EventWriter, event
from penstock.producer.client import AsyncClient
from penstock.producer.client.job_objects import job_object, outcome_object, queue_members, usage_object
from penstock.producer.openai.json_parts import (
    Items,
    Rows,
    Text,
    chat_logprobs,
    json_parts,
    prompt_logprobs,
    whole_chat_logprobs,
)
from penstock.queue.broker.producer import JobStatus
from penstock.queue.results import PackedChoice, PackedResult
from penstock.runtime.event_loop import LoopYielder

# Encoding of a job's chunks as server-sent events, and of its result as a JSON object.

_MAX_DIGITS = 9
EMBED = Embed.model_fields["kind"].default


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Where a job's stream begins: after the chunk `index`, or with `index` -1 at the beginning."""

    index: int = -1
    end: int | None = None
    """Number of tokens of that chunk's choice up to its end, if known. It reveals whether the log is still the same."""

    @property
    def read_after(self) -> int:
        """The index of the chunk after which to read. The chunk `index` is read again to compare its end."""
        return self.index if self.end is None else self.index - 1


def stream_start_of(text: str | None) -> StreamStart:
    """Parse `<chunk>` or an event id, `<chunk>:<tokens>`. -1 stands for the beginning. Raises RequestError."""
    if not text or text == "-1":
        return StreamStart()
    index, colon, end = text.partition(":")
    numbers = (index, end) if colon else (index,)
    if not all(number.isdecimal() and len(number) <= _MAX_DIGITS for number in numbers):
        raise RequestError("after: must be the index of a chunk, or an event id <chunk>:<tokens>", param="after")
    return StreamStart(int(index), int(end) if colon else None)


class JobEncoder(ChunkEncoder):
    """Encodes each chunk as one event with the id `<chunk>:<tokens of its choice up to the chunk's end>`."""

    def __init__(self, start: StreamStart) -> None:
        super().__init__(None)
        self._unchecked = None if start.end is None else (start.index, start.end)

    def end(self, usages: Sequence[Usage]) -> bytes:
        """Return nothing, because the last chunk has the job's outcome."""
        return b""

    def _event_of(self, chunk: Chunk) -> bytes:
        position = (chunk.index, chunk.position + len(chunk.token_ids))
        if self._unchecked is not None:
            if position != self._unchecked:
                message = f"chunk {self._unchecked[0]} of job {chunk.job_id} is no longer the one that was delivered"
                raise StreamDivergedError(message)
            self._unchecked = None
            return b""
        return event(chunk_object(chunk), f"{position[0]}:{position[1]}")


def chunk_object(chunk: Chunk) -> dict[str, Any]:
    """Return one chunk as a JSON object. Members without a value are left out."""
    known = {
        "num_prompt_tokens": chunk.num_prompt_tokens,
        "finish_reason": chunk.finish_reason,
        "usage": None if chunk.usage is None else usage_object(chunk.usage),
        "outcome": None if chunk.outcome is None else outcome_object(chunk.outcome),
        "logprobs": chat_logprobs(chunk.logprobs),
        "prompt_logprobs": [*prompt_logprobs(chunk.prompt_logprobs)] or None,
    }
    if chunk.outcome is not None:
        tokens: dict[str, Any] = {}
    else:
        tokens = {"choice": chunk.choice, "position": chunk.position, "token_ids": chunk.token_ids, "text": chunk.text}
    return {"index": chunk.index, **tokens, **{name: value for name, value in known.items() if value is not None}}


def result_object(result: PackedResult) -> dict[str, Any]:
    """Return a job's result. Its long values are created when they are written."""
    answer: dict[str, Any] = {
        "choices": Items(lambda: map(_choice_object, result.choices)),
        "usage": None if result.usage is None else usage_object(result.usage),
    }
    output = result.output
    if output is not None and output.num_rows > 1:
        answer["rows"] = Rows(lambda: map(list, output.rows()))
    elif output is not None and output.kind == EMBED:
        answer["embedding"] = Rows(lambda: iter(output.floats()))
    if result.prompt_logprobs:
        answer["prompt_logprobs"] = Rows(lambda: prompt_logprobs(result.prompt_logprobs))
    return answer


def _choice_object(choice: PackedChoice) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "index": choice.index,
        "text": Text(lambda: [choice.text]),
        "token_ids": Rows(lambda: iter(choice.token_ids)),
        "finish_reason": choice.finish_reason,
    }
    return answer | ({"logprobs": whole_chat_logprobs(choice.logprobs)} if choice.logprobs else {})


# The HTTP responses of the jobs API: a job with its result, and a job's chunks as a stream of events.


def links_of(job_id: str) -> dict[str, str]:
    """Return the paths of a job."""
    path = f"/v1/jobs/{job_id}"
    return {"self": path, "stream": f"{path}/stream", "cancel": path, "why": f"{path}/why"}


class JobAnswer(Response):
    """A job with its result, if it has ended. The result is encoded and sent in pieces."""

    def __init__(
        self,
        status: JobStatus,
        client: AsyncClient,
        yielder: LoopYielder,
        result_budget: SharedBudget,
        *,
        timeout_s: float,
        token_durability: Durability | None,
    ) -> None:
        """timeout_s: how long the caller may delay the body (see BodyWriter). `token_durability`: of the result."""
        super().__init__()
        self._status = status
        self._client = client
        self._yielder = yielder
        self._result_budget = result_budget
        self._timeout_s = timeout_s
        self._token_durability = token_durability

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Fetch the result and send the answer."""
        with contextlib.suppress(CallerGoneError):
            await while_connected(self._answer(send), until_disconnected(receive))

    async def _answer(self, send: Send) -> None:
        status = self._status
        async with self._result_budget.taken(status.tenant, status.large_result_bytes):
            answer = job_object(status) | {"links": links_of(status.job_id)}
            if status.state in ("scheduled", "queued"):
                answer |= queue_members(status)
            answer |= await self._result()
            if status.large_result_bytes > PIECE_BYTES:
                await self._yielder.wait()
            writer = BodyWriter(send, {JOB_HEADER: status.job_id}, self._yielder, timeout_s=self._timeout_s)
            await writer.send_all(_parts_of(answer))

    async def _result(self) -> dict[str, Any]:
        """Return the member `result`. It is null while the job is open, and once the result has expired."""
        if self._status.outcome is None:
            return {"result": None}
        try:
            result = await self._client.packed_result(
                self._status.job_id, tenant=self._status.tenant, token_durability=self._token_durability
            )
        except NotFoundError as error:
            if error.code != "result_expired":
                raise
            return {"result": None, "result_expired": True}
        return {"result": None if result is None or result.usage is None else result_object(result)}


async def _parts_of(answer: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    for part in json_parts(answer):
        yield part


class JobEvents(EventSource):
    """The chunks of a job as events. A caller that leaves ends no background job."""

    def __init__(
        self,
        client: AsyncClient,
        yielder: LoopYielder,
        job_id: str,
        tenant: str,
        start: StreamStart,
        *,
        with_waiting: bool,
        token_durability: Durability | None,
    ) -> None:
        """`with_waiting`: send events with the queue position and the prompt progress before the first chunk.

        `token_durability`: what each chunk waits for; None for the client's setting.
        """
        self._client = client
        self._yielder = yielder
        self._job_id = job_id
        self._tenant = tenant
        self._start = start
        self._with_waiting = with_waiting
        self._token_durability = token_durability
        self.is_new = start.index < 0

    def error_event(self, error: PenstockError) -> bytes:
        """Return the last event of a stream that fails."""
        return event(error_body(error))

    async def send_events(self, writer: EventWriter, meter: StreamMeter) -> None:
        """Attach to the job and send its events."""
        if self.keep is not None:
            self.keep.begin({"job_ids": [self._job_id], "is_stream": True})
        job = await self._client.attach(
            self._job_id, after=self._start.read_after, tenant=self._tenant, token_durability=self._token_durability
        )
        writer.headers[JOB_HEADER] = job.id
        self.show_position(job, writer)
        encoder = JobEncoder(self._start)
        chunks = ChunkWriter(encoder, writer, meter, self._yielder)
        # A resumed stream checks its first chunk.
        sink = EventSink(encoder, writer) if self._start.end is None else None
        async with aclosing(batches_of([job], sink, with_waiting=self._with_waiting)) as batches:
            async for batch in batches:
                if isinstance(batch, Waiting):
                    await writer.write(encoder.waiting(job.id, batch.update))
                    continue
                await chunks.write(batch)
                outcome = batch[-1].outcome
                if outcome is not None and outcome.state != "succeeded":
                    meter.failed(error_of(outcome), counts=False)
