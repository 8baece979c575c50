"""Calls that other servers were reported to read wrongly: the model writes them, a client reads the answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fakes.scripted_model import ScriptedEngine, script_of

FORMS = ("hermes", "qwen3_coder", "glm45", "lfm2")
_TYPES = {"city": "string", "days": "integer", "ratio": "number", "exact": "boolean", "tags": "array"}
_PARAMETERS = {"type": "object", "properties": {name: {"type": kind} for name, kind in _TYPES.items()}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": _PARAMETERS}} for name in ("weather", "now", "save")
]


@pytest.fixture(scope="module", autouse=True)
def nodes(stack: Any) -> None:
    for form in FORMS:
        stack.start_node(ScriptedEngine(form), model=f"acme/{form}", pool=f"reported-{form}", tool_parser=form)


def asked(url: str, form: str, said: str, **more: Any) -> dict[str, Any]:
    """Return the choice of the answer to a model that says this text."""
    messages = [*more.pop("messages", []), {"role": "user", "content": script_of(said)}]
    body = {"model": f"acme/{form}", "messages": messages, "tools": TOOLS, **more}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def streamed(url: str, form: str, said: str, **more: Any) -> tuple[list[tuple[str, str]], str, list[str]]:
    """Return the calls of a stream as name and arguments, its text, and the pieces of the arguments."""
    body = {"model": f"acme/{form}", "messages": [{"role": "user", "content": script_of(said)}], "tools": TOOLS}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body | more | {"stream": True}, timeout=60)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [one["choices"][0]["delta"] for one in map(json.loads, lines) if one["choices"]]
    calls: dict[int, list[str]] = {}
    pieces = []
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            found = calls.setdefault(call["index"], ["", ""])
            found[0] += call["function"].get("name") or ""
            found[1] += call["function"].get("arguments") or ""
            pieces.append(call["function"].get("arguments") or "")
    return [(name, text) for name, text in calls.values()], "".join(one.get("content") or "" for one in deltas), pieces


def both(url: str, form: str, said: str, **more: Any) -> list[tuple[str, Any]]:
    """Return the calls of a text, which are the same in a stream as in a whole answer."""
    whole = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in asked(url, form, said, **more)["message"].get("tool_calls", [])
    ]
    assert [(name, json.loads(text)) for name, text in streamed(url, form, said, **more)[0]] == whole
    return whole


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def qwen(name: str, **values: str) -> str:
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def glm(name: str, **values: str) -> str:
    parts = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{parts}</tool_call>"


def test_a_call_after_one_without_arguments_keeps_its_own(url: str) -> None:
    """vllm#47901: arguments of each call after an empty one were dropped from streams."""
    expected = [("now", {}), ("weather", {"city": "Rome"}), ("now", {})]
    calls = [hermes("now", "{}"), hermes("weather", '{"city": "Rome"}'), hermes("now", "{}")]
    assert both(url, "hermes", "\n".join(calls)) == expected
    assert both(url, "qwen3_coder", "\n".join([qwen("now"), qwen("weather", city="Rome"), qwen("now")])) == expected
    assert both(url, "glm45", "\n".join([glm("now"), glm("weather", city="Rome"), glm("now")])) == expected
    assert both(url, "lfm2", '<|tool_call_start|>[now(), weather(city="Rome"), now()]<|tool_call_end|>') == expected


def test_pieces_of_arguments_add_up_to_what_the_model_wrote(url: str) -> None:
    """vllm#51697, #10395: a stream's arguments came twice, or with a quote between the parts of a value."""
    written = '{"days": 23, "ratio": 0.8, "city": "ZSJB39", "tags": ["M62121G9142"]}'
    calls, text, _ = streamed(url, "hermes", hermes("weather", written))
    assert ([(name, json.loads(one)) for name, one in calls], text) == ([("weather", json.loads(written))], "")


def test_arguments_may_come_before_the_name(url: str) -> None:
    """vllm#9693: the stream had the name and no arguments."""
    said = '<tool_call>\n{"arguments": {"days": 2, "city": "Rome"}, "name": "weather"}\n</tool_call>'
    assert both(url, "hermes", said) == [("weather", {"days": 2, "city": "Rome"})]


def test_expressions_have_quotes_of_either_kind(url: str) -> None:
    """llama.cpp#23838: the documented form of LFM2.5 ended in a 500."""
    said = "<|tool_call_start|>[weather(city='It\\'s \"Rome\"', days=5, exact=True)]<|tool_call_end|>"
    assert both(url, "lfm2", said) == [("weather", {"city": 'It\'s "Rome"', "days": 5, "exact": True})]


