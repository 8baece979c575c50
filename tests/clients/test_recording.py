"""Recorded requests keep the structure of bodies, and neither sentences nor names of sessions and folders."""

from __future__ import annotations

import json

from clients.recording import record_of

HEADERS = {"User-Agent": "agent/1", "anthropic-beta": "a,b", "X-Session-Id": "s-1", "Host": "here"}
SCHEMA = {
    "type": "object",
    "description": "Where to look.",
    "required": ["a b"],
    "properties": {"id": {"type": "string"}},
}


def test_texts_ids_and_folders_are_replaced() -> None:
    arguments = json.dumps({"path": "/home/me/work/a.txt", "cmd": "ls -l", "n": 1})
    call = {"id": "x7", "type": "function", "function": {"name": "look", "arguments": arguments}}
    body = {
        "model": "m",
        "system": [{"type": "text", "text": "x-anthropic-billing-header: v=1;"}, {"type": "text", "text": "Be good."}],
        "metadata": {"user_id": '{"device_id":"9f"}'},
        "tools": [{"name": "look", "parameters": SCHEMA}],
        "messages": [
            {"role": "user", "content": "<system-reminder>\nIt is late.\n</system-reminder>"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "x7", "content": "a.txt"},
        ],
    }
    recorded = record_of("/v1/x?beta=true", HEADERS, body)
    assert (recorded["path"], recorded["headers"]) == (
        "/v1/x?beta=true",
        {"user-agent": "agent/1", "anthropic-beta": "a,b"},
    )
    kept = recorded["body"]
    assert [block["text"] for block in kept["system"]] == ["x-anthropic-billing-header: 32", "text 8"]
    assert kept["metadata"] == {"user_id": "user"}
    assert kept["tools"][0]["parameters"] == SCHEMA | {"description": "description 14"}
    reminder, asked, result = kept["messages"]
    assert reminder["content"] == "<system-reminder>\ncontent 48\n</system-reminder>"
    assert asked["tool_calls"][0]["id"] == result["tool_call_id"] == "call_1"
    arguments = asked["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"path": "/project/a.txt", "cmd": "cmd 5", "n": 1}
    assert result["content"] == "a.txt"
