"""The OpenAPI document, built from the app's routes.

FastAPI describes its own routes. A plain route is described by the `schema` of its body and by its `RouteDoc`. So a new
route or field is in the document without further work.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, cast

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from penstock.gateway.http.entry import PUBLIC_PATHS, scopes_for
from penstock.gateway.request.generation import RequestBody
from penstock.gateway.route_doc import TEXT, RouteDoc, object_of
from penstock.gateway.stream.framing import EVENT_STREAM, NDJSON

VERSION = version("penstock")
"""The release of this gateway."""
_REF = "#/components/schemas/{model}"
_ERROR = object_of(error=object_of(message=TEXT, type=TEXT, code=TEXT, param={"anyOf": [TEXT, {"type": "null"}]}))
_ERROR_ANSWER = {
    "description": "The request failed. `code` says why, and `param` names the wrong field.",
    "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
}
_INTRODUCTION = (
    "The HTTP API of a penstock gateway. If the gateway has API keys, send one as `Authorization: Bearer <key>`. "
    "Unknown fields are refused by name. `/v1/stream` is a WebSocket for many streams on one connection."
)
_KEY_HEADER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": TEXT,
    "description": "A repeated request with the same key and the same body gets the same job.",
}
_AFTER = {
    "name": "after",
    "in": "query",
    "required": False,
    "schema": TEXT,
    "description": "The id of an event. The stream continues after it. The header Last-Event-ID has the same effect.",
}
_UNUSED = ("HTTPValidationError", "ValidationError")
"""Schemas of FastAPI's own validation errors, which this gateway answers in the form of `Error`."""


def document_of(routes: Sequence[Route], bodies: tuple[type[RequestBody], ...]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes, which take these bodies."""
    own = [route for route in routes if isinstance(route, APIRoute)]
    with warnings.catch_warnings():
        # A route with several methods has one operation id; `_finish` gives each method its own.
        warnings.filterwarnings("ignore", "Duplicate Operation ID")
        document = get_openapi(title="penstock", version=VERSION, description=_INTRODUCTION, routes=own)
    schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    for name in _UNUSED:
        schemas.pop(name, None)
    refs, definitions = body_schemas(bodies)
    schemas |= {"Error": _ERROR, **definitions}
    paths: dict[str, Any] = document.setdefault("paths", {})
    for route in routes:
        if not isinstance(route, APIRoute):
            paths.setdefault(route.path_format, {}).update(_operations_of(route, refs, definitions))
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, method, operation in operations_in(document):
        _finish(path, method, operation)
    document["paths"] = dict(sorted(paths.items()))
    return document


def operations_in(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield path, method in lower case, and operation."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield path, method, operation


@cache
def body_schemas(bodies: tuple[type[RequestBody], ...]) -> tuple[dict[type[RequestBody], Any], dict[str, Any]]:
    """Return a reference to the JSON schema of each body, and all JSON schemas by name."""
    models: Any = [(schema, "validation") for schema in bodies]
    keyed, definitions = models_json_schema(models, ref_template=_REF)
    refs = {schema: keyed[cast("Any", schema), "validation"] for schema in bodies}
    return refs, definitions.get("$defs", {})


def _operations_of(route: Route, refs: dict[type[RequestBody], Any], definitions: dict[str, Any]) -> dict[str, Any]:
    endpoint: Any = route.endpoint
    doc: RouteDoc = getattr(endpoint, "doc", None) or RouteDoc((endpoint.__doc__ or "").strip().partition("\n")[0])
    parameters = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in route.param_convertors]
    operation: dict[str, Any] = {"summary": doc.summary, "parameters": parameters}
    content: dict[str, Any] = {"application/json": {"schema": dict(doc.answer)}}
    schema = getattr(endpoint, "schema", None)
    if schema in refs:
        accepted = refs[schema]
        if doc.list_answer is not None:
            accepted = {"oneOf": [accepted, {"type": "array", "items": accepted, "maxItems": doc.max_list_items}]}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": accepted}}}
        operation["parameters"].append(_KEY_HEADER)
        if doc.has_streams and "stream" in definitions[refs[schema]["$ref"].rpartition("/")[2]].get("properties", {}):
            operation["parameters"].append(_AFTER)
            for framing in (EVENT_STREAM, NDJSON):
                content[framing] = {"schema": dict(doc.event or {"type": "object"})}
    operation["responses"] = {str(doc.status): {"description": "The answer.", "content": content}}
    if doc.list_answer is not None:
        of_list = {"application/json": {"schema": dict(doc.list_answer)}}
        content["application/json"] = {"schema": {"oneOf": [dict(doc.answer), dict(doc.list_answer)]}}
        refused = {"description": "The outcomes of a list of which a part was refused.", "content": of_list}
        operation["responses"][str(doc.list_status)] = refused
    return {method.lower(): dict(operation) for method in sorted(route.methods or ())}


def _finish(path: str, method: str, operation: dict[str, Any]) -> None:
    """Add what all operations share."""
    operation["operationId"] = "_".join([method, *re.findall(r"\w+", path)]) if path != "/" else f"{method}_index"
    operation["responses"].pop("422", None)
    operation["responses"]["default"] = _ERROR_ANSWER
    summary, _, rest = operation.pop("description", "").strip().partition("\n")
    operation["summary"] = summary or operation.get("summary") or path
    if rest.strip():
        operation["description"] = rest.strip()
    if path not in PUBLIC_PATHS:
        # The key needs one of these scopes. The empty requirement stands for a gateway without API keys.
        operation["security"] = [*({"key": [scope]} for scope in scopes_for(method.upper(), path)), {}]
