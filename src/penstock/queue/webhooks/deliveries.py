"""Webhook endpoints of all tenants, and the deliveries to them: from the untold ends of jobs to the last attempt.

Only gateways and the operator can read the secrets of endpoints.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from pydantic import ValidationError
from redis.asyncio import Redis

from penstock.contract.errors import ConflictError, DamagedRecordError, NotFoundError
from penstock.contract.job import is_job_id
from penstock.contract.output import Outcome
from penstock.contract.webhook import (
    EVENT_TYPES,
    MAX_ENDPOINTS,
    DeliveryState,
    WebhookEndpoint,
    WebhookSecrets,
    event_id_of,
)
from penstock.queue import keys
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import Patience, retried, translated
from penstock.queue.record_fields import MAX_TIME_MS, RecordFields, executed, is_text, sums_of
from penstock.queue.results import PackedResult
from penstock.queue.wire import WireError

# Endpoints, with their secrets.

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
        """Return an endpoint of a tenant. Raises NotFoundError, and DamagedRecordError."""
        with translated():
            data = await self._redis.hget(f"{keys.WEBHOOKS}:endpoints", endpoint_id)
            endpoint = _decoded(data)
            if data is not None and endpoint is None:
                # Whose it is stands in the list of the tenant alone.
                if await self._redis.zscore(f"{keys.WEBHOOKS}:tenant:{tenant}", endpoint_id) is None:
                    raise no_endpoint(endpoint_id)
                raise DamagedRecordError(f"the record of webhook endpoint {endpoint_id} is damaged; delete it")
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
        """Return the secrets of these endpoints, by id. Those of deleted ones, and damaged ones, are missing."""
        with translated():
            found = await self._redis.hmget(keys.WEBHOOK_SECRETS, endpoint_ids) if endpoint_ids else []
        pairs = [(name, _secrets_of(data)) for name, data in zip(endpoint_ids, found, strict=True)]
        return {name: secrets for name, secrets in pairs if secrets is not None}

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


def _secrets_of(data: bytes | None) -> WebhookSecrets | None:
    try:
        return None if data is None else WebhookSecrets.model_validate_json(data)
    except ValidationError:
        return None


# Deliveries.

DAMAGED = "the record of the delivery or of its endpoint is damaged"
"""The answer of a delivery that is given up for that."""
MAX_PENDING_OF_TENANT = 100_000
"""Pending deliveries of a tenant. Further ones are dead at once, so that their owner may deliver them again."""
UNTOLD_PAGE = 128
AttemptOutcome = Literal["delivered", "retry", "dead"]
_RESPONSE_OF = {"cancelled": "cancelled", "succeeded": "completed"}
_LISTS: dict[DeliveryState, str] = {"pending": "due", "delivered": "delivered", "dead": "dead"}


class WebhookEvent(NamedTuple):
    """An event: what has happened to which object, and when."""

    type: str
    object_id: str
    tenant: str
    created_ms: int
    endpoint_ids: tuple[str, ...]

    @property
    def event_id(self) -> str:
        """The id of the event, which follows from its type and object."""
        return event_id_of(self.type, self.object_id)


@dataclass(frozen=True, slots=True)
class TakenDelivery:
    """A delivery whose lease this process has. `age_ms`: since it was recorded, or since it was begun again."""

    endpoint: WebhookEndpoint
    event_id: str
    type: str
    object_id: str
    created_ms: int
    attempts: int
    age_ms: int
    holder: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delivery as its owner sees it. Times are Redis ms, 0 for none."""

    event_id: str
    endpoint_id: str
    state: str
    type: str
    object_id: str
    attempts: int
    answer: str
    """What the last attempt brought: a status, or why there is none."""
    created_ms: int
    next_ms: int
    ended_ms: int


class DeliveryPage(NamedTuple):
    """Deliveries of an endpoint, and behind which event the next page begins; None at the end."""

    deliveries: list[Delivery]
    next_after: str | None


class WebhookStats(NamedTuple):
    """Pending deliveries by tenant, and counters of attempts: `delivered`, `retried` and `dead`."""

    pending: Mapping[str, int]
    counts: Mapping[str, int]


