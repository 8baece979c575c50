"""The webhook endpoints of all tenants, and their secrets, which only gateways and the operator can read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from pydantic import ValidationError
from redis.asyncio import Redis

from penstock.contract.errors import ConflictError, NotFoundError
from penstock.contract.webhook import MAX_ENDPOINTS, WebhookEndpoint, WebhookSecrets
from penstock.queue import keys
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import Patience, retried, translated

_CONFIG = f"{keys.WEBHOOKS}:config"
MAX_SHOWN_CHARS = 64


async def call(redis: Redis, operation: str, *arguments: Any) -> Any:
    """Run one operation of webhooks.lua."""
    return await scripts.call_at(redis, "webhooks", _CONFIG, operation, scripts.packed(arguments))


class EndpointStore:
    """The endpoints in Redis. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis = cast(Any, redis)

    @retried
    async def of(self, tenant: str) -> list[WebhookEndpoint]:
        """Return a tenant's endpoints, oldest first. An unreadable record is left out."""
        with translated():
            ids = await self._redis.zrange(f"{keys.WEBHOOKS}:tenant:{tenant}", 0, -1)
            found = await self._redis.hmget(f"{keys.WEBHOOKS}:endpoints", ids) if ids else []
        return [one for one in map(_decoded, found) if one is not None]

    @retried
    async def get(self, endpoint_id: str, tenant: str) -> WebhookEndpoint:
        """Return an endpoint of a tenant. Raises NotFoundError."""
        with translated():
            data = await self._redis.hget(f"{keys.WEBHOOKS}:endpoints", endpoint_id)
        endpoint = _decoded(data)
        if endpoint is None or endpoint.tenant != tenant:
            raise no_endpoint(endpoint_id)
        return endpoint

    @retried
    async def known_of(self, endpoint_ids: Sequence[str]) -> dict[str, WebhookEndpoint]:
        """Return the endpoints of these ids, those of any tenant, by id. Unknown ones are missing."""
        with translated():
            found = await self._redis.hmget(f"{keys.WEBHOOKS}:endpoints", endpoint_ids) if endpoint_ids else []
        return {one.id: one for one in map(_decoded, found) if one is not None}

    @retried
    async def create(self, endpoint: WebhookEndpoint, secrets: WebhookSecrets) -> None:
        """Store a new endpoint. Raises ConflictError if the tenant has too many."""
        with translated():
            # First, so that no endpoint is without a secret.
            await self._redis.hset(keys.WEBHOOK_SECRETS, endpoint.id, secrets.model_dump_json())
        record = endpoint.model_dump_json()
        if await call(self._redis, "put", endpoint.id, endpoint.tenant, record, MAX_ENDPOINTS) != b"OK":
            with translated():
                await self._redis.hdel(keys.WEBHOOK_SECRETS, endpoint.id)
            message = f"this tenant has {MAX_ENDPOINTS} webhook endpoints, the limit; delete one that is not used"
            raise ConflictError(message, code="too_many_webhook_endpoints")

    @retried
    async def update(self, endpoint: WebhookEndpoint) -> None:
        """Store a changed endpoint. Raises NotFoundError if it was deleted meanwhile."""
        record = endpoint.model_dump_json()
        if await call(self._redis, "put", endpoint.id, endpoint.tenant, record, 0) != b"OK":
            raise no_endpoint(endpoint.id)

    @retried
    async def delete(self, endpoint_id: str, tenant: str) -> None:
        """Delete an endpoint with its secrets and its deliveries. Raises NotFoundError."""
        if await call(self._redis, "remove", endpoint_id, tenant) != b"OK":
            raise no_endpoint(endpoint_id)
        with translated():
            await self._redis.hdel(keys.WEBHOOK_SECRETS, endpoint_id)
        while await call(self._redis, "clear", endpoint_id) != b"OK":
            pass

    @retried
    async def secrets_of(self, endpoint_ids: Sequence[str]) -> dict[str, WebhookSecrets]:
        """Return the secrets of these endpoints, by id. Those of deleted ones are missing."""
        with translated():
            found = await self._redis.hmget(keys.WEBHOOK_SECRETS, endpoint_ids) if endpoint_ids else []
        pairs = zip(endpoint_ids, found, strict=True)
        return {name: WebhookSecrets.model_validate_json(data) for name, data in pairs if data is not None}

    @retried
    async def set_secrets(self, endpoint_id: str, secrets: WebhookSecrets) -> None:
        """Replace the secrets of an endpoint."""
        with translated():
            await self._redis.hset(keys.WEBHOOK_SECRETS, endpoint_id, secrets.model_dump_json())


def no_endpoint(endpoint_id: str) -> NotFoundError:
    """Return the error for an endpoint that is unknown, deleted, or of another tenant."""
    message = f"no webhook endpoint {endpoint_id[:MAX_SHOWN_CHARS]!r}"
    return NotFoundError(message, code="webhook_endpoint_not_found", param="webhook_endpoint_id")


def _decoded(data: bytes | None) -> WebhookEndpoint | None:
    try:
        return None if data is None else WebhookEndpoint.model_validate(json.loads(data))
    except (ValidationError, ValueError):
        return None  # A damaged record hides this endpoint alone.
