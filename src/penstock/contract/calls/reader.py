"""The reader of each kind of tool calls."""

from __future__ import annotations

from penstock.contract.calls.expressions import ExpressionCallReader
from penstock.contract.calls.json_calls import JsonArguments, JsonCallReader
from penstock.contract.calls.reading import CallReader, NamedCallReader
from penstock.contract.tool_formats import ToolFormat


def reader_of(form: ToolFormat, functions: str | None = None) -> CallReader:
    """Return a reader for the calls of one choice. `functions`: the offered tools as JSON text, with their schemas."""
    if form.kind == "json":
        return JsonCallReader(form)
    if form.kind == "expressions":
        return ExpressionCallReader(form)
    if form.kind == "named":
        return NamedCallReader(form, lambda name: JsonArguments())
    from penstock.contract.calls.tagged_arguments import TaggedArguments, types_of

    types = types_of(functions)
    return NamedCallReader(form, lambda name: TaggedArguments(form, types.get(name, {})))
