"""What the app needs to serve one API: its routes, the bodies that they take, its errors, and its background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from penstock.contract.job import SubmitOptions
from penstock.gateway.budget import SharedBudget
from penstock.gateway.errors import ErrorShape, ErrorShapes
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.open_feeds import OpenFeeds
from penstock.gateway.request.generation import GenerationRequest
from penstock.gateway.request.reading import Parser, RequestReader
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.answer import Answers, WholeSender
from penstock.producer.client import AsyncClient
from penstock.producer.client.request import Prompt
from penstock.producer.files.service import Files
from penstock.producer.parsed_body import RequestBody
from penstock.runtime.event_loop import LoopYielder


@dataclass(frozen=True, slots=True)
class Services:
    """What a gateway has once. The function `routes` of an API passes to each route what that one needs."""

    client: AsyncClient
    settings: GatewaySettings
    metrics: GatewayMetrics
    errors: ErrorShapes
    parser: Parser
    reader: RequestReader
    answers: Answers
    sender: WholeSender
    result_budget: SharedBudget
    """Bytes of large results and of records of responses that are held in memory while they are sent."""
    open_feeds: OpenFeeds
    yielder: LoopYielder
    files: Files
    apis: Sequence[HttpDialect]
    """All APIs of the gateway. An API that shows or takes something of others reads it here."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the gateway stops: endless streams end, so that it need not cut them off."""

    @property
    def public_paths(self) -> frozenset[str]:
        """The paths of all APIs that need no API key."""
        return frozenset(path for api in self.apis for path in api.public_paths)


Complete = Callable[[GenerationRequest], Awaitable[GenerationRequest]]
"""Adds to a request what it needs beside its body, such as earlier answers."""


PrepareJob = Callable[[Request, bytes], Awaitable[tuple[Prompt, SubmitOptions]]]
"""Checks the body of a job, and returns its prompt and the options of its submission by this caller."""


@dataclass(frozen=True, slots=True)
class JobBody:
    """How a job holds the body of an API, as `url` and `body`."""

    schema: type[RequestBody]
    complete: Callable[[Services], Complete] | None = None
    """Makes what completes such requests; None if they need nothing beside their body."""


@dataclass(frozen=True, slots=True)
class HttpDialect:
    """One API. The app serves those of its table; nothing else names an API."""

    routes: Callable[[Services], Sequence[BaseRoute | APIRouter]]
    """Plain routes, which take a body and bypass FastAPI, WebSockets, and FastAPI's routers."""
    bodies: Sequence[type[RequestBody]] = ()
    """The schemas of all bodies, each of which is a name of its module: the parser process imports it."""
    socket_bodies: Mapping[str, type[RequestBody]] = field(default_factory=dict)
    """The schemas of the paths that a message of a WebSocket may name."""
    job_bodies: Mapping[str, JobBody] = field(default_factory=dict)
    """What a job may hold, by its `url`. Each schema is a name of its module."""
    prepare_job: Callable[[Services], PrepareJob] | None = None
    """Makes what checks a body of `/v1/jobs`, for an API that stores jobs."""
    errors: ErrorShape | None = None
    """The shape of its errors, if that is not OpenAI's."""
    background: Mapping[str, Callable[[Services], Coroutine[Any, Any, None]]] = field(default_factory=dict)
    """What runs from the gateway's start to its end, by the task's name. A name that several APIs have runs once."""
    exposed_headers: Collection[str] = ()
    """Headers of its answers that pages of other sites may read (CORS), beside those of all answers."""
    public_paths: Collection[str] = ()
    """Paths that need no API key, because they reveal nothing of models, tenants and settings."""


class RouteIf(Route):
    """A plain route that takes only some requests of a path, which another API has too. The document leaves it out."""

    def __init__(self, path: str, endpoint: Callable[..., Any], takes: Callable[[Scope], bool]) -> None:
        super().__init__(path, endpoint, methods=["GET"], include_in_schema=False)
        self._takes = takes

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return how the request matches: not at all if the route does not take it."""
        found, child = super().matches(scope)
        if found is Match.NONE or not self._takes(scope):
            return Match.NONE, {}
        # As FastAPI's routes do, for the access log and the traces.
        return found, {**child, "route": self}
