"""Writing of tool calls as a model of each format writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.contract.tool_formats import ToolFormat


def written_calls(form: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the text of calls, each a name and its arguments."""
    if not calls:
        return ""
    lists = [[call] for call in calls] if form.section_per_call else [calls]
    return form.between.join(_list_of(form, one) for one in lists)


def _list_of(form: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    written = form.between.join(_written(form, *call, number) for number, call in enumerate(calls))
    written = f"[{written}]" if form.is_list else written
    padding = form.padding if form.section else ""
    return f"{form.section}{padding}{written}{padding}{form.section_end}"


def _written(form: ToolFormat, name: str, arguments: Mapping[str, Any], number: int) -> str:
    if form.kind == "json":
        text = _json({form.name_key: name, form.arguments_key: arguments})
        if form.is_bare or form.section:
            return text
        return f"{form.call}{form.padding}{text}{form.padding}{form.call_end}"
    counted = f":{number}" if form.counts_calls else ""
    numbered = f"call{number:05}{form.id_end}" if form.id_end else ""
    head = f"{form.call}{numbered}{form.name_prefix}{name}{counted}{form.name_end}"
    if form.kind == "named":
        return f"{head}{_json(arguments)}{form.call_end}"
    parts = [head, *(_argument(form, key, value) for key, value in arguments.items()), form.call_end]
    return form.padding.join(parts)


def _argument(form: ToolFormat, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    text = value if is_text else _json(value)
    newline = "\n" if form.has_newlines else ""
    told = ("true" if is_text else "false") if form.tells_text else ""
    return f"{form.argument}{key}{form.key_end}{told}{form.value}{newline}{text}{newline}{form.value_end}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