@pytest.mark.parametrize("form", FORMS)
def test_one_call_is_one_call(url: str, form: str) -> None:
    """sglang#9696, #37157: `parallel_tool_calls: false` counted only where a grammar held the answer."""
    two = hermes("weather", '{"city": "Rome"}') + hermes("weather", '{"city": "Oslo"}')
    assert both(url, form, two, parallel_tool_calls=False) == [("weather", {"city": "Rome"})]
    assert len(both(url, form, two)) == 2


def test_arguments_with_the_names_of_a_call_stay_arguments(url: str) -> None:
    """ollama#11805: `name` and `arguments` inside the arguments were taken for the call's own, or the other way."""
    inner = {"name": "John", "arguments": {"name": "now", "parameters": [1]}}
    assert both(url, "hermes", hermes("save", json.dumps(inner))) == [("save", inner)]


def test_quotes_in_a_tagged_value_are_escaped_once(url: str) -> None:
    """llama.cpp#16932: `"From Zero" album` became text that was no JSON; #15186: line breaks were escaped twice."""
    value = '"From Zero" album\nC:\\new "x", <b>'
    assert both(url, "qwen3_coder", qwen("weather", city=value, days="3")) == [("weather", {"city": value, "days": 3})]
    assert both(url, "glm45", glm("weather", city=value, days="3")) == [("weather", {"city": value, "days": 3})]


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45", "hermes"])
def test_a_long_text_streams_while_it_is_written(url: str, form: str) -> None:
    """vllm#30439: all arguments came at the end."""
    _, _, pieces = streamed(url, form, hermes("weather", json.dumps({"city": "word " * 1200})))
    assert len(pieces) > 5 and max(map(len, pieces)) < 1500


@pytest.mark.parametrize("arguments", ["", "{}", None, {"city": "Rome"}], ids=repr)
def test_earlier_arguments_may_be_empty_absent_or_an_object(url: str, arguments: Any) -> None:
    """agno#8999, open-webui#24825: arguments of other servers, sent back, ended in an error."""
    function = {"name": "weather"} | ({} if arguments is None else {"arguments": arguments})
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    history = [{"role": "user", "content": "q"}, called, {"role": "tool", "tool_call_id": "c1", "content": "Sunny."}]
    assert asked(url, "hermes", "Done.", messages=history)["message"]["content"] == "Done."


def test_text_before_and_after_a_call_is_shown_once(url: str) -> None:
    """vllm#19056 and llama.cpp#18183: beside calls, marks leaked into the text, or text was lost."""
    said = f"I look.\n{hermes('now', '{}')}\nDone <tool_cal"
    calls, text, _ = streamed(url, "hermes", said)
    assert calls == [("now", "{}")] and text.split() == ["I", "look.", "Done", "<tool_cal"]


CALL_OF = {
    "hermes": hermes("weather", '{"city": "Rome"}'),
    "qwen3_coder": qwen("weather", city="Rome"),
    "glm45": glm("weather", city="Rome"),
    "lfm2": '<|tool_call_start|>[weather(city="Rome")]<|tool_call_end|>',
}


@pytest.fixture(scope="module")
def thinking(stack: Any) -> None:
    for form in FORMS:
        model, pool = f"acme/thinking-{form}", f"thinking-{form}"
        engine = ScriptedEngine(form)
        stack.start_node(engine, model=model, pool=pool, tool_parser=form, reasoning_parser="think_open")


@pytest.mark.parametrize("form", FORMS)
def test_a_call_ends_reasoning_that_the_model_did_not_close(url: str, thinking: None, form: str) -> None:
    """vllm#35687, #33646: the call was lost as reasoning. lmstudio-bug-tracker#1592: prose was read as a call."""
    name = f"thinking-{form}"
    mark = CALL_OF[form].split("\n", 1)[0].split("weather", 1)[0]
    prose = f"A call begins with {mark} or {mark}\n other. I ask."
    said = f"{prose}\n{CALL_OF[form]}"
    message = asked(url, name, said)["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert message["reasoning_content"].strip() == prose and not message["content"]
    assert both(url, name, said) == [("weather", {"city": "Rome"})]
    only_prose = asked(url, name, prose)
    assert only_prose["message"]["reasoning_content"] == prose and only_prose["finish_reason"] == "stop"
    closed = asked(url, name, f"hm</think>{CALL_OF[form]}")["message"]
    assert (closed["reasoning_content"], len(closed["tool_calls"])) == ("hm", 1)


def test_a_forced_call_begins_behind_the_reasoning(url: str, thinking: None) -> None:
    """The grammar of a forced call begins there, so a call inside the reasoning is none."""
    said = f"I could {CALL_OF['hermes']}</think>{hermes('now', '{}')}"
    message = asked(url, "thinking-hermes", said, tool_choice="required")["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
