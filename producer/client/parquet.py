"""The results of an export as a Parquet file, by pyarrow, which is optional."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.contract.errors import RequestError

SUFFIX = ".parquet"
_GROUP_ROWS = 10_000
"""Rows that are converted together."""


def check_pyarrow() -> None:
    """Raise RequestError without pyarrow."""
    try:
        import pyarrow.parquet  # noqa: F401  tests that it is installed
    except ImportError as error:
        message = "path: a file .parquet needs pyarrow: pip install 'penstock-llm[parquet]'"
        raise RequestError(message, param="path") from error


def write_parquet(lines: Path, path: Path) -> None:
    """Write the lines of an export as a Parquet file, which takes its place as a whole. It blocks.

    `text` and `finish_reason` are those of the first choice; `choices` has all of them as JSON.
    """
    import pyarrow as arrow
    from pyarrow.parquet import ParquetWriter

    schema = arrow.schema(
        [
            *((name, arrow.string()) for name in ("id", "custom_id", "state")),
            ("tags", arrow.list_(arrow.string())),
            ("metadata", arrow.map_(arrow.string(), arrow.string())),
            *((name, arrow.string()) for name in ("code", "message", "text", "finish_reason", "choices")),
            ("prompt_tokens", arrow.int64()),
            ("completion_tokens", arrow.int64()),
            ("embedding", arrow.list_(arrow.float32())),
            ("finished", arrow.timestamp("ms", tz="UTC")),
        ]
    )
    beside = path.with_name(path.name + ".new")
    with lines.open(encoding="utf-8") as file, ParquetWriter(str(beside), schema) as writer:
        rows = _rows_in(file)
        while group := list(islice(rows, _GROUP_ROWS)):
            writer.write_table(arrow.Table.from_pylist(group, schema=schema))
    beside.replace(path)


def _rows_in(file: Any) -> Iterator[dict[str, Any]]:
    for line in file:
        job = json.loads(line)
        result, outcome = job["result"] or {}, job["outcome"] or {}
        choices, usage = result.get("choices") or [], result.get("usage") or {}
        first = choices[0] if choices else {}
        yield {
            **{name: job[name] for name in ("id", "custom_id", "state", "tags")},
            "metadata": None if job["metadata"] is None else list(job["metadata"].items()),
            **{name: outcome.get(name) or None for name in ("code", "message")},
            **{name: first.get(name) for name in ("text", "finish_reason")},
            "choices": json.dumps(choices, ensure_ascii=False) if choices else None,
            **{name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")},
            "embedding": result.get("embedding"),
            "finished": job["finished_ms"],
        }
