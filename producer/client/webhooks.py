"""Webhook endpoints of a tenant, their deliveries, and events that are told to them, as `AsyncClient.webhooks`."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeVar, cast

from pydantic import ValidationError
from redis.asyncio import Redis

from penstock.contract.errors import RequestError
from penstock.contract.problems import request_error
from penstock.contract.webhook import (
    OLD_SECRET_LIFE_S,
    DeliveryState,
    EventType,
    WebhookEndpoint,
    WebhookSecrets,
    checked_url,
    hint_of,
    new_endpoint_id,
    new_secret,
)
from penstock.contract.webhook_addresses import is_address, is_open_address
from penstock.queue.broker.connection import Patience
from penstock.queue.webhooks.deliveries import Delivery, DeliveryPage, DeliveryQueue, EndpointStore, WebhookEvent

SUBSCRIBED_TTL_S = 2.0
"""Seconds for which the endpoints of a tenant are remembered."""
MAX_REMEMBERED = 4096
MAX_PAGE = 100
_REDELIVERED_AT_ONCE = 100
T = TypeVar("T")


class Webhooks:
    """A client's webhook endpoints. Every method raises UnavailableError when Redis is unreachable.

    Gateways deliver, so without a running gateway deliveries wait. `tenant`: whose endpoints; by default the client's.
    """

    def __init__(
        self,
        redis: Redis,
        patience: Patience,
        tenant: str,
        *,
        clock: Callable[[], float] = time.time,
        is_away: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_away`: whether the Redis that has the endpoints is away, while jobs of other ones are submitted."""
        self._is_away = is_away
        self.queue = DeliveryQueue(redis, patience)
        self._endpoints = EndpointStore(redis, patience)
        self._tenant = tenant
        self._clock = clock
        # Keyed by id: tenant.
        self._remembered: dict[str, tuple[float, list[WebhookEndpoint]]] = {}

    async def create(
        self,
        url: str,
        *,
        name: str,
        event_types: Iterable[EventType],
        allow_private: bool = False,
        tenant: str | None = None,
    ) -> tuple[WebhookEndpoint, str]:
        """Register an endpoint. Return it with its signing secret, which cannot be read again later.

        Gateways refuse `http://` and addresses that are not public, unless their settings `webhook_allow_http` and
        `webhook_allowed_networks` say otherwise; `allow_private` registers such a URL for them. Raises
        RequestError that names the wrong field, and ConflictError if the tenant has too many endpoints.
        """
        _check_url(url, allow_private=allow_private)
        secret, now_s = new_secret(), int(self._clock())
        fields = {"id": new_endpoint_id(), "tenant": tenant or self._tenant, "created_at": now_s, "updated_at": now_s}
        given = {"url": url, "name": name, "event_types": tuple(event_types), "signing_secret_hint": hint_of(secret)}
        endpoint = _checked({**fields, **given})
        await self._endpoints.create(endpoint, WebhookSecrets(secret=secret))
        self._remembered.pop(endpoint.tenant, None)
        return endpoint, secret

    async def all(self, *, tenant: str | None = None) -> list[WebhookEndpoint]:
        """Return all endpoints, oldest first."""
        return await self._endpoints.of(tenant or self._tenant)

    async def get(self, endpoint_id: str, *, tenant: str | None = None) -> WebhookEndpoint:
        """Return an endpoint. Raises NotFoundError."""
        return await self._endpoints.get(endpoint_id, tenant or self._tenant)

    async def update(
        self, endpoint_id: str, changes: Mapping[str, Any], *, allow_private: bool = False, tenant: str | None = None
    ) -> WebhookEndpoint:
        """Change `url`, `name`, `event_types` or `status` of an endpoint, and return it.

        The status `enabled` lets an endpoint have deliveries again that a receiver's status 410, or a URL that gateways
        refuse, disabled. `allow_private`: as for `create`. Raises NotFoundError, and RequestError that names the wrong
        field.
        """
        endpoint = await self.get(endpoint_id, tenant=tenant)
        if "url" in changes:
            _check_url(changes["url"], allow_private=allow_private)
        reason = None if changes.get("status") == "enabled" else endpoint.disabled_reason
        if endpoint.status == "enabled" and changes.get("status") == "disabled":
            reason = "its owner disabled it"
        changed = _checked({**endpoint.model_dump(), **changes, "disabled_reason": reason})
        if changed == endpoint:
            return endpoint
        changed = changed.model_copy(update={"updated_at": int(self._clock())})
        await self._endpoints.update(changed)
        self._remembered.pop(changed.tenant, None)
        return changed

    async def disable(self, endpoint: WebhookEndpoint, reason: str) -> None:
        """Disable an endpoint for this reason. Its pending deliveries become dead."""
        changes = {"status": "disabled", "disabled_reason": reason, "updated_at": int(self._clock())}
        await self._endpoints.update(endpoint.model_copy(update=changes))

    async def delete(self, endpoint_id: str, *, tenant: str | None = None) -> None:
        """Delete an endpoint and its deliveries. Raises NotFoundError."""
        await self._endpoints.delete(endpoint_id, tenant or self._tenant)
        self._remembered.pop(tenant or self._tenant, None)

    async def rotate_secret(
        self, endpoint_id: str, *, keep_old: bool = False, tenant: str | None = None
    ) -> tuple[WebhookEndpoint, str]:
        """Give an endpoint a new signing secret, and return both. With `keep_old`, the old one is valid for 24 hours.

        Until then each delivery has a signature of either secret. Raises NotFoundError.
        """
        endpoint = await self.get(endpoint_id, tenant=tenant)
        known = await self._endpoints.secrets_of([endpoint_id])
        secret, old, now_s = new_secret(), known.get(endpoint_id), self._clock()
        secrets = WebhookSecrets(secret=secret)
        if keep_old and old is not None:
            secrets = WebhookSecrets(secret=secret, old_secret=old.secret, old_until_s=now_s + OLD_SECRET_LIFE_S)
        await self._endpoints.set_secrets(endpoint_id, secrets)
        changed = endpoint.model_copy(update={"signing_secret_hint": hint_of(secret), "updated_at": int(now_s)})
        await self._endpoints.update(changed)
        return changed, secret

    async def secrets_of(self, endpoint_ids: Sequence[str]) -> dict[str, list[str]]:
        """Return the valid secrets of endpoints, by id. Those of deleted endpoints are missing."""
        found, now_s = await self._endpoints.secrets_of(endpoint_ids), self._clock()
        return {endpoint_id: secrets.valid_at(now_s) for endpoint_id, secrets in found.items()}

    async def deliveries(
        self,
        endpoint_id: str,
        state: DeliveryState = "dead",
        *,
        after: str | None = None,
        limit: int = 20,
        tenant: str | None = None,
    ) -> DeliveryPage:
        """Return deliveries of an endpoint: `pending`, `dead` (7 days) or `delivered` ones (the newest 1,000, a day).

        `after`: the `next_after` of the page before. Raises NotFoundError, and RequestError for a wrong limit.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise RequestError(f"limit must be from 1 to {MAX_PAGE}, not {limit}", param="limit")
        await self.get(endpoint_id, tenant=tenant)
        return await self.queue.page(endpoint_id, state, after, limit)

    async def delivery(self, endpoint_id: str, event_id: str, *, tenant: str | None = None) -> Delivery:
        """Return one delivery. Raises NotFoundError."""
        await self.get(endpoint_id, tenant=tenant)
        return await self.queue.get(endpoint_id, event_id)

    async def redeliver(
        self, endpoint_id: str, event_ids: Sequence[str] | None = None, *, tenant: str | None = None
    ) -> int:
        """Deliver ended deliveries once more, by default all dead ones. Return their number. Raises NotFoundError."""
        await self.get(endpoint_id, tenant=tenant)
        if event_ids is not None:
            parts = [event_ids[at : at + _REDELIVERED_AT_ONCE] for at in range(0, len(event_ids), _REDELIVERED_AT_ONCE)]
            return sum([await self.queue.again(endpoint_id, part) for part in parts])
        number = 0
        while True:
            # Each that becomes pending leaves the list, so the first page has what is left.
            page = await self.queue.page(endpoint_id, "dead", None, _REDELIVERED_AT_ONCE)
            number += (found := await self.queue.again(endpoint_id, [one.event_id for one in page.deliveries]))
            if not found or page.next_after is None:
                return number

    async def notify(
        self,
        event_type: EventType,
        object_id: str,
        *,
        tenant: str | None = None,
        endpoint_ids: Sequence[str] | None = None,
    ) -> None:
        """Tell endpoints of an event, by default all that subscribed to its type. A repeated call adds no delivery."""
        owner = tenant or self._tenant
        names = await self.subscribed(owner, [event_type]) if endpoint_ids is None else tuple(endpoint_ids)
        if names:
            event = WebhookEvent(event_type, object_id, owner, round(1000 * self._clock()), names)
            await self.queue.record(event)

    async def subscribed(self, tenant: str, event_types: Sequence[str]) -> tuple[str, ...]:
        """Return the enabled endpoints that subscribed to one of these types, as they were 2 s ago at the most.

        While the Redis that has the endpoints is away, they are those that were read last.
        """
        now_s = time.monotonic()
        until_s, found = self._remembered.get(tenant, (0.0, []))
        if until_s <= now_s and not (tenant in self._remembered and self._is_away()):
            found = await self._endpoints.of(tenant)
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[tenant] = (now_s + SUBSCRIBED_TTL_S, found)
        wanted = frozenset(event_types)
        return tuple(one.id for one in found if one.status == "enabled" and not wanted.isdisjoint(one.event_types))

    async def known_of(self, endpoint_ids: Sequence[str], tenant: str) -> tuple[str, ...]:
        """Return those of the ids that name an endpoint of the tenant."""
        known = await self._endpoints.known_of(endpoint_ids)
        return tuple(name for name in endpoint_ids if name in known and known[name].tenant == tenant)

    async def check(self, endpoint_ids: Sequence[str], tenant: str) -> None:
        """Raise RequestError for an id that names no endpoint of the tenant."""
        known = await self.known_of(endpoint_ids, tenant)
        for endpoint_id in endpoint_ids:
            if endpoint_id not in known:
                message = f"webhooks: no webhook endpoint {endpoint_id!r}; create it with POST /v1/webhook_endpoints"
                raise RequestError(message, code="webhook_endpoint_not_found", param="webhooks")


class Caller(Protocol):
    """Runs a coroutine to its end."""

    def __call__(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result."""


