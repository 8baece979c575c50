"""The loop in which a gateway delivers webhooks: it collects the ends of jobs, takes due deliveries and makes them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from contextlib import suppress
from http import HTTPStatus

from penstock.contract.errors import NotFoundError, PenstockError, UnavailableError
from penstock.contract.webhook import WebhookEndpoint
from penstock.gateway.apis.webhooks.sender import ForbiddenUrlError, Sender, SendError
from penstock.gateway.settings import GatewaySettings
from penstock.producer.client import AsyncClient
from penstock.queue.webhooks.deliveries import AttemptOutcome, TakenDelivery
from penstock.runtime.event_loop import cancel_until_done

logger = logging.getLogger("penstock.gateway")

LOOK_S = 0.5
"""Seconds between two looks for events while any tenant has an endpoint."""
IDLE_LOOK_S = 2.0
"""Seconds between two looks while none has."""
GATHER_S = 0.02
"""Seconds for which ended attempts are gathered before the next ones are taken."""
MAX_AT_ONCE = 64
"""Attempts that a gateway makes at the same time, over all endpoints."""
MAX_OF_TENANT = 32
"""Those of one tenant. So a tenant whose receivers hang leaves attempts to others."""
LONGEST_PAUSE_S = 3600.0
"""The longest mean time between two attempts."""
COLLECT_PATIENCE_S = 5.0
"""Seconds that one of several Redis gets to hand over the ends of its jobs."""
LEASE_SLACK_S = 3.0
"""Seconds for which a lease outlives the time-out of its attempt."""
NO_SECRET = "the signing secret of the endpoint is lost or damaged; rotate it"
_MAX_DOUBLINGS = 30


class Deliverer:
    """Delivers the webhooks of all tenants, beside the other gateways."""

    def __init__(self, client: AsyncClient, sender: Sender, settings: GatewaySettings) -> None:
        self._client = client
        self._queue = client.webhooks.queue
        self._sender = sender
        self._most_of_endpoint = settings.webhook_in_flight
        self._first_pause_s = settings.webhook_retry_s
        self._give_up_s = settings.webhook_give_up_s
        self._lease_ms = round(1000 * (settings.webhook_timeout_s + LEASE_SLACK_S))
        self._attempts: dict[asyncio.Task[None], str] = {}
        """Each with its tenant."""
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Deliver until canceled. An attempt that this interrupts is made again once its lease has ended."""
        try:
            while True:
                pause_s = IDLE_LOOK_S
                try:
                    pause_s = await self._look()
                except UnavailableError:
                    pass
                except PenstockError as error:
                    logger.error("webhooks cannot be delivered now", extra={"reason": error.reason})
                except Exception:
                    # A defect, or records that nothing of ours has written. The next look goes on with the others.
                    logger.exception("a look for webhooks failed")
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s * random.uniform(0.75, 1.25)):
                        await self._ended.wait()
                        await asyncio.sleep(GATHER_S)
                self._ended.clear()
        finally:
            await cancel_until_done(list(self._attempts))
            await self._sender.close()

    async def _look(self) -> float:
        """Take what is due. Return the seconds until the next look."""
        if not await self._queue.has_endpoints():
            return IDLE_LOOK_S
        num_collected = await self._collect()
        free = MAX_AT_ONCE - len(self._attempts)
        taken = await self._take(free) if free > 0 else []
        secrets = await self._client.webhooks.secrets_of(list({one.endpoint.id for one in taken}))
        for one in taken:
            task = asyncio.create_task(self._attempt(one, secrets.get(one.endpoint.id, [])), name="penstock webhook")
            self._attempts[task] = one.endpoint.tenant
            task.add_done_callback(self._note_end)
        return GATHER_S if num_collected else LOOK_S

    async def _collect(self) -> int:
        """Collect the ends of all pools, those of each Redis by themselves. Return their number."""
        servers, pools = self._client.servers, await self._client.pools()
        if not servers.is_split:
            return await self._queue.collect([*pools])
        reachable, number = servers.reachable, 0
        for server, some in servers.grouped(pools):
            if server in reachable:
                with suppress(TimeoutError, UnavailableError):  # Its untold ends stay.
                    async with asyncio.timeout(COLLECT_PATIENCE_S):
                        number += await self._queue.collect(some, server.redis)
        return number

    async def _take(self, most: int) -> list[TakenDelivery]:
        known = Counter(self._attempts.values())
        return await self._queue.take(
            most, self._most_of_endpoint, self._lease_ms, most_of_tenant=MAX_OF_TENANT, num_of_tenant=known
        )

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._attempts.pop(task, None)
        self._ended.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("an attempt to deliver a webhook failed", exc_info=error)

    async def _attempt(self, taken: TakenDelivery, secrets: list[str]) -> None:
        endpoint, created_s = taken.endpoint, taken.created_ms // 1000
        named = {"webhook_endpoint_id": endpoint.id, "event_id": taken.event_id, "attempts": taken.attempts}
        event = taken.event_id, taken.type, taken.object_id, created_s
        if not secrets:
            # No receiver may be taught to accept what is not signed.
            logger.warning("a webhook is given up", extra={**named, "reason": NO_SECRET})
            await self._end(taken, "dead", NO_SECRET)
            return
        status, retry_after_s = 0, 0.0
        try:
            status, retry_after_s = await self._sender.send(endpoint.url, *event, secrets)
            text = f"status {status}"
        except ForbiddenUrlError as error:
            # Another attempt would end the same way.
            await self._disable(endpoint, f"this gateway delivers nothing to its URL: {error}")
            logger.warning("a webhook endpoint is disabled", extra={**named, "reason": str(error)})
            await self._end(taken, "dead", str(error))
            return
        except SendError as error:
            text = str(error)
        wait_s = max(retry_after_s, self._pause_s(taken.attempts))
        left_s = self._give_up_s - taken.age_ms / 1000
        if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            await self._end(taken, "delivered", text)
        elif status == HTTPStatus.GONE:
            await self._disable(endpoint, "its receiver answered with status 410")
            logger.warning("a webhook endpoint is disabled", extra=named)
            await self._end(taken, "dead", text)
        elif left_s <= 0 or retry_after_s > left_s:
            logger.warning("a webhook is given up", extra={**named, "reason": text})
            await self._end(taken, "dead", text)
        else:
            await self._end(taken, "retry", text, min(wait_s, left_s))

    async def _disable(self, endpoint: WebhookEndpoint, reason: str) -> None:
        with suppress(NotFoundError):
            await self._client.webhooks.disable(endpoint, reason)

    async def _end(self, taken: TakenDelivery, outcome: AttemptOutcome, text: str, in_s: float = 0.0) -> None:
        with suppress(UnavailableError):  # Then the lease ends, and the delivery is made again.
            await self._queue.end_attempt(taken, outcome, text, round(1000 * in_s))

    def _pause_s(self, attempts: int) -> float:
        """Return the seconds until the next attempt: they double, and differ by half, so that not all come at once."""
        doubled_s = self._first_pause_s * 2.0 ** min(attempts - 1, _MAX_DOUBLINGS)
        return min(LONGEST_PAUSE_S, doubled_s) * random.uniform(0.5, 1.5)
