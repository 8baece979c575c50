"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request

from penstock.contract.errors import NotFoundError
from penstock.gateway.authentication import caller_of
from penstock.gateway.errors import soon
from penstock.gateway.health import PROBE_METHODS
from penstock.producer.client import AsyncClient
from penstock.queue.broker.producer import ServedPool

router = APIRouter()


@router.api_route("/v1/models", methods=PROBE_METHODS)
async def list_models(request: Request) -> dict[str, Any]:
    """List the models that live nodes serve, under each of their names, and their adapters."""
    client: AsyncClient = request.app.state.client
    async with soon():
        models = _models(await client.pools())
    return {"object": "list", "data": [one for name, one in models.items() if caller_of(request).sees(name)]}


@router.api_route("/v1/models/{model:path}", methods=PROBE_METHODS)
async def retrieve_model(request: Request, model: str) -> dict[str, Any]:
    """Return one model. Its name may contain slashes."""
    client: AsyncClient = request.app.state.client
    async with soon():
        models = _models(await client.pools())
        if model not in models:
            # The model's first node may have joined after the pools were cached.
            models = _models(await client.pools(renewed=True))
    if model not in models or not caller_of(request).sees(model):
        raise NotFoundError(f"no model {model[:256]!r} is served", code="model_not_found", param="model")
    return models[model]


def _models(pools: Mapping[str, ServedPool]) -> dict[str, dict[str, Any]]:
    models: dict[str, dict[str, Any]] = {}
    for record in pools.values():
        if not record.is_alive:
            continue
        models |= {name: _model(name, record) for name in (record.model, *record.aliases)}
    adapters = {
        name: _model(name, record) | {"parent": record.model}
        for record in pools.values()
        if record.is_alive
        for name in record.adapters
    }
    return adapters | models


def _model(name: str, record: ServedPool) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": record.created_s,
        "owned_by": "penstock",
        "root": record.model,
        "max_model_len": record.max_model_len,
    }
