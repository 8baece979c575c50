"""What Codex sends to the Responses API, and the answers that it can use. The model says what a script tells it.

The folder `codex/` has request bodies of Codex CLI 0.169.0, with long texts cut. Codex knows the tools of two of
the models: one has `custom_tools`, one runs code (`code_mode`, `child_agent`). It does not know
the third (`plain_model`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fakes.scripted_model import ScriptedEngine, call_text, script_of

from penstock.contract.tool_formats import FORMATS
from penstock.producer.parsing.parsed_text import AnswerFormat
from penstock.producer.responses.output import OutputReader
from penstock.producer.responses.tools import CalledTool

BODIES = Path(__file__).parent / "codex"
MODEL = "acme/scripted"
PATCH = '*** Begin Patch\n*** Add File: a.txt\n+Nile: "6650" km \\ é\n*** End Patch\n'
PATCH_TOOL = {"type": "custom", "name": "apply_patch", "description": "edits files"}
SEARCH = {"type": "tool_search", "execution": "client", "description": "finds tools", "parameters": {"type": "object"}}
LENGTH = {"type": "function", "name": "length_of", "parameters": {"type": "object", "properties": {}}}
RIVERS = {"type": "namespace", "name": "mcp__rivers", "description": "About rivers.", "tools": [LENGTH]}
FUNCTIONS = ["exec_command", "write_stdin", "request_user_input", "view_image", "get_goal", "create_goal"]
AGENTS = ["followup_task", "interrupt_agent", "list_agents", "send_message", "spawn_agent", "wait_agent"]


@pytest.fixture(scope="module")
def scripted_engine(stack: Any) -> ScriptedEngine:
    engine = ScriptedEngine()
    stack.start_node(engine, model=MODEL, pool="scripted", tool_parser="hermes")
    return engine


@pytest.fixture
def scripted(scripted_engine: ScriptedEngine, url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def recorded(name: str, *answers: str) -> dict[str, Any]:
    """Return a recorded body with a last message that makes the model give these answers."""
    body: dict[str, Any] = json.loads((BODIES / f"{name}.json").read_text())
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": script_of(*answers)}]}
    return body | {"model": MODEL, "input": [*body["input"], said]}


def events_of(url: str, body: dict[str, Any]) -> tuple[httpx.Response, list[dict[str, Any]]]:
    answer = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return answer, [json.loads(line) for line in lines]


def ignored_in(answer: httpx.Response) -> list[str]:
    return answer.headers["x-penstock-ignored-fields"].split(", ")


def messages_of(engine: ScriptedEngine) -> list[dict[str, Any]]:
    assert engine.tokenizer.last_chat is not None
    return list(engine.tokenizer.last_chat[0])


def offered(engine: ScriptedEngine) -> list[str]:
    assert engine.tokenizer.last_chat is not None
    return [tool["function"]["name"] for tool in json.loads(engine.tokenizer.last_chat[1] or "[]")]


def test_a_session_with_custom_tools_and_a_tool_search(scripted_engine: ScriptedEngine, url: str) -> None:
    answer, events = events_of(url, recorded("custom_tools", call_text("apply_patch", input=PATCH)))
    assert answer.status_code == 200
    assert ignored_in(answer) == ["client_metadata", "tools.web_search"]
    names = offered(scripted_engine)
    assert {"apply_patch", "tool_search", "mcp__rivers__length_of", *FUNCTIONS} <= {*names}
    (messages, tools) = scripted_engine.tokenizer.last_chat or ([], None)
    (patch,) = [tool["function"] for tool in json.loads(tools or "") if tool["function"]["name"] == "apply_patch"]
    assert patch["strict"] and "begin_patch" in patch["parameters"]["properties"]["input"]["x-grammar"]["definition"]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert [call["name"] for call in calls] == ["tool_search", "mcp__rivers__length_of", "exec_command", "apply_patch"]
    assert json.loads(calls[-1]["arguments"])["input"].startswith("*** Begin Patch\n")
    results = {message["tool_call_id"]: message["content"] for message in messages if message["role"] == "tool"}
    assert "mcp__rivers__length_of" in results["call_1"] and results["call_2"].endswith("Nile: 6650 km")
    added, *_ = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert (added["type"], added["name"], added["input"]) == ("custom_tool_call", "apply_patch", "")
    deltas = [event for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    done = [event["input"] for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert "".join(event["delta"] for event in deltas) == PATCH == done[0]
    assert events[-1]["response"]["output"][0]["input"] == PATCH
    assert scripted_engine.last_params is not None and scripted_engine.last_params.structured_outputs is not None


def test_a_session_in_code_mode_has_its_tools_in_the_input(scripted_engine: ScriptedEngine, url: str) -> None:
    answer, events = events_of(url, recorded("code_mode", call_text("functions__exec", input="text(1)")))
    assert answer.status_code == 200
    assert ignored_in(answer) == ["reasoning.context", "client_metadata"]
    assert {"functions__exec", "clock__sleep", *(f"collaboration__{name}" for name in AGENTS)} <= {
        *offered(scripted_engine)
    }
    messages = messages_of(scripted_engine)
    assert (messages[-2]["role"], messages[-2]["content"].splitlines()[0]) == ("user", "Message Type: FINAL_ANSWER")
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("custom_tool_call", "functions", "exec")
    assert item["input"] == "text(1)"


def test_a_child_agent_reads_its_task(scripted_engine: ScriptedEngine, url: str) -> None:
    answer, _ = events_of(url, recorded("child_agent", "yes"))
    assert answer.status_code == 200
    messages = messages_of(scripted_engine)
    assert messages[-2]["content"].endswith("Payload:\nSay yes")


def test_a_model_that_codex_does_not_know_calls_the_tools_of_an_mcp_server(
    scripted_engine: ScriptedEngine, url: str
) -> None:
    said = "Look.\n" + call_text("mcp__rivers__length_of", river="Nile") + call_text("exec_command", cmd="ls")
    _, events = events_of(url, recorded("plain_model", said))
    message, length, command = events[-1]["response"]["output"]
    assert message["content"][0]["text"] == "Look.\n"
    assert (length["type"], length["namespace"], length["name"]) == ("function_call", "mcp__rivers", "length_of")
    assert (command["type"], command["name"], "namespace" in command) == ("function_call", "exec_command", False)


def test_calls_of_each_type_are_stored_and_continued(scripted: Any, scripted_engine: ScriptedEngine) -> None:
    searches, patches = call_text("tool_search", query="river"), call_text("apply_patch", input=PATCH)
    said = searches + patches + call_text("mcp__rivers__length_of", river="Nile")
    tools = [PATCH_TOOL, SEARCH, RIVERS]
    first = scripted.responses.create(model=MODEL, input=script_of(said, "Done."), tools=tools)
    search, patch, length = first.output
    assert (search.type, search.execution, search.arguments) == ("tool_search_call", "client", {"query": "river"})
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", PATCH)
    assert (length.type, length.namespace, length.name) == ("function_call", "mcp__rivers", "length_of")
    assert scripted.responses.retrieve(first.id).output == first.output
    assert [tool.type for tool in first.tools] == ["custom", "tool_search", "namespace"]
    results = [
        {"type": "tool_search_output", "call_id": search.call_id, "execution": "client", "tools": [RIVERS]},
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "Success."},
        {"type": "function_call_output", "call_id": length.call_id, "output": "6650 km"},
    ]
    chained = scripted.responses.create(model=MODEL, input=results, previous_response_id=first.id, tools=tools)
    chat = scripted_engine.tokenizer.last_chat
    assert chained.output_text == "Done."
    sent_back = [item.model_dump(exclude_none=True) for item in first.output]
    asked = [{"role": "user", "content": script_of(said, "Done.")}, *sent_back, *results]
    assert scripted.responses.create(model=MODEL, input=asked, tools=tools).output_text == "Done."
    assert scripted_engine.tokenizer.last_chat == chat
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    scripted.responses.create(model=MODEL, input=[asked[0], *references, *results], tools=tools)
    assert scripted_engine.tokenizer.last_chat == chat
    listed = scripted.responses.input_items.list(chained.id, order="asc").data
    assert [item.type for item in listed] == [result["type"] for result in results]


def test_the_description_of_a_namespace_is_shown_once(scripted: Any, scripted_engine: ScriptedEngine) -> None:
    namespace = RIVERS | {"tools": [LENGTH | {"description": "in km"}, LENGTH | {"name": "width_of"}]}
    scripted.responses.create(model=MODEL, input=script_of("Yes."), tools=[namespace])
    offers = json.loads((scripted_engine.tokenizer.last_chat or ((), None))[1] or "[]")
    assert [offer["function"].get("description") for offer in offers] == ["About rivers.\n\nin km", None]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\ud83d\\ude00\\u00e9\\n\\/"}', "a😀é\n/"),
        ('{ "input" :"x", "more": 1}', "x"),
        ('{"input": ""}', ""),
        ('{"patch": "x\\n"}', "x\n"),
        ('{"a": 1, "b": "x"}', '{"a": 1, "b": "x"}'),
        ("{}", "{}"),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
    ],
)
def test_the_input_of_a_custom_tool_is_the_text_in_its_arguments(
    scripted: Any, scripted_engine: ScriptedEngine, arguments: str, text: str
) -> None:
    said = f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'
    asked = {"model": MODEL, "input": script_of(said), "tools": [PATCH_TOOL]}
    response = scripted.responses.create(**asked)
    events = list(scripted.responses.create(**asked, stream=True))
    assert response.output[0].input == text == events[-1].response.output[0].input
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == text


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_input_does_not_depend_on_how_the_text_is_cut(size: int) -> None:
    called = {"apply_patch": CalledTool("custom_tool_call", "apply_patch")}
    said = call_text("apply_patch", input=PATCH + "\U0001f600") + call_text("apply_patch", patch="x")
    reader = OutputReader("pool.job", AnswerFormat(FORMATS["hermes"]), called)
    for at in range(0, len(said), size):
        for _ in reader.push(said[at : at + size], None):
            pass
    for _ in reader.push("", "stop"):
        pass
    assert ["".join(item.texts) for item in reader.items] == [PATCH + "\U0001f600", "x"]
    assert [item.status for item in reader.items] == ["completed", "completed"]


def test_parts_that_have_no_effect_are_named(scripted_engine: ScriptedEngine, url: str) -> None:
    output = [{"type": "input_text", "text": "seen: "}, {"type": "input_image", "image_url": "data:,"}]
    body = {
        "model": MODEL,
        "stream": True,
        "input": [
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
            {"type": "custom_tool_call", "call_id": "d", "name": "view", "input": "a.png"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": output},
            {"role": "user", "content": script_of("Yes.")},
        ],
        "tools": [{"type": "image_generation"}, {"type": "tool_search"}, PATCH_TOOL],
        "reasoning": {"effort": "ultra", "context": "all_turns"},
        "text": {"verbosity": "low", "style": 1},
        "stream_options": {"delivery": "late"},
        "client_metadata": {},
    }
    answer, events = events_of(url, body)
    assert ignored_in(answer) == [
        *("text.style", "reasoning.context", "reasoning.effort", "stream_options.delivery", "client_metadata"),
        *("tools.image_generation", "tools.tool_search"),
        *("input.web_search_call", "input.custom_tool_call_output.input_image"),
    ]
    assert events[-1]["response"]["reasoning"]["effort"] == "xhigh"
    assert [tool["type"] for tool in events[-1]["response"]["tools"]] == ["custom"]
    assert json.loads(scripted_engine.tokenizer.last_template_kwargs or "{}")["reasoning_effort"] == "xhigh"
    messages = messages_of(scripted_engine)
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant", "tool", "user"]
    assert messages[3]["content"] == "seen: [image left out: this model reads only text]"


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ({"type": "custom", "name": "apply_patch"}, ["apply_patch"]),
        ({"type": "function", "name": "length_of", "namespace": "mcp__rivers"}, ["mcp__rivers__length_of"]),
        ("required", ["apply_patch", "mcp__rivers__length_of"]),
    ],
)
def test_a_choice_names_a_tool_as_the_caller_knows_it(
    scripted: Any, scripted_engine: ScriptedEngine, choice: Any, forced: list[str]
) -> None:
    tools = [PATCH_TOOL, RIVERS]
    scripted.responses.create(model=MODEL, input=script_of("x"), tools=tools, tool_choice=choice)
    outputs = scripted_engine.last_params and scripted_engine.last_params.structured_outputs
    assert outputs and outputs.calls and [function.name for function in outputs.calls.functions] == forced


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([RIVERS, LENGTH | {"name": "mcp__rivers__length_of"}], "two tools are named 'mcp__rivers__length_of'"),
        ([{**RIVERS, "tools": [LENGTH | {"name": f"f{n}"} for n in range(512)]}, LENGTH], "at most 512 functions"),
        ([{**RIVERS, "name": "n" * 250}], "at most 256 characters together"),
        ([{**RIVERS, "tools": [RIVERS]}], "of type function and custom only, not 'namespace'"),
        ([{**PATCH_TOOL, "format": {"type": "grammar", "syntax": "lark"}}], "requires syntax and definition"),
    ],
    ids=["one name", "too many", "too long", "nested", "no grammar"],
)
def test_tools_that_cannot_be_offered_are_refused(scripted: Any, tools: list[Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        scripted.responses.create(model=MODEL, input="a", tools=tools)
    assert said in caught.value.message and str(caught.value.param).startswith("tools")
