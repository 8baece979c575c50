"""Health checks.

`/health`: this process is up. `/ready`: Redis answers, a live node takes jobs, and answers reach this process.
`/health/nodes`: the pressure record of every live node, with its unhealthy parts and the reasons.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from penstock.contract.errors import UnavailableError
from penstock.gateway.errors import soon
from penstock.gateway.route_doc import PROBE_METHODS
from penstock.producer.client import AsyncClient


class HealthRoutes:
    """The routes of the health checks."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.router = APIRouter()
        self.router.add_api_route("/health", self.health, methods=PROBE_METHODS)
        self.router.add_api_route("/health/nodes", self.nodes)
        self.router.add_api_route("/ready", self.ready, methods=PROBE_METHODS)

    async def health(self) -> dict[str, str]:
        """Return that the process is up. Redis does not count: restarting this process would not bring it back."""
        return {"status": "ok"}

    async def nodes(self) -> dict[str, list[dict[str, Any]]]:
        """Return the pressure records of the live nodes by pool. Raises UnavailableError while Redis is unreachable."""
        async with soon():
            pressures = {pool: await self._client.pressure(pool) for pool in await self._client.pools()}
        return {pool: [asdict(node) for node in pressure.nodes] for pool, pressure in pressures.items()}

    async def ready(self) -> dict[str, str]:
        """Return that a request would be served now; otherwise raise UnavailableError (HTTP 503)."""
        if not self._client.is_alive:
            raise UnavailableError("this gateway no longer receives messages from the queue", code="inbox_ended")
        async with soon():
            if await self._has_live_node():
                return {"status": "ready"}
        raise UnavailableError("no pool has a live node", code="no_node")

    async def _has_live_node(self) -> bool:
        # A gateway often starts a moment before its first node, so a copy without nodes is fetched anew.
        for renewed in (False, True):
            for pool, record in (await self._client.pools(renewed=renewed)).items():
                if record.is_alive and any(not node.draining for node in (await self._client.pressure(pool)).nodes):
                    return True
        return False
