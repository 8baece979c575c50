"""The OpenAPI document, built from the app's routes, and the page that shows it.

FastAPI describes its own routes. A plain route is described by the `schema` of its body and by its `RouteDoc`. So a new
route or field is in the document without further work.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from importlib.metadata import version
from typing import Any, cast

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from penstock.gateway.http.entry import READING_METHODS, scopes_for
from penstock.gateway.route_doc import EXAMPLE_MODEL, TEXT, RouteDoc, object_of
from penstock.gateway.stream.writer import EVENT_STREAM, NDJSON
from penstock.producer.parsed_body import RequestBody

VERSION = version("penstock-llm")
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


def document_of(
    routes: Sequence[Route], bodies: tuple[type[RequestBody], ...], public_paths: frozenset[str]
) -> dict[str, Any]:
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
        _finish(path, method, operation, is_public=path in public_paths and method.upper() in READING_METHODS)
    document["paths"] = dict(sorted(paths.items()))
    return document


def operations_in(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield path, method in lower case, and operation."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield path, method, operation


# Of one user, or of our own code and files.
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


def _finish(path: str, method: str, operation: dict[str, Any], *, is_public: bool) -> None:
    """Add what all operations share."""
    operation["operationId"] = "_".join([method, *re.findall(r"\w+", path)]) if path != "/" else f"{method}_index"
    operation["responses"].pop("422", None)
    operation["responses"]["default"] = _ERROR_ANSWER
    summary, _, rest = operation.pop("description", "").strip().partition("\n")
    operation["summary"] = summary or operation.get("summary") or path
    if rest.strip():
        operation["description"] = rest.strip()
    if not is_public:
        # The key needs one of these scopes. The empty requirement stands for a gateway without API keys.
        operation["security"] = [*({"key": [scope]} for scope in scopes_for(method.upper(), path)), {}]


# The page `/docs`: the OpenAPI document as HTML, without scripts and without requests to other hosts.
#
# The examples are shell commands. They read the gateway's address, the API key and the model from shell variables.

URL, KEY, MODEL = "PENSTOCK_URL", "PENSTOCK_KEY", "PENSTOCK_MODEL"
"""The shell variables of the examples."""
_PATH_VALUES = {"model": f"${MODEL}"}
"""Values of path parameters in the examples. A path with other parameters has no example."""
_JSON = "application/json"
_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2430;background:#fff}
pre{background:#f3f5f8;padding:.8rem;overflow-x:auto;border-radius:4px}code{font-size:.9em}
body,td{overflow-wrap:break-word}h2,h3,td:first-child{overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;table-layout:fixed}
td,th{text-align:left;vertical-align:top;padding:.3rem .6rem .3rem 0;
border-bottom:1px solid #dde3ea}section{border-top:2px solid #dde3ea;margin-top:2rem}.method{color:#0b62a8}
summary{cursor:pointer}nav li{list-style:none}
@media(prefers-color-scheme:dark){body{color:#dde3ea;background:#14181d}pre{background:#1f262e}.method{color:#7cb8ea}}
"""
_SHELL_VARIABLES = f"""<p>The examples run in a shell. Set these variables first. Without API keys, any key will do.</p>
<pre tabindex="0">export {URL}=http://127.0.0.1:8000
export {KEY}=pk-...
export {MODEL}=...   # an id from GET /v1/models</pre>
<p>The same description for programs: <a href="openapi.json">openapi.json</a>.</p>"""


def page_of(document: dict[str, Any]) -> str:
    """Return the HTML page of an OpenAPI document."""
    shown = [item for item in operations_in(document) if item[1] != "head"]
    links = "".join(
        f'<li><a href="#{operation["operationId"]}"><code>{method.upper()} {escape(path)}</code></a></li>'
        for path, method, operation in shown
    )
    sections = "".join(_section(document, *item) for item in shown)
    info = document["info"]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>penstock API</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>penstock {escape(info['version'])}: HTTP API</h1><p>{_marked(info['description'])}</p>{_SHELL_VARIABLES}"
        f"<nav><ul>{links}</ul></nav>{sections}</body></html>"
    )


def _section(document: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> str:
    body = _body_schema(document, operation)
    parts = [
        f'<section id="{operation["operationId"]}"><h2><span class="method">{method.upper()}</span> '
        f"<code>{escape(path)}</code></h2><p>{_marked(operation['summary'])}</p>"
    ]
    if "description" in operation:
        parts.append(f"<p>{_marked(operation['description'])}</p>")
    if scopes := [scope for one in operation.get("security", ()) for scope in one.get("key", ())]:
        parts.append(f"<p>Scope of the API key: {' or '.join(f'<code>{scope}</code>' for scope in scopes)}</p>")
    if operation.get("parameters"):
        parameters = (
            (each["name"], f"{each['in']}, {_type_of(each['schema'])}", each.get("description", ""))
            for each in operation["parameters"]
        )
        parts.append(_table(parameters))
    if body:
        parts.append(f"<details open><summary>Fields of the body</summary>{_table(_fields(body))}</details>")
    if example := _example(path, method, operation, body):
        parts.append(f'<p>Example:</p><pre class="example" tabindex="0">{escape(example)}</pre>')
    return "".join([*parts, "</section>"])


def _fields(schema: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        kind = _type_of(field) + (", required" if name in required else "")
        yield name, kind, field.get("description", "")


def _table(rows: Iterator[tuple[str, str, str]]) -> str:
    cells = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td><td>{_marked(text)}</td></tr>"
        for name, kind, text in rows
    )
    return f"<table><tr><th>name</th><th>type</th><th></th></tr>{cells}</table>"


def _type_of(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type_of(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _body_schema(document: dict[str, Any], operation: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the operation's body, or an empty one."""
    schema: dict[str, Any] = operation.get("requestBody", {}).get("content", {}).get(_JSON, {}).get("schema", {})
    # A route that also takes a list of bodies: the page shows the body.
    schema = schema["oneOf"][0] if "oneOf" in schema else schema
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    found: dict[str, Any] = document["components"]["schemas"].get(name, schema)
    return found


def _example(path: str, method: str, operation: dict[str, Any], body: dict[str, Any]) -> str:
    """Return a shell command for the operation, or "" if it would need values that no example has."""
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            if parameter["name"] not in _PATH_VALUES:
                return ""
            path = path.replace(f"{{{parameter['name']}}}", _PATH_VALUES[parameter["name"]])
    command = f'curl -sS --fail-with-body "${URL}{path}" -H "Authorization: Bearer ${KEY}"'
    if method == "get":
        return command
    if method != "post" or not body.get("examples"):
        return ""
    # JSON in single quotes of the shell, with the model's name from its variable.
    text = json.dumps(body["examples"][0], ensure_ascii=False).replace("'", "'\\''")
    text = text.replace(f'"{EXAMPLE_MODEL}"', f'"\'"${MODEL}"\'"')
    return f"{command} \\\n  -H 'Content-Type: {_JSON}' \\\n  -d '{text}'"


def _marked(text: str) -> str:
    """Escape a text; what stands in backticks becomes code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
