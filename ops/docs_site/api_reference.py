"""Pages of the reference that are written from the interfaces: HTTP from OpenAPI, metrics, and the Python API."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as fields_of
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import Metric
from pydantic import BaseModel

import penstock
from penstock.contract.errors import PenstockError
from penstock.contract.pool import EVENTS
from penstock.gateway.app import create_gateway
from penstock.gateway.metrics import CLIENT_COUNTERS
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.engine.records import EngineStats
from penstock.gpu_node.jobs.times import JobMetrics
from penstock.gpu_node.monitor.engine_metrics import engine_metrics
from penstock.gpu_node.monitor.metrics import COUNTED, job_metrics
from penstock.runtime.histogram import Histogram
from penstock.runtime.loop_watch import LoopWatch, loop_metrics
from penstock.runtime.settings import Settings

ROOT = Path(penstock.__file__).resolve().parents[2]


def table(heads: tuple[str, ...], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a table, without columns that are empty; none without rows."""
    columns = [
        (head, cells)
        for head, *cells in zip(heads, *([line(cell) for cell in row] for row in rows), strict=True)
        if any(cells)
    ]
    if not columns:
        return []
    shown = [[head for head, _ in columns], ["---"] * len(columns), *zip(*(cells for _, cells in columns), strict=True)]
    return [*(f"| {' | '.join(cells)} |" for cells in shown), ""]


def line(text: str) -> str:
    """Return a text as one cell of a table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


# HTTP.


def http_page() -> str:
    """Return the page of all routes, from the document that a gateway serves as /openapi.json."""
    document = _openapi()
    operations = [
        (path, method.upper(), operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if method != "head"
    ]
    head = "Made from the OpenAPI document that each gateway serves as `/openapi.json`."
    more = "[HTTP](../docs/HTTP.md) explains them, and [Fields](../docs/FIELDS.md) each field of a body."
    lines = ["# HTTP by route", "", head, more, ""]
    lines += table(
        ("route", "what it does"), ((f"`{method} {path}`", one["summary"]) for path, method, one in operations)
    )
    for path, method, operation in operations:
        lines += _operation(document, path, method, operation)
    return "\n".join(lines)


def _openapi() -> dict[str, Any]:
    # It connects to its Redis only when it begins to serve.
    gateway = create_gateway(GatewaySettings(redis_url="unix:///nowhere"))

    async def read() -> httpx.Response:
        transport = httpx.ASGITransport(gateway.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/openapi.json")

    document: dict[str, Any] = asyncio.run(read()).raise_for_status().json()
    return document


def _operation(document: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> list[str]:
    lines = [f"## `{method} {path}`", "", operation["summary"], ""]
    if text := operation.get("description"):
        lines += [inspect.cleandoc(text), ""]
    if scopes := [f"`{scope}`" for one in operation.get("security", ()) for scope in one.get("key", ())]:
        lines += [f"A key needs the scope {' or '.join(scopes)}.", ""]
    parameters = [
        (f"`{one['name']}`", one["in"], _type_of(one.get("schema", {})), one.get("description", ""))
        for one in operation.get("parameters", ())
    ]
    lines += table(("parameter", "in", "type", "meaning"), parameters)
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schema = _resolved(document, content.get("schema", {}))
        required = schema.get("required", ())
        rows = [
            (f"`{name}`", _type_of(of), "required" if name in required else _default(of), of.get("description", ""))
            for name, of in schema.get("properties", {}).items()
        ]
        lines += table(("field of the body", "type", "default", "meaning"), rows)
    return lines


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    for alternative in schema.get("oneOf", ())[:1]:
        return _resolved(document, alternative)
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = document["components"]["schemas"].get(name, schema)
    return found


def _type_of(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    several = [part for form in ("anyOf", "oneOf", "allOf") for part in schema.get(form, ())]
    if several:
        return " or ".join(dict.fromkeys(_type_of(part) for part in several))
    kind = str(schema.get("type", "any"))
    return f"array of {_type_of(schema['items'])}" if kind == "array" and schema.get("items") else kind


def _default(schema: Mapping[str, Any]) -> str:
    return "" if schema.get("default") is None else f"`{json.dumps(schema['default'])}`"


# Metrics.


@dataclass(frozen=True, slots=True)
class Family:
    """A metric as Prometheus sees it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


