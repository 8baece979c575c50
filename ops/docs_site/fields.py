"""The tables of docs/FIELDS.md, made from the schemas: `make fields`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from starlette.routing import Route

from penstock.contract.fields import NO_EFFECT, RESPONSES, neutral_values_of, renamed_options
from penstock.contract.job import QueueFields
from penstock.contract.sampling import SamplingParams
from penstock.gateway.app import create_app
from penstock.gateway.settings import GatewaySettings
from penstock.producer.batch.endpoints import ENDPOINTS
from penstock.producer.openai.messages import ChatMessage

BEGIN, END = "<!-- begin: made by `make fields` -->", "<!-- end -->"
"""The lines between which docs/FIELDS.md holds the tables."""
HONORED, WITHOUT_EFFECT, REFUSED, UNKNOWN = "honored", "no effect", "refused", "unknown"
IGNORED = "ignored"
"""An unknown field of a record that accepts unknown fields, and lists them in a header of the answer."""
BODIES, TEXTS = "Fields of the body", "Fields of a body with texts to embed"
ANTHROPIC, TOKENS = "Fields of Anthropic's bodies", "Fields of a body about tokens"
TEI = "Fields of text-embeddings-inference's bodies"
JOB, PARAMS = "Fields of a job", "Fields of a job's `params`"
STREAM_OPTIONS, MESSAGE = "Fields of `stream_options`", "Fields of a message"
_PATHS = {
    BODIES: ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/compact"),
    ANTHROPIC: ("/v1/messages", "/v1/messages/count_tokens"),
    JOB: ("/v1/jobs",),
    PARAMS: (),
    TOKENS: ("/tokenize", "/detokenize"),
    TEXTS: ("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify", "/pooling"),
    TEI: ("/embed", "/predict", "/similarity", "/"),
    STREAM_OPTIONS: (),
    MESSAGE: (),
}
"""Table → the paths whose bodies have a column in it."""


# Of one user, or of our own code and files.
@cache
def _columns() -> Mapping[str, Mapping[str, type[BaseModel]]]:
    """Map each table to its columns, with the schemas that the gateway's table of APIs has."""
    # It connects to its Redis only when it begins to serve.
    app = create_app(GatewaySettings(redis_url="unix:///nowhere"))
    endpoints: dict[str, Any] = {route.path: route.endpoint for route in app.routes if type(route) is Route}
    schemas = {path: endpoint.schema for path, endpoint in endpoints.items() if hasattr(endpoint, "schema")}
    found = {title: {path: schemas[path] for path in paths if path in schemas} for title, paths in _PATHS.items()}
    found[PARAMS] = {"/v1/jobs": SamplingParams}
    for title in (BODIES, ANTHROPIC, TEXTS):
        found[title] |= {f"batch: {url}": ENDPOINTS[url].schema for url in found[title] if url in ENDPOINTS}
    names = {"chats and completions": "/v1/chat/completions", "/v1/responses": "/v1/responses"}
    found[STREAM_OPTIONS] = {
        column: next(_types_in(schemas[path].model_fields["stream_options"].annotation))
        for column, path in names.items()
        if path in schemas
    }
    found[MESSAGE] = {"`messages[]`": ChatMessage}
    return found


_LIMIT_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_OPTIONS = SamplingParams.model_fields | QueueFields.model_fields
_OPTION_OF = {"max_completion_tokens": "max_tokens"}
_OPTION_OF |= {there: name for name, there in renamed_options(SamplingParams, RESPONSES).items()}
"""Fields that penstock's sampling options call otherwise."""
_SHOWN_BITS = 20
"""Powers of two beyond this one are shown as powers."""


def effect_of(schema: type[BaseModel], name: str) -> str:
    """Return what a field does: honored, without effect, refused except for some values, refused, ignored, unknown."""
    field = _fields_of(schema).get(name)
    if field is None:
        return IGNORED if schema.model_config.get("extra") == "allow" else UNKNOWN
    if NO_EFFECT in (*field.metadata, *getattr(field.annotation, "__metadata__", ())):
        return WITHOUT_EFFECT
    neutral = neutral_values_of(field.metadata)
    if neutral is None:
        return HONORED
    if neutral.accepted == (None,):
        return REFUSED
    return "only " + " or ".join(f"`{value}`" for value in neutral.shown.split(" or "))


