"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request

from penstock.contract.errors import NotFoundError
from penstock.gateway.anthropic import models as anthropic_models
from penstock.gateway.authentication import caller_of
from penstock.gateway.errors import soon, speaks_anthropic
from penstock.gateway.health import PROBE_METHODS
from penstock.producer.client import AsyncClient
from penstock.queue.broker.producer import ServedPool

router = APIRouter()


@router.api_route("/v1/models", methods=PROBE_METHODS)
async def list_models(request: Request) -> dict[str, Any]:
    """List the models that live nodes serve, under each of their names, and their adapters.

    With the header `anthropic-version`, the list has Anthropic's shape.
    """
    client: AsyncClient = request.app.state.client
    async with soon():
        models = _models(await client.pools())
    seen = [one for name, one in models.items() if caller_of(request).sees(name)]
    if speaks_anthropic(request.scope):
        return anthropic_models.page_of(seen, request.query_params)
    return {"object": "list", "data": seen}


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
    found = models[model]
    return anthropic_models.model_of(found) if speaks_anthropic(request.scope) else found


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
