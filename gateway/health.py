"""`/health`: this process is up. `/ready`: a request sent now would find Redis and a node."""

from __future__ import annotations

from fastapi import APIRouter, Request

from penstock.contract.errors import UnavailableError
from penstock.producer.client import AsyncClient

router = APIRouter()


@router.get("/health")
async def health() -> dict[str, str]:
    """Says nothing about Redis: restarting this process would not bring it back."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """Raises UnavailableError, which is a 503, while nobody could serve a request."""
    client: AsyncClient = request.app.state.client
    for pool in await client.pools():
        if any(not node.draining for node in (await client.pressure(pool)).nodes):
            return {"status": "ready"}
    raise UnavailableError("no pool has a live node", code="no_node")
