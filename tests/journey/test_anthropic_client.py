"""The official `anthropic` client against the real small model, and the requests of a coding agent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.served_model import TOOL_TEMPLATE, served

anthropic: Any = pytest.importorskip("anthropic")

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

MODEL = "agent"
CACHED = {"cache_control": {"type": "ephemeral"}}
SYSTEM = [
    {"type": "text", "text": "You are an agent in a repository. " * 8, **CACHED},
    {"type": "text", "text": "Answer in one sentence.", **CACHED},
]
FOLDERS = ["src", "tests", "docs"]


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"name": name, "description": description, "input_schema": schema}


LIST = tool("list_files", "Lists the files of a folder.", folder={"enum": FOLDERS})
READ = tool("read_file", "Reads one file.", path={"enum": ["src/main.c", "src/pump.c"]})
OTHERS = [tool(f"tool_{n}", f"Does thing number {n}.", value={"type": "integer"}) for n in range(12)]
TOOLS = [LIST, READ, *OTHERS[:-1], {**OTHERS[-1], **CACHED}]


@pytest.fixture(scope="module")
def client(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("models") / MODEL
    shutil.copytree(demo_folder, folder, copy_function=os.symlink)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    with served(folder) as url, anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(text: str, **more: Any) -> dict[str, Any]:
    greedy = {"extra_body": {"temperature": 0}}
    return {"model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": text}], **greedy, **more}


def num_input_tokens(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens)


def test_stream_helper_collects_the_message_that_create_returns(client: Any) -> None:
    whole = client.messages.create(**ask("What does a water turbine do?"))
    with client.messages.stream(**ask("What does a water turbine do?")) as stream:
        kinds, texts = [], []
        for event in stream:
            kinds.append(event.type)
            if event.type == "text":
                texts.append(event.text)
        final = stream.get_final_message()
    assert whole.content[0].text == final.content[0].text == "".join(texts) != ""
    assert whole.stop_reason == final.stop_reason
    assert (whole.usage.output_tokens, num_input_tokens(whole.usage)) == (
        final.usage.output_tokens,
        num_input_tokens(final.usage),
    )
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert whole._request_id


def test_stop_sequence_that_ended_the_answer_is_named(client: Any) -> None:
    asked = ask("What does a water turbine do?", stop_sequences=["xyzzy", " turbine"])
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    for message in (final, client.messages.create(**asked)):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " turbine")
        assert "turbine" not in message.content[0].text


def test_count_tokens_agrees_with_the_usage_of_the_message(client: Any) -> None:
    prompt = {"model": MODEL, "system": SYSTEM, "tools": TOOLS, "messages": ask("List src.")["messages"]}
    counted = client.messages.count_tokens(**prompt).input_tokens
    message = client.messages.create(**prompt, max_tokens=1)
    again = client.messages.create(**prompt, max_tokens=1)
    assert counted == num_input_tokens(message.usage) == num_input_tokens(again.usage)
    assert again.usage.cache_read_input_tokens > 0


def test_max_tokens_beyond_the_context_is_a_limit_that_the_context_cuts(client: Any) -> None:
    with client.messages.stream(**ask("Say hello.", max_tokens=1 << 19, stop_sequences=["."])) as stream:
        assert stream.get_final_message().stop_reason in ("stop_sequence", "end_turn")


@pytest.mark.parametrize("streamed", [False, True])
def test_coding_agent_calls_tools_and_continues_with_their_results(client: Any, streamed: bool) -> None:
    def turn(messages: list[Any], **more: Any) -> Any:
        asked = ask("", **more, messages=messages, system=SYSTEM, tools=TOOLS, metadata={"user_id": "u1"})
        asked |= {"max_tokens": 400, "thinking": {"type": "adaptive"}}
        if not streamed:
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            return stream.get_final_message()

    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Which files are there?", **CACHED}]}]
    for name in ("list_files", "read_file"):
        answer = turn(messages, tool_choice={"type": "tool", "name": name, "disable_parallel_tool_use": True})
        (call,) = answer.content
        assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", name)
        (value,) = call.input.values()
        assert value in (FOLDERS if name == "list_files" else ["src/main.c", "src/pump.c"])
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "main.c pump.c"}]}
        messages += [answer.to_param(), {"role": "user", "content": [{**result, **CACHED}]}]
    messages[-1]["content"].append({"type": "text", "text": "Now tell me."})
    last = turn(messages, tool_choice={"type": "none"})
    assert last.content[0].text
    assert last.usage.output_tokens > 0


def test_errors_are_the_clients_own_types(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**ask("hi", model="nobody"))
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id == missing.value.body["request_id"]
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match='blocks of type "image" are not supported'):
        client.messages.create(**ask("", messages=[{"role": "user", "content": [image]}]))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**ask("water " * 9000))
    with pytest.raises(anthropic.RequestTooLargeError):
        client.messages.create(**ask("water " * 4_000_000))