class DeliveryQueue:
    """The deliveries in Redis. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis = cast(Any, redis)
        self._endpoints = EndpointStore(redis)

    # From the untold ends to the deliveries

    @retried
    async def has_endpoints(self) -> bool:
        """Return whether any tenant has an endpoint, or had one whose deliveries are not dropped yet."""
        with translated():
            return bool(await self._redis.exists(f"{keys.WEBHOOKS}:endpoints", f"{keys.WEBHOOKS}:next"))

    @retried
    async def collect(self, pools: Sequence[str], server: Redis | None = None) -> int:
        """Hand up to UNTOLD_PAGE ends of jobs of each pool over to the endpoints. Return their number.

        `server`: the Redis that has these pools, if it is another one than that of the endpoints.

        An end leaves P:untold once its deliveries are stored. So a death in between hands it over again, which adds
        no further delivery.
        """
        redis = self._redis if server is None else cast(Any, server)
        with translated():
            async with redis.pipeline(transaction=False) as pipe:
                for pool in pools:
                    pipe.xrange(keys.untold(pool), "-", "+", UNTOLD_PAGE)
                found = await pipe.execute(raise_on_error=False)
        number = 0
        for pool, entries in zip(pools, found, strict=True):
            if isinstance(entries, Exception) or not entries:
                continue  # A damaged stream concerns its pool alone.
            events = [await _event_of(redis, pool, entry_id, fields) for entry_id, fields in entries]
            await self._record([event for event in events if event is not None])
            done = [value for (entry_id, fields) in entries for value in (entry_id, _tenant_of(fields))]
            await scripts.call(redis, "untold", pool, *done)
            number += len(entries)
        return number

    @retried
    async def drop_ends(self, tenant: str, pool: str) -> None:
        """Remove the untold ends of a tenant's jobs from a pool."""
        start = "-"
        while True:
            with translated():
                entries = await self._redis.xrange(keys.untold(pool), start, "+", UNTOLD_PAGE)
            own = [entry_id for entry_id, fields in entries if _tenant_of(fields) == tenant]
            if own:
                await scripts.call(self._redis, "untold", pool, *(value for one in own for value in (one, tenant)))
            if len(entries) < UNTOLD_PAGE:
                return
            start = f"({entries[-1][0].decode()}"

    @retried
    async def record(self, event: WebhookEvent) -> None:
        """Record an event for those of its endpoints that subscribed to its type. A repeated call adds nothing."""
        await self._record([event])

    async def _record(self, events: Sequence[WebhookEvent]) -> None:
        known = await self._endpoints.known_of(sorted({name for event in events for name in event.endpoint_ids}))
        rows = [
            (name, event.event_id, event.tenant, event.type, event.object_id, event.created_ms)
            for event in events
            for name in event.endpoint_ids
            if (one := known.get(name)) is not None and one.tenant == event.tenant and event.type in one.event_types
        ]
        for at in range(0, len(rows), UNTOLD_PAGE):
            await call(self._redis, "add", MAX_PENDING_OF_TENANT, rows[at : at + UNTOLD_PAGE])

    # Attempts

    @retried
    async def take(
        self,
        most: int,
        most_of_endpoint: int,
        lease_ms: int,
        *,
        most_of_tenant: int | None = None,
        num_of_tenant: Mapping[str, int] | None = None,
    ) -> list[TakenDelivery]:
        """Lease up to `most` due deliveries, while each endpoint has at most `most_of_endpoint` leased ones.

        A tenant gets up to `most_of_tenant`, with those that this process makes already (`num_of_tenant`).
        """
        holder, known = secrets.token_hex(8), dict(num_of_tenant or {})
        limits = most, most_of_endpoint, most if most_of_tenant is None else most_of_tenant
        rows = await call(self._redis, "take", *limits, known, lease_ms, holder)
        taken = [(row, _taken(row, holder)) for row in rows]
        for endpoint_id, event_id in [row[:2] for row, one in taken if one is None]:
            await call(self._redis, "end_attempt", endpoint_id, event_id, holder, "dead", 0, DAMAGED)
        return [one for _, one in taken if one is not None]

    @retried
    async def end_attempt(self, taken: TakenDelivery, outcome: AttemptOutcome, answer: str, in_ms: int = 0) -> bool:
        """End an attempt. Return whether this process still had the lease."""
        given = taken.endpoint.id, taken.event_id, taken.holder, outcome, in_ms, answer
        return bool(await call(self._redis, "end_attempt", *given) == b"OK")

    @retried
    async def again(self, endpoint_id: str, event_ids: Sequence[str]) -> int:
        """Deliver up to 256 events once more that are dead or delivered. Return how many there were."""
        return int(await call(self._redis, "again", endpoint_id, list(event_ids)))

    # What owners and operators see

    @retried
    async def get(self, endpoint_id: str, event_id: str) -> Delivery:
        """Return one delivery. Raises NotFoundError, and DamagedRecordError."""
        (found,) = await self._read(endpoint_id, [event_id])
        if isinstance(found, DamagedRecordError):
            raise found
        if found is None:
            message = f"no delivery of event {event_id[:64]!r} to webhook endpoint {endpoint_id}"
            raise NotFoundError(message, code="delivery_not_found", param="event_id")
        return found

    @retried
    async def page(self, endpoint_id: str, state: DeliveryState, after: str | None, limit: int) -> DeliveryPage:
        """Return deliveries of an endpoint in one state: pending ones by their next attempt, ended ones newest first.

        `after`: the event behind which to continue. One that has left the list since is as good as the list's end.
        """
        key, newest_first = keys.webhook_list(_LISTS[state], endpoint_id), state != "pending"
        with translated():
            start = 0
            if after is not None:
                rank = await (self._redis.zrevrank if newest_first else self._redis.zrank)(key, after)
                if rank is None:
                    return DeliveryPage([], None)
                start = rank + 1
            event_ids = await self._redis.zrange(key, start, start + limit, desc=newest_first)
        names = [event_id.decode(errors="replace") for event_id in event_ids]
        shown = await self._read(endpoint_id, names[:limit])
        next_after = names[limit - 1] if len(names) > limit else None
        return DeliveryPage([one for one in shown if isinstance(one, Delivery)], next_after)

    async def _read(self, endpoint_id: str, event_ids: Iterable[str]) -> list[Delivery | DamagedRecordError | None]:
        names = list(event_ids)
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hgetall(keys.webhook_delivery(endpoint_id, name))
                    pipe.zscore(keys.webhook_list("due", endpoint_id), name)
                found = await executed(pipe)
        return [_delivery(endpoint_id, name, *found[2 * at : 2 * at + 2]) for at, name in enumerate(names)]

    @retried
    async def stats(self) -> WebhookStats:
        """Return the numbers for operators."""
        with translated():
            pending = await self._redis.hgetall(f"{keys.WEBHOOKS}:pending")
            counts = await self._redis.hgetall(f"{keys.WEBHOOKS}:counts")
        return WebhookStats(sums_of(pending), sums_of(counts))