class SyncWebhooks:
    """Webhook endpoints for synchronous callers, as `Client.webhooks`; see `Webhooks`, whose methods it has."""

    def __init__(self, webhooks: Webhooks, call: Caller) -> None:
        self._webhooks = webhooks
        self._call = call

    def create(
        self,
        url: str,
        *,
        name: str,
        event_types: Iterable[EventType],
        allow_private: bool = False,
        tenant: str | None = None,
    ) -> tuple[WebhookEndpoint, str]:
        """Register an endpoint. Return it with its signing secret, which cannot be read again later."""
        given = {"name": name, "event_types": event_types, "allow_private": allow_private, "tenant": tenant}
        return self._call(self._webhooks.create(url, **cast(Any, given)))

    def all(self, *, tenant: str | None = None) -> list[WebhookEndpoint]:
        """Return all endpoints, oldest first."""
        return self._call(self._webhooks.all(tenant=tenant))

    def get(self, endpoint_id: str, *, tenant: str | None = None) -> WebhookEndpoint:
        """Return an endpoint."""
        return self._call(self._webhooks.get(endpoint_id, tenant=tenant))

    def update(
        self, endpoint_id: str, changes: Mapping[str, Any], *, allow_private: bool = False, tenant: str | None = None
    ) -> WebhookEndpoint:
        """Change `url`, `name`, `event_types` or `status` of an endpoint, and return it."""
        return self._call(self._webhooks.update(endpoint_id, changes, allow_private=allow_private, tenant=tenant))

    def delete(self, endpoint_id: str, *, tenant: str | None = None) -> None:
        """Delete an endpoint and its deliveries."""
        self._call(self._webhooks.delete(endpoint_id, tenant=tenant))

    def rotate_secret(
        self, endpoint_id: str, *, keep_old: bool = False, tenant: str | None = None
    ) -> tuple[WebhookEndpoint, str]:
        """Give an endpoint a new signing secret, and return both. With `keep_old`, the old one is valid for a day."""
        return self._call(self._webhooks.rotate_secret(endpoint_id, keep_old=keep_old, tenant=tenant))

    def deliveries(
        self,
        endpoint_id: str,
        state: DeliveryState = "dead",
        *,
        after: str | None = None,
        limit: int = 20,
        tenant: str | None = None,
    ) -> DeliveryPage:
        """Return a page of deliveries of an endpoint: `pending`, `dead` or `delivered` ones."""
        return self._call(self._webhooks.deliveries(endpoint_id, state, after=after, limit=limit, tenant=tenant))

    def delivery(self, endpoint_id: str, event_id: str, *, tenant: str | None = None) -> Delivery:
        """Return one delivery."""
        return self._call(self._webhooks.delivery(endpoint_id, event_id, tenant=tenant))

    def redeliver(self, endpoint_id: str, event_ids: Sequence[str] | None = None, *, tenant: str | None = None) -> int:
        """Deliver ended deliveries once more, by default all dead ones. Return their number."""
        return self._call(self._webhooks.redeliver(endpoint_id, event_ids, tenant=tenant))


