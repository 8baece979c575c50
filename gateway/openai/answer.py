"""An order carried out as one HTTP response, in one piece or as a stream.

Nothing is sent before the first chunk or the refusal of the queue is there, so that a refusal is a real HTTP status;
a stream stops waiting for that after `first_chunk_wait_s`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import PenstockError
from penstock.gateway.openai.errors import error_body
from penstock.gateway.openai.render import Renderer, finish_reason_of
from penstock.gateway.openai.tally import Tally
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.caller import CallerGoneError, while_connected
from penstock.gateway.stream.flow import Flow, Item, flow_of, results_of
from penstock.gateway.stream.order import Order, open_jobs
from penstock.gateway.stream.sse import DONE, KEEP_ALIVE, EventWriter, event
from penstock.producer.client import AsyncClient, AsyncJob

JOB_HEADER = "X-Penstock-Job"


class Answer(Response):
    """What both ways share: the jobs live as long as the response, and end with a caller that hangs up."""

    def __init__(self, request: Request, order: Order, dialect: type[Renderer], *, include_usage: bool = False) -> None:
        super().__init__()
        self._client: AsyncClient = request.app.state.client
        self._settings: GatewaySettings = request.app.state.settings
        self._order = order
        self._dialect = dialect
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers; raises a PenstockError only while nothing has been sent."""
        with contextlib.suppress(CallerGoneError):
            await while_connected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    def _renderer(self, jobs: Sequence[AsyncJob]) -> Renderer:
        return self._dialect(
            job_id=jobs[0].id,
            model=self._order.model,
            created_s=int(time.time()),
            choices_per_job=self._order.params.n,
            include_usage=self._include_usage,
        )


def _headers(jobs: Sequence[AsyncJob]) -> dict[str, str]:
    return {JOB_HEADER: ", ".join(job.id for job in jobs)}


class WholeAnswer(Answer):
    """One JSON object, once all is said."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with open_jobs(self._client, self._order) as jobs:
            results = await results_of(jobs)
        whole = self._renderer(jobs).whole(results)
        await JSONResponse(whole, headers=_headers(jobs))(scope, receive, send)


class StreamAnswer(Answer):
    """Server-sent events as the tokens come."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = EventWriter(send, send_timeout_s=self._settings.send_timeout_s)
        try:
            async with open_jobs(self._client, self._order) as jobs, flow_of(jobs) as flow:
                writer.headers.update(_headers(jobs))
                await self._relay(jobs, flow, writer)
        except PenstockError as error:
            if not writer.started:
                raise
            await writer.write(event(error_body(error)))
        await writer.end()

    async def _relay(self, jobs: Sequence[AsyncJob], flow: Flow, writer: EventWriter) -> None:
        rendering = _Rendering(self._renderer(jobs), Tally(num_jobs=len(jobs)))
        items = await flow.take(self._settings.first_chunk_wait_s)
        while True:
            events, error = rendering.events_of(items)
            if error is not None and not writer.started:
                raise error
            if events or not items:
                await writer.write(events or KEEP_ALIVE)
            if error is not None:
                raise error
            if rendering.tally.done:
                break
            items = await flow.take(self._settings.keep_alive_s)
        if self._include_usage:
            await writer.write(event(rendering.renderer.last_piece(rendering.tally.usage)))
        await writer.write(DONE)


@dataclass(frozen=True, slots=True)
class _Rendering:
    renderer: Renderer
    tally: Tally

    def events_of(self, items: Sequence[Item]) -> tuple[bytes, Exception | None]:
        """Events up to the first error, and that error."""
        events = []
        for index, item in items:
            try:
                chunk = self.tally.add(index, item)
            except Exception as error:
                return b"".join(events), error
            finish_reason = finish_reason_of(chunk.finish_reason)
            if chunk.text or finish_reason:
                piece = self.renderer.piece(index, chunk.choice, chunk.text, finish_reason)
                events.append(event(piece, f"{chunk.job_id}:{chunk.index}"))
        return b"".join(events), None