_KINDS = {
    **dict.fromkeys(("Counter", "CounterMetricFamily", "counter"), "counter"),
    **dict.fromkeys(("Gauge", "GaugeMetricFamily", "gauge"), "gauge"),
    **dict.fromkeys(("Histogram", "HistogramMetricFamily", "histogram"), "histogram"),
}
_PARTS = {
    "A node": ("gpu_node/monitor/*.py",),
    "A gateway": ("gateway/*.py",),
    "A Celery worker": ("producer/batch/worker_metrics.py",),
}
_SIZES = Histogram((1, 2))
_STATS = EngineStats(
    steps=0, prefill_tokens=0, decode_tokens=0, step_seconds=_SIZES, batch_sequences=_SIZES, batch_tokens=_SIZES
)


def metrics_page() -> str:
    """Return the page of all metrics of our own."""
    lines = ["# Metrics by name", "", "Made from the code. [Metrics](../ops/METRICS.md) says what they tell.", ""]
    for part, families in metric_families().items():
        lines += [f"## {part}", ""]
        rows = (
            (f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels), one.text)
            for one in sorted(families, key=lambda one: one.name)
        )
        lines += table(("metric", "kind", "labels", "meaning"), rows)
    return "\n".join(lines)


def metric_families() -> dict[str, list[Family]]:
    """Return the metrics of each kind of process, with their names as in a query without the suffixes of histograms."""
    made = {"A node": [*_made_by_node()], "A gateway": [*_made_by_gateway()], "A Celery worker": list[Family]()}
    found: dict[str, list[Family]] = {}
    for part, patterns in _PARTS.items():
        stated = [one for pattern in patterns for path in sorted(ROOT.glob(pattern)) for one in _stated_in(path)]
        # What a collector yields says more than its source.
        found[part] = [*{one.name: one for one in (*stated, *made[part])}.values()]
    return found


def _made_by_node() -> Iterator[Family]:
    yield from map(_family_of, engine_metrics(_STATS))
    yield from map(_family_of, job_metrics(JobMetrics(), "model"))
    for name, text in COUNTED.items():
        yield _family("counter", f"penstock_node_{name}", text)
    watch = LoopWatch(interval_s=1.0, names_holders=False)
    yield from map(
        _family_of, loop_metrics("penstock_node_loop_late_seconds", "penstock_node_loop_hold_seconds", watch)
    )


def _made_by_gateway() -> Iterator[Family]:
    for name, text in CLIENT_COUNTERS.items():
        yield _family("counter", f"penstock_client_{name}", text)
    for event, text in EVENTS.items():
        yield _family("counter", f"penstock_pool_{event}", f"{text[0].upper()}{text[1:]}.", ("pool",))
    watch = LoopWatch(interval_s=1.0, names_holders=False)
    names = "penstock_gateway_loop_late_seconds", "penstock_gateway_loop_hold_seconds"
    yield from map(_family_of, loop_metrics(*names, watch))


def _family(kind: str, name: str, text: str, labels: tuple[str, ...] = ()) -> Family:
    return Family(f"{name}_total" if kind == "counter" else name, kind, labels, text)


def _family_of(metric: Metric) -> Family:
    labels = dict.fromkeys(label for sample in metric.samples for label in sample.labels if label != "le")
    labels |= dict.fromkeys(getattr(metric, "_labelnames", ()))
    return _family(metric.type, metric.name, metric.documentation, tuple(labels))


def _stated_in(path: Path) -> Iterator[Family]:
    """Yield the metrics that a module makes under a constant name."""
    tree = ast.parse(path.read_text())
    names = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    texts: dict[str, str] = {}
    for node in _in_order(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (text := _text(node.value, {})):
            texts[node.targets[0].id] = text
        elif isinstance(node, ast.Call) and (kind := _KINDS.get(_name(node.func))) and len(node.args) > 1:
            given = {one.arg: one.value for one in node.keywords}
            labels = given.get("labels", node.args[2] if len(node.args) > 2 else None)
            if (name := _text(node.args[0], {})).startswith("penstock_"):
                yield _family(kind, name, _text(node.args[1], texts), _labels(labels, names))
        elif isinstance(node, ast.Tuple) and len(node.elts) > 1 and _text(node.elts[0], {}).startswith("penstock_"):
            if text := _text(node.elts[1], {}):
                yield _family("gauge", _text(node.elts[0], {}), text, ("pool",))
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is not None and (name := _text(key, {})).startswith("penstock_"):
                    yield _family("gauge" if name.startswith("penstock_gpu") else "counter", name, _text(value, {}))


def _in_order(tree: ast.AST) -> list[ast.AST]:
    return sorted((node for node in ast.walk(tree) if hasattr(node, "lineno")), key=lambda node: node.lineno)


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.AST, texts: Mapping[str, str]) -> str:
    if isinstance(node, ast.Name):
        return texts.get(node.id, "")
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _labels(node: ast.AST | None, names: Mapping[str, ast.expr]) -> tuple[str, ...]:
    if isinstance(node, ast.Name):
        return _labels(names.get(node.id), names)
    if not isinstance(node, ast.Tuple):
        return ()
    found: list[str] = []
    for part in node.elts:
        found += _labels(part.value, names) if isinstance(part, ast.Starred) else [_text(part, {})]
    return tuple(label for label in found if label)


