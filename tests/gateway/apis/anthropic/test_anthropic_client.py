"""The official `anthropic` client: stream helper, tool runner and typed errors. The node echoes the last message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

anthropic: Any = pytest.importorskip("anthropic")

pytestmark = pytest.mark.slow

MODEL = "acme/agent"
THOUGHT = "<think>hm hm</think>\nYes."


@pytest.fixture(scope="module")
def agent_url(stack: Any, shared_engine: Any) -> str:
    engine = type(shared_engine)()
    engine.max_model_len = 1 << 14
    stack.start_node(engine, model=MODEL, pool="agent", tool_parser="hermes", reasoning_parser="think")
    return str(stack.start_gateway())


@pytest.fixture
def client(agent_url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=agent_url, api_key="none", max_retries=0) as client:
        yield client


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 500, "messages": [{"role": "user", "content": text}], **more}


def test_stream_helper_shows_thinking_and_text_as_they_come(client: Any) -> None:
    given = asked(THOUGHT, thinking={"type": "enabled", "budget_tokens": 1024})
    with client.messages.stream(**given) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert "".join(event.thinking for event in events if event.type == "thinking") == "hm hm"
    assert "".join(event.text for event in events if event.type == "text") == "Yes."
    assert [block.type for block in final.content] == ["thinking", "text"]
    whole = client.messages.create(**given)
    assert [block.to_dict() for block in whole.content] == [
        {"signature": final.content[0].signature, "thinking": "hm hm", "type": "thinking"},
        {"text": "Yes.", "type": "text"},
    ]
    assert final.content[0].signature


async def test_asynchronous_client_reads_the_text_of_a_stream(agent_url: str) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=agent_url, api_key="none") as client,
        client.messages.stream(**asked("Hello.")) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == "Hello."


@pytest.mark.parametrize("stream", [False, True])
def test_tool_runner_calls_its_function_and_continues_with_the_result(client: Any, stream: bool) -> None:
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: where
        """
        return f"sunny in {city}"

    call = json.dumps({"name": "weather", "arguments": {"city": "Rome"}})
    given = asked(f"<tool_call>{call}</tool_call>")
    last = client.beta.messages.tool_runner(**given, tools=[anthropic.beta_tool(weather)], stream=stream).until_done()
    assert [block.text for block in last.content] == ["sunny in Rome"]


def test_parsed_output_is_an_object_of_the_callers_type(client: Any) -> None:
    class Gate(BaseModel):
        level: int

    assert client.messages.parse(**asked('{"level": 3}'), output_format=Gate).parsed_output == Gate(level=3)


def test_errors_are_the_clients_own_types(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(**asked("hi", extra_body={"nonsense": 1}))
    assert wrong.value.type == "invalid_request_error"
    assert wrong.value.request_id == wrong.value.body["request_id"]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve("msgbatch_none")
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="nobody", messages=asked("hi")["messages"])


def test_full_pool_is_the_clients_overloaded_error(stack: Any, shared_engine: Any, agent_url: str) -> None:
    engine = type(shared_engine)()
    engine.step_s = 0.2
    stack.start_node(engine, model="acme/full", pool="full", max_open_jobs=1)
    with anthropic.Anthropic(base_url=agent_url, api_key="none", max_retries=0) as client:
        given = asked("a long answer", model="acme/full")
        with client.messages.create(**given, stream=True) as stream:
            assert next(iter(stream)).type == "message_start"
            with pytest.raises(anthropic.OverloadedError) as busy:
                client.messages.create(**given)
    assert (busy.value.status_code, busy.value.type) == (529, "overloaded_error")
    assert int(busy.value.response.headers["retry-after"]) >= 1