def _check_url(url: str, *, allow_private: bool) -> None:
    """Raise RequestError for a URL to which no gateway delivers, or with its own settings only one that allows it."""
    host = checked_url(url).hostname or ""
    if allow_private:
        return
    is_inside = is_address(host) and not is_open_address(host)
    if is_inside or not url.lower().startswith("https:"):
        problem = f"the address {host} is not public" if is_inside else "must begin with https://"
        message = f"url: {problem} (allow_private=True registers it, for gateways whose settings allow it)"
        raise RequestError(message, code="forbidden_webhook_url", param="url")


def _checked(fields: Mapping[str, Any]) -> WebhookEndpoint:
    try:
        return WebhookEndpoint.model_validate(fields)
    except ValidationError as error:
        raise request_error(error) from None


def delivery_object(delivery: Delivery) -> dict[str, Any]:
    """Return a delivery as a plain JSON object. Times are Unix milliseconds, null for none."""
    shown = asdict(delivery)
    times = {name: shown.pop(name) or None for name in ("created_ms", "next_ms", "ended_ms")}
    return {
        "object": "webhook_endpoint.delivery",
        "event_id": shown["event_id"],
        "webhook_endpoint_id": shown["endpoint_id"],
        "status": shown["state"],
        "event_type": shown["type"],
        "data": {"id": shown["object_id"]},
        "attempts": shown["attempts"],
        "answer": shown["answer"] or None,
        **times,
    }
