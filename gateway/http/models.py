"""The models that live nodes serve, for the lists of models of several APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request

from penstock.contract.errors import NotFoundError
from penstock.gateway.errors import soon
from penstock.gateway.request.reading import caller_of
from penstock.producer.client import AsyncClient
from penstock.queue.broker.producer import ServedPool


async def models_for(client: AsyncClient, request: Request) -> list[dict[str, Any]]:
    """Return the models that the caller may use, as OpenAI's objects: under each of their names, and their adapters."""
    async with soon():
        models = _models(await client.pools())
    return [one for name, one in models.items() if caller_of(request).sees(name)]


async def model_for(client: AsyncClient, request: Request, model: str) -> dict[str, Any]:
    """Return one model. Raises NotFoundError if it is not served, or if the caller may not use it."""
    async with soon():
        models = _models(await client.pools())
        if model not in models:
            # The model's first node may have joined after the pools were cached.
            models = _models(await client.pools(renewed=True))
    if model not in models or not caller_of(request).sees(model):
        raise NotFoundError(f"no model {model[:256]!r} is served", code="model_not_found", param="model")
    return models[model]


def _models(pools: Mapping[str, ServedPool]) -> dict[str, dict[str, Any]]:
    """Return the models by name, then the adapters, because many programs take the first one."""
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
        if name not in models
    }
    return models | adapters


def _model(name: str, record: ServedPool) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": record.created_s,
        "owned_by": "penstock",
        "root": record.model,
        "max_model_len": record.max_model_len,
        "capabilities": record.capabilities,
        "kinds": record.kinds,
        **({"dimensions": record.dimensions} if record.dimensions else {}),
        "tool_format": record.tool_format.name,
        **({"tool_format_reason": record.tool_format_reason} if record.tool_format_reason else {}),
    }
