"""`GET /v1/usage`: tokens of API keys, per day or hour and pool, as JSON or CSV. `GET /v1/key`: the caller's key.

A key sees its own usage, and an admin's key that of all keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field, StringConstraints, ValidationError

from penstock.contract.errors import ForbiddenError, NotFoundError
from penstock.contract.fields import NAME_PATTERN, Named
from penstock.contract.problems import request_error
from penstock.contract.tenant import ACCOUNT_PATTERN, ApiKey
from penstock.contract.usage import (
    MAX_DAYS,
    MAX_PAGE_ROWS,
    Period,
    TenantHoldings,
    UsagePage,
    UsageQuery,
    csv_of,
    usage_object,
)
from penstock.gateway.errors import soon
from penstock.gateway.http.dialect import HttpDialect, Services
from penstock.gateway.request.reading import caller_of
from penstock.gateway.route_doc import NUMBER, TEXT, list_of, object_of
from penstock.producer.client import AsyncClient
from penstock.producer.files.storage import FilesSettings
from penstock.runtime.event_loop import LoopYielder

DEFAULT_ROWS = 1000
ROWS_AT_ONCE = 200
"""Rows that are encoded in one piece, so that a long report does not hold the event loop."""
MAX_ACCEPT_CHARS = 1000
"""Characters of the header `Accept` that are read."""
_JSON, _CSV = "application/json", "text/csv"
_WEIGHT = re.compile(r"q=([01](?:\.[0-9]{1,3})?)")
_OPTIONAL_TEXT = {"anyOf": [TEXT, {"type": "null"}]}
_OPTIONAL_NUMBER = {"anyOf": [NUMBER, {"type": "null"}]}
_HELD = object_of(used=NUMBER, limit=_OPTIONAL_NUMBER)
_ROW = object_of(
    **dict.fromkeys(("object", "date"), TEXT),
    hour=_OPTIONAL_NUMBER,
    pool=TEXT,
    model=_OPTIONAL_TEXT,
    **dict.fromkeys(("tenant", "key_id"), TEXT),
    **dict.fromkeys(("jobs", "prompt_tokens", "completion_tokens", "cached_tokens"), NUMBER),
)
_ANSWER = object_of(
    **dict.fromkeys(("object", "by", "start", "end"), TEXT),
    data=list_of(_ROW),
    has_more={"type": "boolean"},
    next=_OPTIONAL_TEXT,
    holds={"anyOf": [object_of(**dict.fromkeys(TenantHoldings.__dataclass_fields__, _HELD)), {"type": "null"}]},
)

Text = Annotated[str, StringConstraints(max_length=256)]
OwnerName = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


class UsageParams(Named):
    """The parameters of the query. Their docstrings are their descriptions in the OpenAPI document."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    start: Text | None = None
    """First date (`2026-11-22`), or with `by=hour` a date or hour (`2026-11-22T05`), in UTC."""
    end: Text | None = None
    """Last date or hour, which is part of the report. Default: now."""
    days: Annotated[int, Field(ge=1, le=MAX_DAYS)] | None = None
    """Number of days up to the end, instead of `start`. Default: 31, and 1 with `by=hour`."""
    by: Period = "day"
    """The period of a row."""
    pool: Text | None = None
    """Only this pool."""
    model: Text | None = None
    """Only the pools that serve this model, by its name or alias."""
    key_id: Annotated[str, StringConstraints(min_length=1, pattern=ACCOUNT_PATTERN)] | None = None
    """Only this API key. Another key than the caller's needs the scope `admin`."""
    tenant: OwnerName | None = None
    """Only this tenant. Another tenant than the caller's needs the scope `admin`."""
    all: bool | None = None
    """`true`: all keys, which needs the scope `admin` and is its default. `false`: the caller's key only."""
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE_ROWS)] | None = None
    """Most rows of the answer. Default: 1,000, and 10,000 for CSV."""
    after: Text | None = None
    """The `next` of the page before. The header `Link` has the URL of the next page."""
    format: Literal["json", "csv"] | None = None
    """Default: CSV if the header `Accept` prefers `text/csv`, else JSON."""


def _documented() -> dict[str, Any]:
    """Return the part of the route's OpenAPI description that is not in its docstring."""
    properties: dict[str, dict[str, Any]] = UsageParams.model_json_schema()["properties"]
    parameters = []
    for name, schema in properties.items():
        # A parameter is left out, never null.
        kind, *_ = schema.get("anyOf", [{key: schema[key] for key in ("type", "enum") if key in schema}])
        parameters.append({"name": name, "in": "query", "description": schema["description"], "schema": kind})
    content = {_JSON: {"schema": _ANSWER}, _CSV: {"schema": TEXT}}
    return {"parameters": parameters, "responses": {"200": {"content": content}}}


_KEY_ANSWER = object_of(object={"const": "key"}, id=_OPTIONAL_TEXT, tenant=TEXT, scopes=list_of(TEXT))


