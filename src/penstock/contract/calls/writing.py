"""Writing of tool calls as a model of each format writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.contract.tool_formats import CDATA, FENCE, FENCE_END, ITEM, ToolFormat


def written_calls(form: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the text of calls, each a name and its arguments."""
    if not calls:
        return ""
    lists = [[call] for call in calls] if form.section_per_call else [calls]
    return form.between.join(_list_of(form, one) for one in lists)


def _list_of(form: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    written = form.between.join(_written(form, *call, number) for number, call in enumerate(calls))
    written = f"[{written}]" if form.is_list else written
    written = f"\n{FENCE}\n{written}\n{FENCE_END}" if form.is_fenced else written
    if form.is_bare:
        return written
    padding = form.padding if form.section else ""
    return f"{form.section}{padding}{written}{padding}{form.section_end}"


def _written(form: ToolFormat, name: str, arguments: Mapping[str, Any], number: int) -> str:
    if form.kind == "json":
        text = _json({form.name_key: name, form.arguments_key: arguments})
        if form.is_bare or (form.section and not form.call):
            return text
        return f"{form.call}{form.padding}{text}{form.padding}{form.call_end}"
    counted = f"{form.number_mark}{number}" if form.number_mark else ""
    numbered = f"call{number:05}{form.id_end}" if form.id_end else ""
    head = f"{form.call}{numbered}{form.name_prefix}{name}{counted}{form.name_end}"
    if form.kind == "named":
        return f"{head}{_json(arguments)}{form.call_end}"
    if form.kind == "expressions":
        members = form.comma.join(f"{key}{form.assigns}{literal(form, value)}" for key, value in arguments.items())
        return f"{head}{members}{form.arguments_end}{form.call_end}"
    parts = [head, *(_argument(form, key, value) for key, value in arguments.items()), form.call_end]
    return form.padding.join(parts)


def _argument(form: ToolFormat, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    if form.ends_with_key:
        return _nested(form, key, value)
    text = value if is_text else _json(value)
    if form.has_cdata and is_text and any(char in value for char in "<&\n"):
        text = value.join(CDATA)
    newline = "\n" if form.has_newlines else ""
    told = ("true" if is_text else "false") if form.tells_text else _type_of(value) if form.tells_type else ""
    return f"{form.argument}{key}{form.key_end}{told}{form.value}{newline}{text}{newline}{form.value_end}"


def _nested(form: ToolFormat, key: str, value: Any) -> str:
    """Return a value between tags of its name, with tags for what is inside of it."""
    if isinstance(value, dict) and value:
        text = "".join(_nested(form, inner, one) for inner, one in value.items())
    elif isinstance(value, list) and value:
        text = "".join(_nested(form, ITEM, one) for one in value)
    else:
        text = value if isinstance(value, str) else _json(value)
    return f"{form.argument}{key}{form.key_end}{text}{form.value_end}{key}{form.key_end}"


_TYPES = ((bool, "boolean"), (str, "string"), (int | float, "number"), (dict, "object"), (list, "array"))


def _type_of(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")


_PLAIN_KEY = re.compile(r"[^\W\d]\w*")


def literal(form: ToolFormat, value: Any) -> str:
    """Return a value of an expression."""
    if isinstance(value, dict):
        parts = (
            f"{_key(form, key)}:{' ' if form.comma != ',' else ''}{literal(form, one)}" for key, one in value.items()
        )
        return f"{{{form.comma.join(parts)}}}"
    if isinstance(value, list):
        return f"[{form.comma.join(literal(form, one) for one in value)}]"
    if isinstance(value, str):
        return value.join((form.text_mark,) * 2) if form.text_mark else _json(value)
    return _json(value) if form.text_mark or not (value is None or isinstance(value, bool)) else repr(value)


def _key(form: ToolFormat, key: str) -> str:
    return key if form.text_mark and _PLAIN_KEY.fullmatch(key) else literal(form, key)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
