"""The table of request fields in FIELDS.md, made from the schemas: `python -m penstock.gateway.openai.field_table`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from penstock.contract.named import Named
from penstock.gateway.embeddings.schemas import EmbeddingRequest, RerankRequest, ScoreRequest
from penstock.gateway.openai.schemas import ChatRequest, CompletionRequest, StreamOptions
from penstock.gateway.responses.body import ResponseBody
from penstock.gateway.responses.body import StreamOptions as ResponseStreamOptions
from penstock.producer.batch.request import ROWS
from penstock.producer.openai.fields import NO_EFFECT, neutral_values_of
from penstock.producer.openai.messages import ChatMessage

BEGIN, END = "<!-- begin: made by `make fields` -->", "<!-- end -->"
"""The lines between which FIELDS.md holds the tables."""
HONORED, WITHOUT_EFFECT, REFUSED, UNKNOWN = "honored", "no effect", "refused", "unknown"
_TABLES: Mapping[str, Mapping[str, type[Named]]] = {
    "Fields of the body": {
        "/v1/chat/completions": ChatRequest,
        "/v1/completions": CompletionRequest,
        "/v1/responses": ResponseBody,
        **{f"batch: {url}": row for url, row in ROWS.items()},
    },
    "Fields of a body with texts to embed": {
        "/v1/embeddings": EmbeddingRequest,
        "/rerank": RerankRequest,
        "/score": ScoreRequest,
    },
    "Fields of `stream_options`": {"chats and completions": StreamOptions, "/v1/responses": ResponseStreamOptions},
    "Fields of a message": {"`messages[]`": ChatMessage},
}


def effect_of(field: FieldInfo | None) -> str:
    """Return what a field does: honored, without effect, refused except for neutral values, refused, or unknown."""
    if field is None:
        return UNKNOWN
    if NO_EFFECT in field.metadata or _is_hint(field.annotation):
        return WITHOUT_EFFECT
    neutral = neutral_values_of(field.metadata)
    if neutral is None:
        return HONORED
    return REFUSED if neutral.accepted == (None,) else f"only {_code(neutral.shown)}"


def effects() -> dict[tuple[str, str], str]:
    """Map each (endpoint, field) of the first table to what the field does."""
    schemas = _TABLES["Fields of the body"]
    names = _names_of(schemas)
    return {
        (path, name): effect_of(schema.model_fields.get(name)) for path, schema in schemas.items() for name in names
    }


def tables() -> str:
    """Return the tables as Markdown."""
    return "\n".join(line for title, schemas in _TABLES.items() for line in _table(title, schemas))


def _table(title: str, schemas: Mapping[str, type[Named]]) -> Iterator[str]:
    yield f"## {title}\n"
    yield f"| field | {' | '.join(schemas)} |"
    yield "|---" * (1 + len(schemas)) + "|"
    for name in _names_of(schemas):
        cells = (effect_of(schema.model_fields.get(name)) for schema in schemas.values())
        yield f"| `{name}` | {' | '.join(cells)} |"
    yield ""


def _names_of(schemas: Mapping[str, type[Named]]) -> list[str]:
    return sorted({name for schema in schemas.values() for name in schema.model_fields})


def _is_hint(annotation: Any) -> bool:
    return NO_EFFECT in getattr(annotation, "__metadata__", ())


def _code(shown: str) -> str:
    return " or ".join(f"`{value}`" for value in shown.split(" or "))


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