class UsageRoutes:
    """The routes of the report and of the caller's key."""

    def __init__(self, client: AsyncClient, yielder: LoopYielder, files: FilesSettings) -> None:
        self._client = client
        self._limits = {"open_batches": files.max_tenant_batches, "open_rows": files.max_tenant_rows}
        self._yielder = yielder
        self.router = APIRouter()
        self.router.add_api_route("/v1/usage", self.usage, response_class=Response, openapi_extra=_documented())
        answer = {"responses": {"200": {"content": {_JSON: {"schema": _KEY_ANSWER}}}}}
        self.router.add_api_route("/v1/key", self.key, openapi_extra=answer)

    async def key(self, request: Request) -> dict[str, Any]:
        """Return the tenant, the scopes and the id of the caller's API key. Without a key, the id is null."""
        caller = caller_of(request)
        return {"object": "key", "id": caller.key_id or None, "tenant": caller.tenant, "scopes": sorted(caller.scopes)}

    async def usage(self, request: Request) -> Response:
        """Return the tokens that the caller's API key used: a row for each day or hour and pool with usage.

        A key with the scope `admin` sees all keys. As CSV, the answer has the columns of the rows. `holds` says how
        many schedules, open batches and concurrency keys the caller's tenant, or the named one, has now.
        """
        params, client = _params_of(request), self._client
        is_csv = _wants_csv(request, params)
        limit = params.limit or (MAX_PAGE_ROWS if is_csv else DEFAULT_ROWS)
        async with soon():
            models = {pool: record.model for pool, record in (await client.pools()).items()}
            query = await _query_of(caller_of(request), params, client)
            page = await client.usage(query, after=params.after, limit=limit)
        headers = {"Vary": "Accept"}
        if page.next_after is not None:
            following = urlencode({**request.query_params, "after": page.next_after})
            headers["Link"] = f'<{request.url.path}?{following}>; rel="next"'
        if is_csv:
            content = await _encoded_csv(page, models, self._yielder)
        else:
            holds = None if page.holdings is None else page.holdings.with_limits(**self._limits)
            content = await _encoded_json(page, models, holds, self._yielder)
        return Response(content, media_type=_CSV if is_csv else _JSON, headers=headers)


def _params_of(request: Request) -> UsageParams:
    try:
        return UsageParams.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise request_error(error) from error


def _wants_csv(request: Request, params: UsageParams) -> bool:
    if params.format is not None:
        return params.format == "csv"
    weights = {_CSV: 0.0, _JSON: 0.0}
    for entry in request.headers.get("accept", "")[:MAX_ACCEPT_CHARS].lower().split(","):
        kind, _, options = entry.partition(";")
        weight = _WEIGHT.search(options)
        weights[kind.strip()] = float(weight[1]) if weight else 1.0
    return weights[_CSV] > weights[_JSON]


async def _query_of(caller: ApiKey, params: UsageParams, client: AsyncClient) -> UsageQuery:
    tenant, account = await _owner_of(caller, params, client)
    pools = None if params.pool is None else frozenset((params.pool,))
    if params.model is not None:
        known = (await client.pools()).items() if caller.sees(params.model) else ()
        serving = frozenset(pool for pool, record in known if params.model in (record.model, *record.aliases))
        if not serving:
            raise NotFoundError(f"no pool serves the model {params.model!r}", code="model_not_found", param="model")
        pools = serving if pools is None else pools & serving
    return UsageQuery(params.by, params.start, params.end, params.days, pools, tenant, account)


async def _owner_of(caller: ApiKey, params: UsageParams, client: AsyncClient) -> tuple[str | None, str | None]:
    """Return the tenant and the key whose usage the caller asks for; None for any."""
    if params.all:
        caller.require("admin")
    if "admin" not in caller.scopes or params.all is False:
        for name, asked, own in (("tenant", params.tenant, caller.tenant), ("key_id", params.key_id, caller.key_id)):
            if asked not in (None, own):
                raise ForbiddenError(f"{name}: usage of other API keys needs the scope admin", param=name)
        return caller.tenant, caller.key_id
    if params.key_id is None:
        return params.tenant, None
    key = (await client.api_keys()).get(params.key_id)
    if key is None or params.tenant not in (None, key.tenant):
        owner = "" if params.tenant is None else f" of the tenant {params.tenant!r}"
        raise NotFoundError(f"there is no API key {params.key_id!r}{owner}", code="key_not_found", param="key_id")
    return key.tenant, key.key_id


async def _encoded_json(
    page: UsagePage, models: Mapping[str, str], holds: Mapping[str, Any] | None, yielder: LoopYielder
) -> bytes:
    rows = [_dumped(row) async for objects in _objects_of(page, models, yielder) for row in objects]
    periods = page.periods
    head = {"by": periods.by, "start": periods.label_of(periods.first), "end": periods.label_of(periods.last)}
    tail = {"has_more": page.next_after is not None, "next": page.next_after, "holds": holds}
    # The rows are encoded already.
    return f'{{"object":"list",{_members(head)},"data":[{",".join(rows)}],{_members(tail)}}}'.encode()


async def _encoded_csv(page: UsagePage, models: Mapping[str, str], yielder: LoopYielder) -> bytes:
    lines = [csv_of(objects) async for objects in _objects_of(page, models, yielder)]
    return "".join([csv_of([], with_head=True), *lines]).encode()


async def _objects_of(
    page: UsagePage, models: Mapping[str, str], yielder: LoopYielder
) -> AsyncIterator[list[dict[str, Any]]]:
    for at in range(0, len(page.rows), ROWS_AT_ONCE):
        await yielder.wait()
        yield [usage_object(row, models.get(row.pool)) for row in page.rows[at : at + ROWS_AT_ONCE]]


def _dumped(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _members(values: dict[str, Any]) -> str:
    """Return the members of a JSON object without its braces."""
    return _dumped(values)[1:-1]


def _routes(services: Services) -> list[APIRouter]:
    return [UsageRoutes(services.client, services.yielder, services.files.settings).router]


USAGE = HttpDialect(_routes)
