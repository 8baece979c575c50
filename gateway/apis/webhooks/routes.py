"""`/v1/webhook_endpoints`, as OpenAI's API has it, with the deliveries of an endpoint beside it."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from fastapi import APIRouter, Request
from pydantic import Field, ValidationError
from starlette.routing import Route

from penstock.contract.errors import ForbiddenError, RequestError
from penstock.contract.fields import Wire
from penstock.contract.problems import request_error
from penstock.contract.tenant import ANONYMOUS
from penstock.contract.webhook import (
    EVENT_ID_PATTERN,
    EVENT_TYPES,
    MAX_NAME_CHARS,
    MAX_URL_CHARS,
    DeliveryState,
    EventType,
    WebhookEndpoint,
    endpoint_object,
    event_id_of,
)
from penstock.gateway.apis.webhooks.deliverer import Deliverer
from penstock.gateway.apis.webhooks.sender import Sender, SendError
from penstock.gateway.http.dialect import HttpDialect, Services
from penstock.gateway.request.reading import AFTER, RequestReader, caller_of
from penstock.producer.client import AsyncClient
from penstock.producer.client.webhooks import MAX_PAGE, delivery_object
from penstock.queue.webhooks.deliveries import no_endpoint

MAX_TESTS = 16
"""Test deliveries that a gateway makes at the same time."""
DEFAULT_PAGE = 20
MAX_LIMIT_DIGITS = 4

Body = TypeVar("Body", bound=Wire)
EventTypes = Annotated[list[EventType], Field(min_length=1, max_length=len(EVENT_TYPES))]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Url = Annotated[str, Field(min_length=1, max_length=MAX_URL_CHARS)]


class CreateBody(Wire):
    """Body of `POST /v1/webhook_endpoints`."""

    url: Url
    name: Name
    event_types: EventTypes


class UpdateBody(Wire):
    """Body of `POST /v1/webhook_endpoints/{id}`: what to change. `status` is penstock's own."""

    url: Url | None = None
    name: Name | None = None
    event_types: EventTypes | None = None
    status: Literal["enabled", "disabled"] | None = None


class RotateBody(Wire):
    """Body of `POST /v1/webhook_endpoints/{id}/rotate_secret`."""

    keep_old_secret_active_for_24_hours: bool | None = None


class TestBody(Wire):
    """Body of `POST /v1/webhook_endpoints/{id}/test`."""

    event_type: EventType


class NoBody(Wire):
    """A body without members."""


