"""The HTTP responses of the jobs API: a job with its result, and a job's chunks as a stream of events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import NotFoundError, PenstockError
from penstock.contract.output import Chunk
from penstock.gateway.authentication import caller_of
from penstock.gateway.jobs.encoder import JobEncoder, StreamStart, result_object
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.openai.errors import error_body
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.shared_budget import SharedBudget
from penstock.gateway.stream.answer import JOB_HEADER
from penstock.gateway.stream.body_writer import PIECE_BYTES, BodyWriter
from penstock.gateway.stream.caller import CallerGoneError, hang_up, while_there
from penstock.gateway.stream.flow import is_large
from penstock.gateway.stream.framing import framing_of
from penstock.gateway.stream.sse import EventWriter, event
from penstock.producer.client import AsyncClient
from penstock.producer.client.job_objects import job_object
from penstock.producer.openai.json_parts import json_parts
from penstock.queue.broker.producer import JobStatus
from penstock.runtime.cooperative import LoopYielder


def links_of(job_id: str) -> dict[str, str]:
    """Return the paths of a job."""
    path = f"/v1/jobs/{job_id}"
    return {"self": path, "stream": f"{path}/stream", "cancel": path}


class JobAnswer(Response):
    """A job with its result, if it has ended. The result is encoded and sent in pieces."""

    def __init__(self, request: Request, status: JobStatus) -> None:
        super().__init__()
        self._client: AsyncClient = request.app.state.client
        self._yielder: LoopYielder = request.app.state.yielder
        self._result_budget: SharedBudget = request.app.state.result_budget
        self._status = status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Fetch the result and send the answer."""
        with contextlib.suppress(CallerGoneError):
            await while_there(self._answer(send), hang_up(receive))

    async def _answer(self, send: Send) -> None:
        status = self._status
        async with self._result_budget.taken(status.tenant, status.large_result_bytes):
            answer = job_object(status) | {"links": links_of(status.job_id)}
            if status.state == "queued":
                answer["num_waiting_ahead"] = status.num_waiting_ahead
            answer |= await self._result()
            if status.large_result_bytes > PIECE_BYTES:
                await self._yielder.wait()
            writer = BodyWriter(send, {JOB_HEADER: status.job_id}, self._yielder)
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


class JobStream(Response):
    """The chunks of a job as events. A caller that leaves ends no background job."""

    def __init__(self, request: Request, job_id: str, start: StreamStart) -> None:
        super().__init__()
        self._client: AsyncClient = request.app.state.client
        self._settings: GatewaySettings = request.app.state.settings
        self._metrics: GatewayMetrics = request.app.state.metrics
        self._yielder: LoopYielder = request.app.state.yielder
        self._tenant = caller_of(request).tenant
        self._job_id = job_id
        self._start = start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the job's chunks until its end."""
        writer, settings = EventWriter(send, framing_of(scope)), self._settings
        watch = writer.watch(
            first_wait_s=settings.first_chunk_wait_s,
            interval_s=settings.keep_alive_s,
            send_timeout_s=settings.send_timeout_s,
        )
        with contextlib.suppress(CallerGoneError), self._metrics.stream():
            await while_there(self._answer(writer), hang_up(receive), watch)

    async def _answer(self, writer: EventWriter) -> None:
        try:
            job = await self._client.attach(self._job_id, after=self._start.read_after, tenant=self._tenant)
            writer.headers[JOB_HEADER] = job.id
            encoder = JobEncoder(self._start)
            async with aclosing(job.batches()) as batches:
                async for batch in batches:
                    await self._write(encoder, batch, writer)
        except PenstockError as error:
            if not writer.started:
                raise
            self._metrics.refused(error)
            await writer.fail(error, event(error_body(error)))
        await writer.end()

    async def _write(self, encoder: JobEncoder, batch: list[Chunk], writer: EventWriter) -> None:
        slows_others = is_large(batch)
        for events in encoder.parts_of(batch):
            await writer.write(events)
            if slows_others:
                await self._yielder.wait()
