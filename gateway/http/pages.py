"""Pages of lists: the parameters that choose one, and the list objects of OpenAI and Anthropic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request

from penstock.contract.errors import RequestError


def query_of(request: Request, *known: str) -> Mapping[str, str]:
    """Return the query of a request. Raises RequestError for an unknown parameter."""
    for name in request.query_params:
        if name not in known:
            raise RequestError(f"{name[:64]}: unknown query parameter", code="unknown_field", param=name[:64])
    return request.query_params


# OpenAI's.


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    """Return how many objects a page has. Raises RequestError."""
    text = query.get("limit", str(default))
    if not (text.isdecimal() and len(text) < 8 and 1 <= int(text) <= most):
        raise RequestError(f"limit must be a number from 1 to {most}", param="limit")
    return int(text)


def ids_after(ids: Sequence[str], after: str | None) -> Sequence[str]:
    """Return the ids behind the one that a page ended with. Raises RequestError for an unknown one."""
    if after is None:
        return ids
    if after not in ids:
        raise RequestError(f"after: there is no object {after[:64]!r}", param="after")
    return ids[ids.index(after) + 1 :]


def page_of(objects: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return a list object with the first `limit` of these."""
    page = list(objects[:limit])
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(objects) > limit}


# Anthropic's.

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


def ids_of_page(ids: Sequence[str], query: Mapping[str, str], what: str) -> tuple[Sequence[str], bool]:
    """Return the ids that `limit`, `after_id` and `before_id` of the query choose, and whether there are more.

    Raises RequestError. `what` names an object in the error for an unknown id.
    """
    limit, after, before = query.get("limit", str(DEFAULT_LIMIT)), query.get("after_id"), query.get("before_id")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_LIMIT:
        raise RequestError(f"limit: must be a number from 1 to {MAX_LIMIT}", param="limit")
    if after is not None and before is not None:
        raise RequestError("before_id: conflicts with after_id; send one of them", param="before_id")
    for name, given in (("after_id", after), ("before_id", before)):
        if given is not None and given not in ids:
            raise RequestError(f"{name}: there is no {what} {given[:256]!r}", param=name)
    if before is not None:
        rest = ids[: ids.index(before)]
        page = rest[-int(limit) :]
    else:
        rest = ids if after is None else ids[ids.index(after) + 1 :]
        page = rest[: int(limit)]
    return page, len(page) < len(rest)


def list_of(objects: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return Anthropic's list object of a page."""
    ends = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    return {"data": objects, "has_more": has_more, "first_id": ends[0], "last_id": ends[1]}
