"""`GET /v1/usage`: the tokens that the caller's API key used, per day and pool. An admin can see all keys."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from penstock.contract.errors import RequestError
from penstock.contract.usage import MAX_DAYS, DayUsage
from penstock.gateway.authentication import caller_of
from penstock.producer.client import AsyncClient

DEFAULT_DAYS = 31

router = APIRouter()


_PARAMETERS = [
    {"name": "days", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_DAYS}},
    {"name": "all", "in": "query", "schema": {"type": "boolean"}, "description": "Include all keys (scope `admin`)."},
]


@router.get("/v1/usage", openapi_extra={"parameters": _PARAMETERS})
async def usage(request: Request) -> dict[str, Any]:
    """Return one record for each day and pool with usage.

    `?days=` sets how many days back to look; `?all=true` includes all keys. Raises RequestError for other parameters,
    and ForbiddenError for `all=true` without the scope `admin`.
    """
    params = dict(request.query_params)
    days, all_keys = _days_of(params.pop("days", str(DEFAULT_DAYS))), params.pop("all", "false")
    if params or all_keys not in ("true", "false"):
        name = next(iter(params), "all")
        raise RequestError(f"{name}: /v1/usage accepts only the parameters days and all (true or false)", param=name)
    client: AsyncClient = request.app.state.client
    caller = caller_of(request)
    if all_keys == "true":
        caller.require("admin")
        found = await client.all_usage(days)
    else:
        found = await client.usage(caller.tenant, caller.key_id, days)
    return {"object": "list", "data": [_as_json(day) for day in found]}


def _days_of(text: str) -> int:
    if not (text.isdecimal() and len(text) < 4 and 1 <= int(text) <= MAX_DAYS):
        raise RequestError(
            f"days must be a number from 1 to {MAX_DAYS}; usage is kept for {MAX_DAYS} days", param="days"
        )
    return int(text)


def _as_json(usage: DayUsage) -> dict[str, Any]:
    return {
        "object": "usage",
        "date": usage.day.isoformat(),
        "pool": usage.pool,
        "tenant": usage.tenant,
        "key_id": usage.account,
        "jobs": usage.jobs,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