# Python.

_KINDS_OF_NAMES: dict[str, Callable[[Any], bool]] = {
    "Clients and jobs": lambda one: one.__name__ in ("Client", "AsyncClient", "Job", "AsyncJob"),
    "The engine": lambda one: one.__name__ in ("Engine", "AsyncEngine"),
    "Settings": lambda one: issubclass(one, Settings) or one.__name__ == "EngineConfig",
    "Errors": lambda one: issubclass(one, PenstockError),
    "Records and options": lambda one: True,
}


def python_page() -> str:
    """Return the page of what `from penstock import …` gives."""
    lines = ["# Python by name", "", "What `from penstock import …` gives, made from the code."]
    lines += ["[Python](../docs/PYTHON.md) explains how it is used.", ""]
    left = {name: getattr(penstock, name) for name in penstock.__all__ if name != "__version__"}
    functions = {name: left.pop(name) for name in [*left] if not inspect.isclass(left[name])}
    for title, belongs in _KINDS_OF_NAMES.items():
        lines += [f"## {title}", ""]
        for name in [name for name, one in left.items() if belongs(one)]:
            lines += _class(name, left.pop(name), has_methods=title in ("Clients and jobs", "The engine"))
    lines += ["## Functions", ""]
    for name, one in functions.items():
        lines += [f"### `{name}{_signature(one)}`", "", *_prose(one)]
    return "\n".join(lines)


def _class(name: str, one: type, *, has_methods: bool) -> list[str]:
    lines = [f"### `{name}`", "", *_prose(one)]
    if issubclass(one, Settings):
        return [*lines, "Its fields are in [Settings](settings.md).", ""]
    rows = [(f"`{field}`", of, text) for field, of, text in _fields_of(one)]
    lines += table(("field", "type", "meaning"), rows)
    if not has_methods:
        return lines
    for method, found in inspect.getmembers(one, lambda each: inspect.isfunction(each) or isinstance(each, property)):
        if method.startswith("_"):
            continue
        is_property = isinstance(found, property)
        shown = method if is_property else f"{method}{_signature(found)}"
        word = "async " if inspect.iscoroutinefunction(found) else ""
        lines += [f"#### `{word}{shown}`", "", *_prose(found.fget if is_property else found)]
    return lines


def _fields_of(one: type) -> Iterator[tuple[str, str, str]]:
    texts = _docstrings_of(one)
    if is_dataclass(one):
        names = {field.name: field.type for field in fields_of(one)}
    elif issubclass(one, BaseModel):
        names = {name: one.__annotations__.get(name, "") for name in one.model_fields}
    else:
        names = {}
    for name, kind in names.items():
        if not name.startswith("_"):
            yield name, f"`{line(str(kind))}`" if kind else "", texts.get(name, "")


@cache
def _docstrings_of(one: type) -> dict[str, str]:
    """Return the texts below the fields of a class."""
    try:
        (tree,) = ast.parse(inspect.cleandoc(inspect.getsource(one))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    pairs = pairwise(body)
    return {
        _name(field.target): line(_text(text.value, {}))
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _prose(one: Any) -> list[str]:
    text = inspect.getdoc(one) or ""
    # An indented part of a docstring is code already; a table's bar and a tag would be markup.
    return [text.replace("<", "&lt;"), ""] if text else []


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    own = [one for name, one in signature.parameters.items() if name not in ("self", "cls")]
    text = line(str(signature.replace(parameters=own))).replace("\\|", "|")
    # Annotations are texts, which would be in quotes.
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
