"""`/health`: this process is up. `/ready`: a request sent now would find Redis and a node, and its answer us.

`/health/nodes`: every live node's pressure record, with the parts of it that are not well, and why.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from penstock.contract.errors import UnavailableError
from penstock.producer.client import AsyncClient

READY_TIMEOUT_S = 2.0
"""The client waits out short absences of Redis, a probe does not."""

PROBED = ["GET", "HEAD"]
"""Some who look whether we live want no body."""

router = APIRouter()


@router.api_route("/health", methods=PROBED)
async def health() -> dict[str, str]:
    """Says nothing about Redis: restarting this process would not bring it back."""
    return {"status": "ok"}


@router.get("/health/nodes")
async def nodes(request: Request) -> dict[str, list[dict[str, Any]]]:
    """Pools, and the records of their nodes. Raises UnavailableError while Redis is away."""
    client: AsyncClient = request.app.state.client
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            pressures = {pool: await client.pressure(pool) for pool in await client.pools()}
    except TimeoutError:
        raise UnavailableError("Redis is away", code="redis_away") from None
    return {pool: [asdict(node) for node in pressure.nodes] for pool, pressure in pressures.items()}


@router.api_route("/ready", methods=PROBED)
async def ready(request: Request) -> dict[str, str]:
    """Raises UnavailableError, which is a 503, while nobody could serve a request."""
    try:
        client: AsyncClient = request.app.state.client
        if not client.is_alive:
            raise UnavailableError("this gateway hears nothing from the queue any more", code="inbox_ended")
        async with asyncio.timeout(READY_TIMEOUT_S):
            if await _has_live_node(client):
                return {"status": "ready"}
    except TimeoutError:
        raise UnavailableError("Redis is away", code="redis_away") from None
    raise UnavailableError("no pool has a live node", code="no_node")


async def _has_live_node(client: AsyncClient) -> bool:
    for pool, record in (await client.pools()).items():
        if record.is_alive and any(not node.draining for node in (await client.pressure(pool)).nodes):
            return True
    return False