async def _event_of(redis: Redis, pool: str, entry_id: bytes, fields: Mapping[bytes, bytes]) -> WebhookEvent | None:
    try:
        uuid, state, kind, tenant, *endpoint_ids = fields.get(b"e", b"").decode().split(" ")
    except ValueError:
        return None
    job_id, created_ms = f"{pool}.{uuid}", int(entry_id.partition(b"-")[0])
    if not is_job_id(job_id):
        return None
    if kind != "response":
        return WebhookEvent(f"job.{state}", job_id, tenant, created_ms, tuple(endpoint_ids))
    status = _RESPONSE_OF.get(state, "failed")
    if status == "completed" and await _is_cut(redis, job_id):
        status = "incomplete"
    return WebhookEvent(f"response.{status}", f"resp_{job_id}", tenant, created_ms, tuple(endpoint_ids))


async def _is_cut(redis: Redis, job_id: str) -> bool:
    """Return whether the text of a response ended at its limit of tokens."""
    with translated():
        data = cast("bytes | None", await redis.get(keys.result(job_id)))
    if data is None:
        return False
    try:
        choices = PackedResult(data, job_id, Outcome("succeeded")).choices
    except WireError:
        return False
    return bool(choices) and choices[0].finish_reason == "length"


def _tenant_of(fields: Mapping[bytes, bytes]) -> str:
    parts = fields.get(b"e", b"").decode(errors="replace").split(" ")
    return parts[3] if len(parts) > 3 else ""


def _taken(row: Sequence[Any], holder: str) -> TakenDelivery | None:
    """Return a leased delivery; None for a damaged one."""
    _, event_id, kind, object_id, created_ms, attempts, age_ms, record = row
    if (endpoint := _decoded(record)) is None or not all(map(is_text, (event_id, object_id))):
        return None
    if (event_type := kind.decode(errors="replace")) not in EVENT_TYPES:
        return None
    texts = event_id.decode(), event_type, object_id.decode()
    return TakenDelivery(endpoint, *texts, int(created_ms), int(attempts), int(age_ms), holder)


def _delivery(
    endpoint_id: str, event_id: str, found: Mapping[bytes, bytes] | None, due: float | None
) -> Delivery | DamagedRecordError | None:
    """Return a delivery, None for none, the error for a damaged one."""
    if found == {}:
        return None
    fields = RecordFields(f"the delivery of event {event_id[:64]}", found or {})
    try:
        state = fields.one_of("state", _LISTS)
        next_ms = int(due) if due is not None and 0 <= due <= MAX_TIME_MS else 0
        return Delivery(
            *(event_id, endpoint_id, state, fields.text("type"), fields.text("object"), fields.whole("attempts")),
            answer=fields.text("answer", ""),
            created_ms=fields.time_ms("created"),
            next_ms=next_ms,
            ended_ms=0 if state == "pending" else fields.time_ms("ended"),
        )
    except DamagedRecordError as error:
        return error
