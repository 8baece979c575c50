"""Tools of models whose chat template does not offer them, or hides calls or results: the node writes these texts.

A told model finds the tools and the form of a call in the system message. Its calls are the text of its messages. Their
results come in messages of the role `tool` if the template shows these, else of the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.contract.calls.writing import written_calls
from penstock.gpu_node.engine.text.recognition import ToolUseOfTemplate

_EXAMPLE = "example_function", {"argument": "value"}


def with_tools_written(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, use: ToolUseOfTemplate
) -> list[dict[str, Any]]:
    """Return messages in the format of templates, with everything as text that the template does not show itself."""
    written: list[dict[str, Any]] = []
    for message in messages:
        one = dict(message)
        if not use.shows_calls and (calls := one.pop("tool_calls", None)):
            pairs = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            said = one.get("content") or ""
            one["content"] = said + ("\n" if said else "") + written_calls(use.form, pairs)
        is_result = one["role"] == "tool" and not use.shows_results
        if is_result:
            name = f' name="{one["name"]}"' if "name" in one else ""
            one = {"role": "user", "content": f"<tool_response{name}>\n{one['content']}\n</tool_response>"}
        last = written[-1] if written else None
        if last is not None and last.get("holds_results") and one["role"] == "user":
            # Some templates take no two messages of the user in a row.
            last["content"] += "\n" + one["content"]
        else:
            written.append(one | {"holds_results": True} if is_result else one)
    written = [{key: value for key, value in one.items() if key != "holds_results"} for one in written]
    return written if tools is None or use.offers_tools else _with_told(written, tools, use)


def _with_told(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], use: ToolUseOfTemplate
) -> list[dict[str, Any]]:
    told = told_tools(tools, use)
    first = messages[0]
    if first["role"] == "system" or (not use.has_system_role and first["role"] == "user"):
        parts = (first["content"], told) if first["role"] == "system" else (told, first["content"])
        return [first | {"content": "\n\n".join(part for part in parts if part)}, *messages[1:]]
    return [{"role": "system" if use.has_system_role else "user", "content": told}, *messages]


def told_tools(tools: Sequence[Mapping[str, Any]], use: ToolUseOfTemplate) -> str:
    """Return the text that tells a model of tools and of the form in which it calls them."""
    example = written_calls(use.form, [_EXAMPLE])
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call functions. These are the functions, one in each line, with their parameters as a JSON schema:\n"
        f"{functions}\n\n"
        f"To call a function, write its name and arguments in exactly this form:\n{example}\n"
        "Write several calls one behind the other. End your message after the calls; their results come in the next "
        "messages. Without need for a function, answer in plain text."
    )
