"""`GET /v1/usage`: the tokens that the caller's API key used, per day and pool; of all keys, for an admin."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from penstock.contract.errors import RequestError
from penstock.contract.usage import MAX_DAYS, DayUsage
from penstock.gateway.authentication import caller_of
from penstock.producer.client import AsyncClient

DEFAULT_DAYS = 31

router = APIRouter()


@router.get("/v1/usage")
async def usage(request: Request) -> dict[str, Any]:
    """Days on which something was used. `?days=`: how many days back; `?all=true`: of all keys.

    Raises RequestError for other parameters, ForbiddenError for `all` without the scope `admin`.
    """
    asked = dict(request.query_params)
    days, everyone = _days_of(asked.pop("days", str(DEFAULT_DAYS))), asked.pop("all", "false")
    if asked or everyone not in ("true", "false"):
        name = next(iter(asked), "all")
        raise RequestError(f"{name}: usage may be asked for with days and all=true", param=name)
    client: AsyncClient = request.app.state.client
    caller = caller_of(request)
    if everyone == "true":
        caller.require("admin")
        found = await client.all_usage(days)
    else:
        found = await client.usage(caller.tenant, caller.key_id, days)
    return {"object": "list", "data": [_shown(one) for one in found]}


def _days_of(text: str) -> int:
    if not (text.isdecimal() and len(text) < 4 and 1 <= int(text) <= MAX_DAYS):
        raise RequestError(
            f"days must be a number from 1 to {MAX_DAYS}, the days for which usage is kept", param="days"
        )
    return int(text)


def _shown(one: DayUsage) -> dict[str, Any]:
    return {
        "object": "usage",
        "date": one.day.isoformat(),
        "pool": one.pool,
        "tenant": one.tenant,
        "key_id": one.account,
        "jobs": one.jobs,
        "prompt_tokens": one.prompt_tokens,
        "completion_tokens": one.completion_tokens,
        "cached_tokens": one.cached_tokens,
    }
