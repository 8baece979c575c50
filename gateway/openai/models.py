"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from penstock.contract.errors import NotFoundError
from penstock.producer.client import AsyncClient

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Every model that a live node serves, under each of its names."""
    return {"object": "list", "data": list((await _models(request.app.state.client)).values())}


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> dict[str, Any]:
    """One model; its name may hold slashes."""
    models = await _models(request.app.state.client)
    if model not in models:
        raise NotFoundError(f"no model {model[:256]!r} is served", code="model_not_found", param="model")
    return models[model]


async def _models(client: AsyncClient) -> dict[str, dict[str, Any]]:
    models = {}
    for record in (await client.pools()).values():
        if not record.is_alive:
            continue
        for name in (record.model, *record.aliases):
            models[name] = {
                "id": name,
                "object": "model",
                "created": record.created_s,
                "owned_by": "penstock",
                "root": record.model,
                "max_model_len": record.max_model_len,
            }
    return models
