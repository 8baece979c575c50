"""Health checks.

`/health`: this process is up. `/ready`: Redis answers, a live node takes jobs, and answers reach this process.
`/health/nodes`: the pressure record of every live node, with its unhealthy parts and the reasons.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from penstock.contract.errors import UnavailableError
from penstock.gateway.errors import soon
from penstock.producer.client import AsyncClient

PROBE_METHODS = ["GET", "HEAD"]
"""Some load balancers probe with HEAD."""

router = APIRouter()


@router.api_route("/health", methods=PROBE_METHODS)
async def health() -> dict[str, str]:
    """Return that the process is up. Redis does not count: restarting this process would not bring it back."""
    return {"status": "ok"}


@router.get("/health/nodes")
async def nodes(request: Request) -> dict[str, list[dict[str, Any]]]:
    """Return the pressure records of the live nodes by pool. Raises UnavailableError while Redis is unreachable."""
    client: AsyncClient = request.app.state.client
    async with soon():
        pressures = {pool: await client.pressure(pool) for pool in await client.pools()}
    return {pool: [asdict(node) for node in pressure.nodes] for pool, pressure in pressures.items()}


@router.api_route("/ready", methods=PROBE_METHODS)
async def ready(request: Request) -> dict[str, str]:
    """Return that a request would be served now; otherwise raise UnavailableError (HTTP 503)."""
    client: AsyncClient = request.app.state.client
    if not client.is_alive:
        raise UnavailableError("this gateway no longer receives messages from the queue", code="inbox_ended")
    async with soon():
        if await _has_live_node(client):
            return {"status": "ready"}
    raise UnavailableError("no pool has a live node", code="no_node")


async def _has_live_node(client: AsyncClient) -> bool:
    # A gateway often starts a moment before its first node, so a copy without nodes is fetched anew.
    for renewed in (False, True):
        for pool, record in (await client.pools(renewed=renewed)).items():
            if record.is_alive and any(not node.draining for node in (await client.pressure(pool)).nodes):
                return True
    return False