class WebhookRoutes:
    """The routes of a tenant's webhook endpoints."""

    def __init__(self, client: AsyncClient, reader: RequestReader, sender: Sender) -> None:
        self._webhooks = client.webhooks
        self._reader = reader
        self._sender = sender
        self._testing = asyncio.Semaphore(MAX_TESTS)
        self.router = APIRouter()
        one, delivery = "/v1/webhook_endpoints/{endpoint_id}", "/v1/webhook_endpoints/{endpoint_id}/deliveries"
        for path, method, endpoint in (
            ("/v1/webhook_event_types", "GET", self.event_types),
            ("/v1/webhook_endpoints", "POST", self.create),
            ("/v1/webhook_endpoints", "GET", self.list_endpoints),
            (one, "GET", self.show),
            (one, "POST", self.update),
            (one, "DELETE", self.delete),
            (f"{one}/rotate_secret", "POST", self.rotate_secret),
            (f"{one}/test", "POST", self.test),
            (delivery, "GET", self.deliveries),
            (f"{delivery}/redeliver", "POST", self.redeliver_dead),
            (f"{delivery}/{{event_id}}", "GET", self.delivery),
            (f"{delivery}/{{event_id}}/redeliver", "POST", self.redeliver),
        ):
            self.router.add_api_route(path, endpoint, methods=[method])

    async def event_types(self) -> dict[str, Any]:
        """List the types of events that an endpoint may subscribe to."""
        return {"object": "list", "data": list(EVENT_TYPES)}

    async def create(self, request: Request) -> dict[str, Any]:
        """Register an endpoint (`url`, `name`, `event_types`). Only this answer has its `signing_secret`."""
        tenant, body = _tenant_of(request), await self._body(request, CreateBody)
        self._sender.check_url(body.url)
        # This gateway's settings have allowed the URL.
        given: dict[str, Any] = {"name": body.name, "event_types": body.event_types, "tenant": tenant}
        endpoint, secret = await self._webhooks.create(body.url, **given, allow_private=True)
        return _with_secret(endpoint, secret)

    async def list_endpoints(self, request: Request) -> dict[str, Any]:
        """List the caller's endpoints, oldest first. `?limit=` and `?after=` (the id of the last one before)."""
        params = _params_of(request)
        after, limit = params.get(AFTER), _limit_of(params)
        found = await self._webhooks.all(tenant=_tenant_of(request))
        if after is not None:
            at = next((number for number, one in enumerate(found) if one.id == after), None)
            if at is None:
                raise no_endpoint(after)
            found = found[at + 1 :]
        return _page([endpoint_object(one) for one in found[:limit]], has_more=len(found) > limit)

    async def show(self, request: Request, endpoint_id: str) -> dict[str, Any]:
        """Return an endpoint."""
        return endpoint_object(await self._webhooks.get(endpoint_id, tenant=_tenant_of(request)))

    async def update(self, request: Request, endpoint_id: str) -> dict[str, Any]:
        """Change an endpoint. The `status` `enabled` lets one deliver again that a receiver's status 410 disabled."""
        changes = (await self._body(request, UpdateBody)).model_dump(exclude_none=True)
        if "url" in changes:
            self._sender.check_url(changes["url"])
        tenant = _tenant_of(request)
        return endpoint_object(await self._webhooks.update(endpoint_id, changes, allow_private=True, tenant=tenant))

    async def delete(self, request: Request, endpoint_id: str) -> dict[str, Any]:
        """Delete an endpoint and its deliveries."""
        await self._webhooks.delete(endpoint_id, tenant=_tenant_of(request))
        return {"id": endpoint_id, "object": "webhook_endpoint.deleted", "deleted": True}

    async def rotate_secret(self, request: Request, endpoint_id: str) -> dict[str, Any]:
        """Give an endpoint a new `signing_secret`.

        With `keep_old_secret_active_for_24_hours`, deliveries have a signature of either secret for that long.
        """
        keeps_old = bool((await self._body(request, RotateBody)).keep_old_secret_active_for_24_hours)
        rotated = self._webhooks.rotate_secret(endpoint_id, keep_old=keeps_old, tenant=_tenant_of(request))
        return _with_secret(*await rotated)

    async def test(self, request: Request, endpoint_id: str) -> dict[str, Any]:
        """Send a sample event of an `event_type` at once, and return the status of its answer."""
        kind = (await self._body(request, TestBody)).event_type
        endpoint = await self._webhooks.get(endpoint_id, tenant=_tenant_of(request))
        valid = await self._webhooks.secrets_of([endpoint_id])
        object_id = f"test_{secrets.token_hex(8)}"
        event = event_id_of(kind, object_id), kind, object_id, int(time.time())
        try:
            async with self._testing:
                answer = await self._sender.send(endpoint.url, *event, valid.get(endpoint_id, []))
        except SendError as error:
            raise RequestError(f"url: {error}", code="webhook_test_failed", param="url") from None
        shown = {"object": "webhook_endpoint.test", "webhook_endpoint_id": endpoint_id, "event_type": kind}
        return {**shown, "status_code": answer.status, "success": 200 <= answer.status < 300}

    async def deliveries(self, request: Request, endpoint_id: str) -> dict[str, Any]:
        """List deliveries of an endpoint.

        `?status=` (`pending`, `delivered` or `dead`, the default), `?limit=`, `?after=`. Ended ones come
        newest first. Dead ones are kept for 7 days, and the newest 1,000 delivered ones for a day.
        """
        params = _params_of(request, "status")
        state = cast(DeliveryState, params.get("status", "dead"))
        if state not in get_args(DeliveryState):
            raise RequestError(f"status must be one of {', '.join(get_args(DeliveryState))}", param="status")
        after, limit = params.get(AFTER), _limit_of(params)
        if after is not None:
            _check_event_id(after, AFTER)
        page = await self._webhooks.deliveries(endpoint_id, state, after=after, limit=limit, tenant=_tenant_of(request))
        shown = [delivery_object(one) for one in page.deliveries]
        return {**_page(shown, has_more=page.next_after is not None), "next": page.next_after}

    async def delivery(self, request: Request, endpoint_id: str, event_id: str) -> dict[str, Any]:
        """Return one delivery, with its attempts and the last answer."""
        _check_event_id(event_id)
        return delivery_object(await self._webhooks.delivery(endpoint_id, event_id, tenant=_tenant_of(request)))

    async def redeliver(self, request: Request, endpoint_id: str, event_id: str) -> dict[str, Any]:
        """Deliver an event once more that is dead or delivered. Its id stays the same."""
        await self._body(request, NoBody)
        _check_event_id(event_id)
        tenant = _tenant_of(request)
        await self._webhooks.redeliver(endpoint_id, [event_id], tenant=tenant)
        return delivery_object(await self._webhooks.delivery(endpoint_id, event_id, tenant=tenant))

    async def redeliver_dead(self, request: Request, endpoint_id: str) -> dict[str, Any]:
        """Deliver all dead events of an endpoint once more, and return their number."""
        await self._body(request, NoBody)
        number = await self._webhooks.redeliver(endpoint_id, tenant=_tenant_of(request))
        return {"object": "webhook_endpoint.redelivery", "webhook_endpoint_id": endpoint_id, "count": number}

    async def _body(self, request: Request, schema: type[Body]) -> Body:
        # Clients send neither a body nor a content type if a request needs no fields.
        is_empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
        try:
            return schema.model_validate_json(b"{}" if is_empty else await self._reader.small_json(request) or b"{}")
        except ValidationError as error:
            raise request_error(error) from None


