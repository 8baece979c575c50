"""`POST /v1/messages` over plain HTTP. The node echoes each chat's last message as its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from penstock.contract.tools import MAX_TOOLS
from penstock.producer.anthropic.bodies import MessageBody

ECHO, CALLER = "acme/echo", "acme/caller"
CALLS = """Wait.
<tool_call>
{"name": "f", "arguments": {"a": 1}}
</tool_call>
<tool_call>{"name": "g", "arguments": {}}</tool_call>"""
TOOLS = [{"name": "f", "description": "does f", "input_schema": {"type": "object", "properties": {"b": {}, "a": {}}}}]


@pytest.fixture(scope="module")
def calling_engine(stack: Any, shared_engine: Any) -> Any:
    engine = type(shared_engine)()
    stack.start_node(engine, model=CALLER, pool="caller", tool_parser="hermes", reasoning_parser="think")
    return engine


@pytest.fixture
def calling(url: str, calling_engine: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": ECHO, "max_tokens": 200, "messages": [{"role": "user", "content": text}], **more}


def create(http: httpx.Client, text: str, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/messages", json=body(text, **more))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events_of(http: httpx.Client, text: str, **more: Any) -> list[dict[str, Any]]:
    answer = http.post("/v1/messages", json=body(text, stream=True, **more))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return [event for event in events if event["type"] != "ping"]


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join a stream's events to blocks as a client does. Assert that each starts, grows and ends in order."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert (event["index"], is_open) == (len(blocks), False)
            blocks.append(event["content_block"])
            is_open = True
        elif event["type"] == "content_block_delta":
            assert (event["index"], is_open) == (len(blocks) - 1, True)
            delta = event["delta"]
            name = {
                "text_delta": "text",
                "thinking_delta": "thinking",
                "input_json_delta": "partial_json",
                "signature_delta": "signature",
            }[delta["type"]]
            blocks[-1][name] = blocks[-1].get(name, "") + delta[name]
        elif event["type"] == "content_block_stop":
            assert (event["index"], is_open) == (len(blocks) - 1, True)
            is_open = False
    assert not is_open
    for block in blocks:
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(block.pop("partial_json"))
    return blocks


def sent_chat(engine: Any) -> list[dict[str, Any]]:
    return [dict(message) for message in engine.tokenizer.last_chat[0]]


# Whole answers ----------------------------------------------------------------------------------


def test_whole_answer_is_a_message_with_text_and_usage(http: httpx.Client) -> None:
    message = create(http, "Hé!")
    assert message.pop("id").startswith("msg_echo.")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": ECHO,
        "content": [{"type": "text", "text": "Hé!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 4,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


def test_max_tokens_ends_the_answer(http: httpx.Client) -> None:
    message = create(http, "abcdef", max_tokens=3)
    assert message["content"] == [{"type": "text", "text": "abc"}]
    assert message["stop_reason"] == "max_tokens"


def test_whole_answer_tells_which_stop_sequence_matched_and_does_not_show_it(http: httpx.Client) -> None:
    message = create(http, "abc;def|", stop_sequences=["|", ";"])
    assert message["content"] == [{"type": "text", "text": "abc"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", ";")


def test_answer_without_its_stop_sequences_ends_its_turn(http: httpx.Client) -> None:
    message = create(http, "abc", stop_sequences=["|", ";"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


def test_sampling_fields_reach_the_engine(http: httpx.Client, engine: Any) -> None:
    create(http, "hi", temperature=0.25, top_p=0.5, top_k=7, metadata={"user_id": "u"}, service_tier="auto")
    params = engine.last_params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.25, 0.5, 7, 200)


def test_output_config_constrains_the_answer_to_its_schema(http: httpx.Client, engine: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    create(http, "{}", output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    enforced = json.loads(engine.last_params.structured_outputs.json_schema)
    assert enforced == schema | {"additionalProperties": False}


# Streams ----------------------------------------------------------------------------------------


def test_stream_has_the_events_of_a_message_in_order(http: httpx.Client) -> None:
    events = events_of(http, "Hé!")
    first, *middle, delta, last = events
    assert first["message"]["id"].startswith("msg_echo.")
    assert first["message"]["content"] == []
    assert first["message"]["stop_reason"] is None
    assert first["message"]["usage"]["input_tokens"] == 4
    assert middle[0] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {event["type"] for event in middle[1:-1]} == {"content_block_delta"}
    assert middle[-1] == {"type": "content_block_stop", "index": 0}
    assert blocks_of(events) == [{"type": "text", "text": "Hé!"}]
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert (delta["usage"]["input_tokens"], delta["usage"]["output_tokens"]) == (4, 4)
    assert last == {"type": "message_stop"}


def test_stream_tells_which_stop_sequence_matched_and_does_not_show_it(http: httpx.Client) -> None:
    events = events_of(http, "abc;def|", stop_sequences=["|", ";"])
    assert blocks_of(events) == [{"type": "text", "text": "abc"}]
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": ";"}


def test_silent_stream_sends_pings_before_its_first_token(stack: Any, engine: Any) -> None:
    url = stack.start_gateway(first_chunk_wait_s=0.05, keep_alive_s=1)
    engine.step_s = 0.4
    with httpx.Client(base_url=url, timeout=60) as client:
        text = client.post("/v1/messages", json=body("ab", stream=True)).text
    assert text.startswith('event: ping\ndata: {"type":"ping"}\n\nevent: message_start\n')


def test_stream_cannot_be_resumed_by_event_id(http: httpx.Client) -> None:
    events = http.post("/v1/messages", json=body("hello", stream=True))
    job_id = events.headers["x-penstock-job"]
    answer = http.post(f"/v1/messages?after={job_id}:0:1", json=body("hello", stream=True))
    assert answer.status_code == 400
    assert "Idempotency-Key" in answer.json()["error"]["message"]


def test_same_idempotency_key_reads_the_same_message_again(http: httpx.Client) -> None:
    headers = {"Idempotency-Key": "messages-1"}
    first, second = (http.post("/v1/messages", json=body("again"), headers=headers).json() for _ in range(2))
    assert first == second


# Tools and thinking -----------------------------------------------------------------------------


def test_tool_calls_are_blocks_after_the_text(calling: httpx.Client, calling_engine: Any) -> None:
    message = create(calling, CALLS, model=CALLER, tools=TOOLS)
    text, f, g = message["content"]
    assert text == {"type": "text", "text": "Wait.\n"}
    assert (f["type"], f["name"], f["input"], g["name"], g["input"]) == ("tool_use", "f", {"a": 1}, "g", {})
    assert f["id"] != g["id"]
    assert message["stop_reason"] == "tool_use"
    function = {"name": "f", "description": "does f", "parameters": TOOLS[0]["input_schema"]}
    assert json.loads(calling_engine.tokenizer.last_chat[1]) == [{"type": "function", "function": function}]


def test_streamed_tool_calls_equal_those_of_the_whole_answer(calling: httpx.Client) -> None:
    whole = create(calling, CALLS, model=CALLER, tools=TOOLS)
    events = events_of(calling, CALLS, model=CALLER, tools=TOOLS)
    streamed = blocks_of(events)
    assert [{**block, "id": ""} if "id" in block else block for block in streamed] == [
        {**block, "id": ""} if "id" in block else block for block in whole["content"]
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_white_space_between_calls_makes_no_text_block(calling: httpx.Client) -> None:
    text = '\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
    (whole,) = create(calling, text, model=CALLER, tools=TOOLS)["content"]
    (streamed,) = blocks_of(events_of(calling, text, model=CALLER, tools=TOOLS))
    assert whole["type"] == streamed["type"] == "tool_use"


def test_one_call_without_parallel_tool_use(calling: httpx.Client) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = create(calling, CALLS, model=CALLER, tools=TOOLS, tool_choice=choice)
    assert [block["name"] for block in message["content"] if block["type"] == "tool_use"] == ["f"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
def test_forced_tool_choice_constrains_the_text_to_calls(
    calling: httpx.Client, calling_engine: Any, choice: dict[str, Any]
) -> None:
    create(calling, "x", model=CALLER, tools=TOOLS, tool_choice=choice)
    assert calling_engine.last_params.structured_outputs.calls.required


def test_tool_choice_none_offers_no_tools(calling: httpx.Client, calling_engine: Any) -> None:
    message = create(calling, CALLS, model=CALLER, tools=TOOLS, tool_choice={"type": "none"})
    assert calling_engine.tokenizer.last_chat[1] is None
    assert message["content"] == [{"type": "text", "text": CALLS}]


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}])
def test_reasoning_is_a_thinking_block_if_the_caller_asks_for_it(
    calling: httpx.Client, thinking: dict[str, Any]
) -> None:
    asked = {"model": CALLER, "thinking": thinking}
    whole = create(calling, "<think>hm</think>\nYes.", **asked)["content"]
    assert blocks_of(events_of(calling, "<think>hm</think>\nYes.", **asked)) == whole
    thought, said = whole
    assert thought.pop("signature") and thought == {"type": "thinking", "thinking": "hm"}
    assert said == {"type": "text", "text": "Yes."}


@pytest.mark.parametrize("more", [{}, {"thinking": {"type": "disabled"}}])
def test_reasoning_is_left_out_if_the_caller_does_not_ask_for_it(calling: httpx.Client, more: dict[str, Any]) -> None:
    expected = [{"type": "text", "text": "Yes."}]
    assert create(calling, "<think>hm</think>\nYes.", model=CALLER, **more)["content"] == expected
    assert blocks_of(events_of(calling, "<think>hm</think>\nYes.", model=CALLER, **more)) == expected


# Conversations ----------------------------------------------------------------------------------


def test_history_of_an_agent_becomes_messages_of_the_chat(http: httpx.Client, engine: Any) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "one", **cached}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "id": "msg_1",
            "stop_reason": "tool_use",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Wait. ", "citations": None},
                {"type": "text", "text": "Now."},
                {"type": "tool_use", "id": "call1", "name": "f", "input": {"a": [1]}, "caller": {"type": "direct"}},
                {"type": "tool_use", "id": "call2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call1", "content": [{"type": "text", "text": "r1"}], **cached},
                {"type": "tool_result", "tool_use_id": "call2", "is_error": True},
                {"type": "text", "text": "go"},
            ],
        },
        {"role": "user", "content": "on"},
    ]
    system = [{"type": "text", "text": "You are", **cached}, {"type": "text", "text": "an agent."}]
    answer = http.post("/v1/messages", json=body("", messages=history, system=system, cache_control=cached))
    assert answer.json()["content"] == [{"type": "text", "text": "go\non"}]
    assert sent_chat(engine) == [
        {"role": "system", "content": "You are\nan agent."},
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant",
            "content": "Wait. Now.",
            "tool_calls": (
                {"id": "call1", "name": "f", "arguments": '{"a": [1]}'},
                {"id": "call2", "name": "g", "arguments": "{}"},
            ),
        },
        {"role": "tool", "content": "r1", "tool_call_id": "call1"},
        {"role": "tool", "content": "", "tool_call_id": "call2"},
        {"role": "user", "content": "go\non"},
    ]


@pytest.mark.parametrize(("given", "expected"), [('{"a": [1]}', {"a": [1]}), ("", {}), (None, {})])
def test_earlier_input_may_be_the_text_of_an_object_or_nothing(
    http: httpx.Client, engine: Any, given: Any, expected: Any
) -> None:
    called = [{"type": "tool_use", "id": "call1", "name": "f", "input": given}]
    result = [{"type": "tool_result", "tool_use_id": "call1", "content": "r1"}]
    roles = [("user", "q"), ("assistant", called), ("user", result)]
    history = [{"role": role, "content": content} for role, content in roles]
    assert http.post("/v1/messages", json=body("", messages=history)).status_code == 200
    (call,) = sent_chat(engine)[1]["tool_calls"]
    assert json.loads(call["arguments"]) == expected


@pytest.mark.parametrize("given", ["a", "[1]", 5])
def test_earlier_input_that_is_no_object_is_refused_by_name(http: httpx.Client, given: Any) -> None:
    called = [{"type": "tool_use", "id": "call1", "name": "f", "input": given}]
    answer = http.post("/v1/messages", json=body("", messages=[{"role": "assistant", "content": called}]))
    assert answer.status_code == 400
    assert "input" in answer.json()["error"]["message"]


def test_system_messages_belong_to_the_prompt_or_become_marked_texts_of_the_user(
    http: httpx.Client, engine: Any
) -> None:
    history = [
        {"role": "system", "content": "First."},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": [{"type": "text", "text": "Later."}]},
    ]
    assert http.post("/v1/messages", json=body("", messages=history, system="Zero.")).status_code == 200
    assert sent_chat(engine) == [
        {"role": "system", "content": "Zero.\nFirst."},
        {"role": "user", "content": "hi\n<system>\nLater.\n</system>"},
    ]


def test_conversation_of_many_messages_is_parsed_in_the_parser_process(http: httpx.Client, engine: Any) -> None:
    history = [{"role": "user", "content": [{"type": "text", "text": str(n)}]} for n in range(400)]
    answer = http.post("/v1/messages", json=body("", messages=[*history, {"role": "tool", "content": "a"}]))
    assert answer.status_code == 400
    history += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "end"}]
    stream = events_of(http, "", messages=history)
    assert blocks_of(stream) == [{"type": "text", "text": "end"}]
    assert sent_chat(engine)[0]["content"] == "\n".join(map(str, range(400)))


# What agents send -------------------------------------------------------------------------------


def ignored_by(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return str(answer.headers.get("X-Penstock-Ignored-Fields", "")).split(", ")


def test_calls_of_a_server_in_later_turns_are_left_out_and_named(http: httpx.Client, shared_engine: Any) -> None:
    found: Any = [
        {"type": "web_search_result", "url": "https://rivers.example", "title": "Oder", "encrypted_content": "x"}
    ]
    searched: list[dict[str, Any]] = [
        {"type": "text", "text": "I search. "},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "Oder"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": found},
        {"type": "bash_code_execution_tool_result", "tool_use_id": "srvtoolu_2", "content": {"stdout": "840"}},
        {"type": "mcp_tool_use", "id": "m1", "name": "an odd name!", "server_name": "rivers", "input": {}},
        {"type": "text", "text": "It is 840 km long.", "citations": [{"type": "web_search_result_location"}]},
    ]
    user = {"role": "user", "content": "And the Elbe?"}
    asked = body("hi") | {"messages": [user, {"role": "assistant", "content": searched}, user]}
    answer = http.post("/v1/messages", json=asked)
    assert answer.status_code == 200, answer.text
    names = ("server_tool_use", "web_search_tool_result", "bash_code_execution_tool_result", "mcp_tool_use")
    assert ignored_by(answer) == [f"messages.{name}" for name in names]
    said = shared_engine.tokenizer.last_chat[0][1]
    assert said == {"role": "assistant", "content": "I search. It is 840 km long."}
    for role, block in (("user", searched[1]), ("assistant", {"type": "search"})):
        wrong = {"role": role, "content": [block]}
        refused = http.post("/v1/messages", json=asked | {"messages": [user, wrong, user]})
        assert refused.status_code == 400 and block["type"] in refused.json()["error"]["message"]


def test_the_output_config_of_a_message_is_ignored_and_named(http: httpx.Client, engine: Any) -> None:
    effort = {"effort": "low"}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "Be brief.", "output_config": effort},
        {"role": "user", "content": "ho"},
        {"role": "system", "output_config": effort},
    ]
    answer = http.post("/v1/messages", json=body("", messages=messages))
    assert ignored_by(answer) == ["messages.output_config.effort"]
    assert sent_chat(engine) == [{"role": "user", "content": "hi\n<system>\nBe brief.\n</system>\nho"}]
    without = http.post("/v1/messages", json=body("", messages=[*messages, {"role": "system", "output_config": {}}]))
    assert without.status_code == 400
    assert without.json()["error"]["message"].startswith("messages[4].content: ")


def test_a_system_message_is_cleared_by_the_next_message_of_the_user(http: httpx.Client, engine: Any) -> None:
    def system(text: str, clear_at: str) -> dict[str, str]:
        return {"role": "system", "content": text, "clear_at": clear_at}

    messages = [
        system("old start", "next_user_message"),
        system("start", "never"),
        {"role": "user", "content": "hi"},
        system("old", "next_user_message"),
        system("stays", "never"),
        {"role": "user", "content": "ho"},
        system("now", "next_user_message"),
    ]
    assert http.post("/v1/messages", json=body("", messages=messages)).status_code == 200
    assert sent_chat(engine) == [
        {"role": "system", "content": "start"},
        {"role": "user", "content": "hi\n<system>\nstays\n</system>\nho\n<system>\nnow\n</system>"},
    ]


def test_context_edits_are_applied_or_ignored_and_named(http: httpx.Client) -> None:
    kinds = ("clear_thinking_20251015", "clear_tool_uses_20250919", "compact_20260112", "new kind")
    edits = [{"type": kind, "trigger": {"type": "input_tokens", "value": 9}} for kind in kinds]
    expected = [
        "context_management.edits.clear_tool_uses_20250919",
        "context_management.edits.compact_20260112",
        "context_management.edits.new%20kind",
    ]
    for stream in (False, True):
        asked = body("hi", context_management={"edits": edits}, stream=stream)
        assert ignored_by(http.post("/v1/messages", json=asked)) == expected
    applied = body("hi", context_management={"edits": edits[:1]})
    assert ignored_by(http.post("/v1/messages", json=applied)) == [""]


def test_tools_that_run_at_anthropic_are_dropped_and_named(calling: httpx.Client, calling_engine: Any) -> None:
    offered = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        *TOOLS,
        {"type": "mcp_toolset", "mcp_server_name": "s"},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    answer = calling.post("/v1/messages", json=body("hi", model=CALLER, tools=offered))
    assert ignored_by(answer) == ["tools.web_search_20250305", "tools.mcp_toolset"]
    assert [tool["function"]["name"] for tool in json.loads(calling_engine.tokenizer.last_chat[1])] == ["f"]


def offered_names(engine: Any) -> list[str]:
    return [tool["function"]["name"] for tool in json.loads(engine.tokenizer.last_chat[1] or "[]")]


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, ["f"]),
        ({"tool_choice": {"type": "tool", "name": "late"}}, ["f", "late"]),
        ({"tools": [{"type": "tool_search_tool_regex_20251119", "name": "search"}]}, ["f", "late"]),
        ({"system": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "late"}}]}, ["f", "late"]),
        ({"system": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}]}, []),
        ({"result": [{"type": "tool_reference", "tool_name": "late"}]}, ["f", "late"]),
        ({"result": [{"type": "text", "text": "late"}]}, ["f"]),
    ],
    ids=["none", "choice", "Anthropic's search", "added", "removed", "referenced", "only text"],
)
def test_deferred_tools_are_offered_once_the_conversation_refers_to_them(
    calling: httpx.Client, calling_engine: Any, more: dict[str, Any], names: list[str]
) -> None:
    messages = body("look")["messages"]
    if "result" in more:
        calls = [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
        result = {"type": "tool_result", "tool_use_id": "c", "content": more["result"]}
        messages += [{"role": "assistant", "content": calls}, {"role": "user", "content": [result]}]
    if "system" in more:
        messages += [{"role": "system", "content": more["system"]}]
    asked = body("", model=CALLER, messages=messages)
    asked["tools"] = [*TOOLS, TOOLS[0] | {"name": "late", "defer_loading": True}, *more.get("tools", ())]
    if "tool_choice" in more:
        asked["tool_choice"] = more["tool_choice"]
    assert calling.post("/v1/messages", json=asked).status_code == 200
    assert offered_names(calling_engine) == names
    assert "<system>" not in json.dumps(sent_chat(calling_engine))


def test_deferred_tools_count_for_nothing() -> None:
    offered = [TOOLS[0] | {"name": f"f{i}"} for i in range(MAX_TOOLS)]
    deferred = [TOOLS[0] | {"name": f"late{i}", "defer_loading": True} for i in range(2000)]
    made = MessageBody.model_validate(body("look", tools=[*offered, *deferred]))
    assert len(json.loads(made.tool_use().tools or "")) == MAX_TOOLS
    with pytest.raises(ValidationError, match="at most 512 tools that are not deferred"):
        MessageBody.model_validate(body("look", tools=[*offered, *deferred, TOOLS[0]]))


def test_the_line_for_billing_is_not_part_of_the_prompt(http: httpx.Client, engine: Any) -> None:
    lines = ["x-anthropic-billing-header: cc_version=2.1.331.8d9;", "Be brief.", "Answer x-anthropic-billing-header:"]
    create(http, "hi", system=[{"type": "text", "text": line} for line in lines])
    assert sent_chat(engine)[0] == {"role": "system", "content": "\n".join(lines[1:])}


def test_only_dropped_tools_are_no_tools(http: httpx.Client, engine: Any) -> None:
    """The node of this model takes no tools."""
    offered = [{"type": "web_fetch_20250910", "name": "web_fetch"}]
    assert ignored_by(http.post("/v1/messages", json=body("hi", tools=offered))) == ["tools.web_fetch_20250910"]
    assert engine.tokenizer.last_chat[1] is None
    forced = http.post(
        "/v1/messages", json=body("hi", tools=offered, tool_choice={"type": "tool", "name": "web_fetch"})
    )
    assert forced.status_code == 400
    assert forced.json()["error"]["message"].startswith("tool_choice: ")


def test_parts_of_a_tools_result_that_are_no_text_become_marked_text(http: httpx.Client, engine: Any) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    parts = [
        {"type": "text", "text": "a"},
        image,
        {"type": "tool_reference", "tool_name": "get_weather"},
        {"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}},
        {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "b"}, image]},
    ]
    result = {"type": "tool_result", "tool_use_id": "c", "content": parts}
    history = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [result]},
        {"role": "user", "content": "go"},
    ]
    assert http.post("/v1/messages", json=body("", messages=history)).status_code == 200
    left_out = "left out: this model reads only text]"
    assert sent_chat(engine)[2]["content"].split("\n") == [
        "a",
        f"[image {left_out}",
        "get_weather",
        f"[document {left_out}",
        *("T", "S", "b"),
        f"[image {left_out}",
    ]


# Counting ---------------------------------------------------------------------------------------


def test_count_tokens_counts_the_prompt_of_the_same_message(http: httpx.Client) -> None:
    counted = http.post("/v1/messages/count_tokens", json={"model": ECHO, "messages": body("Hé!")["messages"]})
    assert (counted.status_code, counted.json()) == (200, {"input_tokens": 4})


def test_count_tokens_takes_every_field_of_the_prompt(calling: httpx.Client, calling_engine: Any) -> None:
    asked = {
        "model": CALLER,
        "messages": body("hello")["messages"],
        "system": [{"type": "text", "text": "short", "cache_control": {"type": "ephemeral"}}],
        "tools": [{**TOOLS[0], "strict": True}],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    before = calling_engine.last_params
    assert calling.post("/v1/messages/count_tokens", json=asked).json() == {"input_tokens": 5}
    assert calling_engine.last_params is before
    assert json.loads(calling_engine.tokenizer.last_chat[1])[0]["function"]["name"] == "f"


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{**TOOLS[0], "strict": True}]},
        {"tools": [{**TOOLS[0], "strict": False}], "tool_choice": {"type": "any"}},
        {"tools": [*TOOLS, {**TOOLS[0], "name": "late", "defer_loading": True}]},
        {
            "tools": [*TOOLS, {**TOOLS[0], "name": "late", "defer_loading": True}],
            "tool_choice": {"type": "tool", "name": "late"},
        },
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
    ],
    ids=["strict", "not strict", "deferred", "deferred and chosen", "none"],
)
def test_count_tokens_renders_the_tools_of_the_same_message(
    calling: httpx.Client, calling_engine: Any, more: dict[str, Any]
) -> None:
    asked = body("hello", model=CALLER, **more)
    assert calling.post("/v1/messages", json=asked).status_code == 200
    rendered = calling_engine.tokenizer.last_chat
    calling_engine.tokenizer.last_chat = None
    del asked["max_tokens"]
    assert calling.post("/v1/messages/count_tokens", json=asked).status_code == 200
    assert calling_engine.tokenizer.last_chat == rendered


def test_count_tokens_refuses_fields_that_only_a_message_has(http: httpx.Client) -> None:
    answer = http.post("/v1/messages/count_tokens", json=body("hi"))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("max_tokens: unknown field")
