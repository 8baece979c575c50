"""What the app needs to serve one API: its routes, the bodies that they take, and the shape of its errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter
from starlette.routing import Route

from penstock.gateway.budget import SharedBudget
from penstock.gateway.errors import ErrorShape
from penstock.gateway.open_feeds import OpenFeeds
from penstock.gateway.request.reading import RequestReader
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.answer import Answers, WholeSender
from penstock.producer.client import AsyncClient
from penstock.producer.files.service import Files
from penstock.producer.parsed_body import RequestBody
from penstock.runtime.event_loop import LoopYielder


@dataclass(frozen=True, slots=True)
class Services:
    """What a gateway has once. The function `routes` of an API passes to each route what that one needs."""

    client: AsyncClient
    settings: GatewaySettings
    reader: RequestReader
    answers: Answers
    sender: WholeSender
    result_budget: SharedBudget
    """Bytes of large results and of records of responses that are held in memory while they are sent."""
    open_feeds: OpenFeeds
    yielder: LoopYielder
    files: Files


@dataclass(frozen=True, slots=True)
class HttpDialect:
    """One API. The app serves those of its table; nothing else names an API."""

    routes: Callable[[Services], Sequence[Route | APIRouter]]
    """Plain routes, which take a body and bypass FastAPI, and FastAPI's routers."""
    bodies: Sequence[type[RequestBody]]
    """The schemas of all bodies, each of which is a name of its module: the parser process imports it."""
    socket_bodies: Mapping[str, type[RequestBody]] = field(default_factory=dict)
    """The schemas of the paths that a message of a WebSocket may name."""
    errors: ErrorShape | None = None
    """The shape of its errors, if that is not OpenAI's."""
