"""Anthropic's shape of the list of models, and its pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from penstock.contract.errors import RequestError

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


def model_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model in Anthropic's shape. `model` is one in OpenAI's shape."""
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def page_of(models: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of models that `limit`, `after_id` and `before_id` of the query choose."""
    limit, after, before = query.get("limit", str(DEFAULT_LIMIT)), query.get("after_id"), query.get("before_id")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_LIMIT:
        raise RequestError(f"limit: must be a number from 1 to {MAX_LIMIT}", param="limit")
    if after is not None and before is not None:
        raise RequestError("before_id: conflicts with after_id; send one of them", param="before_id")
    rest = [model_of(model) for model in models]
    ids = [model["id"] for model in rest]
    for name, given in (("after_id", after), ("before_id", before)):
        if given is not None and given not in ids:
            raise RequestError(f"{name}: no model {given[:256]!r} is served", param=name)
    if before is not None:
        rest = rest[: ids.index(before)]
        page = rest[-int(limit) :]
    else:
        rest = rest if after is None else rest[ids.index(after) + 1 :]
        page = rest[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"data": page, "has_more": len(page) < len(rest), **ends}