def _tenant_of(request: Request) -> str:
    tenant = caller_of(request).tenant
    if tenant == ANONYMOUS:
        raise ForbiddenError("webhook endpoints need an API key: callers without one share a tenant")
    return tenant


def _params_of(request: Request, *known: str) -> dict[str, str]:
    params = dict(request.query_params)
    accepted = (*known, "limit", AFTER)
    if unknown := sorted(params.keys() - set(accepted)):
        name = unknown[0][:64]
        raise RequestError(f"{name}: {request.url.path} accepts only {', '.join(accepted)}", param=name)
    return params


def _limit_of(params: dict[str, str]) -> int:
    text = params.get("limit", str(DEFAULT_PAGE))
    limit = int(text) if text.isdecimal() and len(text) <= MAX_LIMIT_DIGITS else 0
    if not 1 <= limit <= MAX_PAGE:
        raise RequestError(f"limit must be from 1 to {MAX_PAGE}", param="limit")
    return limit


def _check_event_id(event_id: str, name: str = "event_id") -> None:
    if re.fullmatch(EVENT_ID_PATTERN, event_id) is None:
        raise RequestError(f"{name} must be the id of an event, such as evt_{'0' * 32}", param=name)


def _with_secret(endpoint: WebhookEndpoint, secret: str) -> dict[str, Any]:
    return endpoint_object(endpoint) | {"signing_secret": secret}


def _page(shown: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    ids = [str(one.get("id") or one["event_id"]) for one in shown]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": has_more}


def _routes(services: Services) -> list[Route | APIRouter]:
    return [
        WebhookRoutes(
            services.client, services.reader, Sender(services.settings, services.client.servers.clock.now_s)
        ).router
    ]


async def _deliver(services: Services) -> None:
    client = services.client
    await Deliverer(client, Sender(services.settings, client.servers.clock.now_s), services.settings).run()


WEBHOOKS = HttpDialect(_routes, background={"penstock webhooks": _deliver})
