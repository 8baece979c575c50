"""The HTTP responses of the jobs API: a job with its result, and a job's chunks as a stream of events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import NotFoundError, PenstockError
from penstock.gateway.authentication import caller_of
from penstock.gateway.jobs.encoder import JobEncoder, StreamStart, result_object
from penstock.gateway.openai.errors import error_body
from penstock.gateway.stream.answer import JOB_HEADER
from penstock.gateway.stream.body_writer import PIECE_BYTES, BodyWriter
from penstock.gateway.stream.caller import CallerGoneError, until_disconnected, while_connected
from penstock.gateway.stream.event_sink import EventSink
from penstock.gateway.stream.event_stream import EventStream, JobResponse
from penstock.gateway.stream.flow import Waiting, batches_of
from penstock.gateway.stream.sse import EventWriter, event
from penstock.producer.client.job_objects import job_object, queue_members
from penstock.producer.openai.json_parts import json_parts
from penstock.queue.broker.producer import JobStatus


def links_of(job_id: str) -> dict[str, str]:
    """Return the paths of a job."""
    path = f"/v1/jobs/{job_id}"
    return {"self": path, "stream": f"{path}/stream", "cancel": path}


class JobAnswer(JobResponse):
    """A job with its result, if it has ended. The result is encoded and sent in pieces."""

    def __init__(self, request: Request, status: JobStatus) -> None:
        super().__init__(request)
        self._status = status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Fetch the result and send the answer."""
        with contextlib.suppress(CallerGoneError):
            await while_connected(self._answer(send), until_disconnected(receive))

    async def _answer(self, send: Send) -> None:
        status = self._status
        async with self._result_budget.taken(status.tenant, status.large_result_bytes):
            answer = job_object(status) | {"links": links_of(status.job_id)}
            if status.state == "queued":
                answer |= queue_members(status)
            answer |= await self._result()
            if status.large_result_bytes > PIECE_BYTES:
                await self._yielder.wait()
            timeout_s = self._settings.send_timeout_s
            writer = BodyWriter(send, {JOB_HEADER: status.job_id}, self._yielder, timeout_s=timeout_s)
            await writer.send_all(_parts_of(answer))

    async def _result(self) -> dict[str, Any]:
        """Return the member `result`. It is null while the job is open, and once the result has expired."""
        if self._status.outcome is None:
            return {"result": None}
        try:
            result = await self._client.packed_result(self._status.job_id, tenant=self._status.tenant)
        except NotFoundError as error:
            if error.code != "result_expired":
                raise
            return {"result": None, "result_expired": True}
        return {"result": None if result is None or result.usage is None else result_object(result)}


async def _parts_of(answer: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    for part in json_parts(answer):
        yield part


class JobStream(EventStream):
    """The chunks of a job as events. A caller that leaves ends no background job."""

    def __init__(self, request: Request, job_id: str, start: StreamStart, *, with_waiting: bool) -> None:
        """`with_waiting`: send events with the queue position and the prompt progress before the first chunk."""
        super().__init__(request)
        self._tenant = caller_of(request).tenant
        self._job_id = job_id
        self._start = start
        self._with_waiting = with_waiting

    @property
    def _is_new(self) -> bool:
        return self._start.index < 0

    def _error_event(self, error: PenstockError) -> bytes:
        return event(error_body(error))

    async def _send_events(self, writer: EventWriter) -> None:
        job = await self._client.attach(self._job_id, after=self._start.read_after, tenant=self._tenant)
        writer.headers[JOB_HEADER] = job.id
        self._show_position(job, writer)
        encoder = JobEncoder(self._start)
        # A resumed stream checks its first chunk.
        sink = EventSink(encoder, writer) if self._start.end is None else None
        async with aclosing(batches_of([job], sink, with_waiting=self._with_waiting)) as batches:
            async for batch in batches:
                if isinstance(batch, Waiting):
                    await writer.write(encoder.waiting(job.id, batch.update))
                else:
                    await self._write(encoder, batch, writer)