def effects(title: str = BODIES) -> dict[tuple[str, str], str]:
    """Map each (column, field) of a table to what the field does."""
    schemas = _columns()[title]
    names = _names_of(schemas)
    return {(path, name): effect_of(schema, name) for path, schema in schemas.items() for name in names}


def tables() -> str:
    """Return the tables as Markdown."""
    lines = [line for title, schemas in _columns().items() for line in _table(title, schemas)]
    return "\n".join([*lines, *_values_table()])


def values() -> dict[str, str]:
    """Map each sampling option and each choice of a body to the values that it accepts."""
    found: dict[str, str] = {}
    for title in (BODIES, ANTHROPIC, JOB, TOKENS, TEXTS, TEI):
        for schema in _columns()[title].values():
            for name, field in _fields_of(schema).items():
                if effect_of(schema, name) != HONORED:
                    continue
                option = _OPTIONS.get(_OPTION_OF.get(name, name), field)
                said = _choices_of(field.annotation) or _range_of(field) or _range_of(option)
                if said:
                    found.setdefault(name, said)
    return dict(sorted(found.items()))


def _values_table() -> Iterator[str]:
    yield "## Values of honored fields\n"
    yield "| field | accepted values |"
    yield "|---|---|"
    for name, said in values().items():
        yield f"| `{name}` | {said} |"
    yield ""


def _choices_of(annotation: Any) -> str:
    """Return the values of a Literal, which may be optional; "" for another type."""
    for part in _types_in(annotation):
        if get_origin(part) is Literal:
            return " or ".join(f"`{json.dumps(value)}`" for value in get_args(part))
    return ""


def _range_of(field: FieldInfo) -> str:
    """Return the limits of a number; "" for another type, or without a limit."""
    if not {int, float} & {*_types_in(field.annotation)}:
        return ""
    marks = [*field.metadata, *(mark for part in get_args(field.annotation) for mark in _marks_of(part))]
    limits = {name: getattr(mark, name) for mark in marks for name in _LIMIT_WORDS if hasattr(mark, name)}
    return ", ".join(f"{word} {_number(limits[name])}" for name, word in _LIMIT_WORDS.items() if name in limits)


def _types_in(annotation: Any) -> Iterator[Any]:
    """Yield the alternatives of an annotation, without their metadata."""
    for part in get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,):
        yield getattr(part, "__origin__", part) if hasattr(part, "__metadata__") else part


def _marks_of(annotation: Any) -> list[Any]:
    """Return the metadata of an annotation, and the marks inside of pydantic's Field."""
    marks = getattr(annotation, "__metadata__", ())
    return [inner for mark in marks for inner in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]


def _number(value: float) -> str:
    power, sign = int(abs(value)).bit_length() - 1, "-" if value < 0 else ""
    return f"{sign}2^{power}" if abs(value) == 2**power and power > _SHOWN_BITS else f"{value:,}".removesuffix(".0")


def _table(title: str, schemas: Mapping[str, type[BaseModel]]) -> Iterator[str]:
    yield f"## {title}\n"
    yield f"| field | {' | '.join(schemas)} |"
    yield "|---" * (1 + len(schemas)) + "|"
    for name in _names_of(schemas):
        cells = (effect_of(schema, name) for schema in schemas.values())
        yield f"| `{name}` | {' | '.join(cells)} |"
    yield ""


def _names_of(schemas: Mapping[str, type[BaseModel]]) -> list[str]:
    return sorted({name for schema in schemas.values() for name in _fields_of(schema)})


def _fields_of(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields by their names on the wire."""
    return {field.alias or name: field for name, field in schema.model_fields.items()}


def main() -> None:
    """Replace the tables of the file that the command line names."""
    path = sys.argv[1]
    with open(path) as page:
        before, rest = page.read().split(BEGIN)
    after = rest.split(END)[1]
    with open(path, "w") as page:
        page.write(f"{before}{BEGIN}\n\n{tables()}\n{END}{after}")


if __name__ == "__main__":
    main()
