"""Structured output: what a schema says is enforced to the last digit and day, or refused by name, in every API."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.served_model import TOOL_TEMPLATE, served
from fakes.waiting import wait_until
from fixtures.tiny_model import make_tiny_model

pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.timeout(300)]
MODEL = "tiny"
HUGE = 1098765432109876543
ASKED = [{"role": "user", "content": "the gate"}]
OPTIONS = {"model": MODEL, "temperature": 1, "seed": 3, "max_tokens": 200}
TAKES_STRING = "give it as a string"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A model whose tokenizer has more tokens than the model has rows, and a template with tools."""
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / MODEL)
    add_tokens_without_rows(folder)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    with served(folder, dtype="bfloat16") as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def add_tokens_without_rows(folder: Path) -> None:
    """Add tokens to a tokenizer, as fine-tuned models do that do not train them."""
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    first = max(spec["model"]["vocab"].values()) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec["added_tokens"] += [{"id": first + i, "content": f"<extra_{i}>", **flags} for i in range(3)]
    path.write_text(json.dumps(spec))


def closed(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}


def chat(door: httpx.Client, schema: Any) -> httpx.Response:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": closed(schema), "strict": True}}
    return door.post("/v1/chat/completions", json=OPTIONS | {"messages": ASKED, "response_format": wanted})


def responses(door: httpx.Client, schema: Any) -> httpx.Response:
    wanted = {"format": {"type": "json_schema", "name": "a", "schema": closed(schema), "strict": True}}
    return door.post("/v1/responses", json={"model": MODEL, "input": "the gate", "text": wanted})


def completion(door: httpx.Client, schema: Any) -> httpx.Response:
    return door.post(
        "/v1/completions", json=OPTIONS | {"prompt": "the gate", "structured_outputs": {"json": closed(schema)}}
    )


def guided(door: httpx.Client, schema: Any) -> httpx.Response:
    return door.post("/v1/completions", json=OPTIONS | {"prompt": "the gate", "guided_json": closed(schema)})


def chat_tool(door: httpx.Client, schema: Any) -> httpx.Response:
    tool = {"type": "function", "function": {"name": "f", "parameters": closed(schema), "strict": True}}
    return door.post(
        "/v1/chat/completions", json=OPTIONS | {"messages": ASKED, "tools": [tool], "tool_choice": "required"}
    )


def responses_tool(door: httpx.Client, schema: Any) -> httpx.Response:
    tool = {"type": "function", "name": "f", "parameters": closed(schema), "strict": True}
    return door.post(
        "/v1/responses", json={"model": MODEL, "input": "the gate", "tools": [tool], "tool_choice": "required"}
    )


def messages_tool(door: httpx.Client, schema: Any) -> httpx.Response:
    tool = {"name": "f", "input_schema": closed(schema), "strict": True}
    body = {"model": MODEL, "max_tokens": 200, "messages": ASKED, "tools": [tool], "tool_choice": {"type": "any"}}
    return door.post("/v1/messages", json=body)


def job(door: httpx.Client, schema: Any) -> httpx.Response:
    body = {
        "model": MODEL,
        "prompt": "the gate",
        "params": {"max_tokens": 200, "structured_outputs": {"json": closed(schema)}},
    }
    made = door.post("/v1/jobs", json=body)
    path = f"/v1/jobs/{made.json()['id']}"
    return wait_until(lambda: door.get(path), lambda job: job.json()["state"] in ("succeeded", "failed"))


def batch(door: httpx.Client, schema: Any) -> httpx.Response:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": closed(schema)}}
    body = OPTIONS | {"messages": ASKED, "response_format": wanted}
    row = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    files = {"file": ("rows.jsonl", json.dumps(row).encode())}
    file_id = door.post("/v1/files", data={"purpose": "batch"}, files=files).json()["id"]
    wanted = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    path = f"/v1/batches/{door.post('/v1/batches', json=wanted).json()['id']}"
    ended = wait_until(lambda: door.get(path).json(), lambda found: found["status"] in ("completed", "failed"))
    return door.get(f"/v1/files/{ended['output_file_id'] or ended['error_file_id']}/content")


Door = Callable[[httpx.Client, Any], httpx.Response]
PLAIN: list[Door] = [chat, responses, completion, guided]
TOOLS: list[Door] = [chat_tool, responses_tool, messages_tool]
LATER: list[Door] = [job, batch]


def answer_in(text: str) -> Any:
    """Return the value of `x` in the answer, or in the arguments of the call, of any API."""
    found: list[Any] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            if value.keys() == {"x"}:
                found.append(value["x"])
            for one in value.values():
                look(one)
        elif isinstance(value, list):
            for one in value:
                look(one)
        elif isinstance(value, str) and value.startswith('{"x": '):
            look(json.loads(value))

    body = json.loads(text)
    look({name: value for name, value in body.items() if name not in ("text", "tools", "request", "params")})
    assert found, text
    return found[0]


@pytest.mark.parametrize("ask", [*PLAIN, *TOOLS, *LATER])
def test_a_listed_number_that_would_change_is_refused_by_its_place(door: httpx.Client, ask: Door) -> None:
    answer = ask(door, {"enum": [7, HUGE]})
    assert answer.status_code == (200 if ask in LATER else 400), answer.text
    assert f"enum at #/properties/x/enum/1: the number {HUGE}" in answer.text and TAKES_STRING in answer.text


@pytest.mark.parametrize("ask", [*PLAIN, *TOOLS, *LATER])
def test_bounds_of_int64_are_taken_and_kept(door: httpx.Client, ask: Door) -> None:
    answer = ask(door, {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1})
    assert answer.status_code == 200, answer.text
    assert -(2**63) <= answer_in(answer.text) <= 2**63 - 1


DOUBLE = 1.7976931348623157e308
BOUNDS: dict[str, dict[str, Any]] = {
    "int64 from below": {"type": "integer", "minimum": 2**63 - 2000},
    "int64 from above": {"type": "integer", "maximum": -(2**63) + 2000},
    "uint64": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    "doubles": {"type": "number", "minimum": -DOUBLE, "maximum": DOUBLE},
    "open doubles": {"type": "number", "exclusiveMinimum": -DOUBLE, "exclusiveMaximum": DOUBLE},
    "multiples": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**63 - 1, "multipleOf": 7},
    "hundredths": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.07},
    "a long text": {"type": "string", "pattern": "^a$", "maxLength": 2**63 - 1},
    "a length with a fraction": {"type": "string", "pattern": "^a$", "minLength": 1.0},
}


@pytest.mark.parametrize("name", BOUNDS)
def test_valid_bounds_are_taken(door: httpx.Client, name: str) -> None:
    answer = chat(door, BOUNDS[name])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("ask", [*PLAIN, *TOOLS, *LATER])
def test_a_day_that_its_year_does_not_have_is_never_answered(door: httpx.Client, ask: Door) -> None:
    answer = ask(door, {"type": "string", "format": "date", "pattern": "^(1900|2000|2023)-02-29$"})
    assert answer.status_code == 200 and answer_in(answer.text) == "2000-02-29"


REFUSED_NUMBERS: dict[str, tuple[Any, str]] = {
    "const": ({"const": -HUGE}, "const at #/properties/x/const: the number -1098765432109876543"),
    "in a list of a list": ({"enum": [[1, [HUGE]]]}, "enum at #/properties/x/enum/0/1/0:"),
    "in an object": ({"const": {"id": HUGE}}, "const at #/properties/x/const/id:"),
    "beyond int64": ({"enum": [2**64]}, "the number 18446744073709551616"),
    "a whole float": ({"enum": [4.611686018427388e18]}, "the number 4.611686018427388e+18"),
    "many digits": ({"const": 0.30000000000000004}, "the number 0.30000000000000004"),
    "no number within the bounds": ({"type": "integer", "minimum": HUGE, "maximum": HUGE}, "minimum at #/properties/x"),
    "a step of zero": ({"type": "integer", "multipleOf": 0}, "multipleOf at #/properties/x: it must be a number above"),
    "a large step": ({"type": "integer", "multipleOf": 10**12}, "a step above 4294967295"),
}


@pytest.mark.parametrize("name", REFUSED_NUMBERS)
def test_a_number_that_cannot_be_kept_is_refused_by_name(door: httpx.Client, name: str) -> None:
    schema, reason = REFUSED_NUMBERS[name]
    answer = chat(door, schema)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text


class Literally(httpx.HTTPTransport):
    """Sends a number as Python could not write it, in place of another one."""

    def __init__(self, placeholder: int, literal: str) -> None:
        super().__init__()
        self._placeholder, self._literal = str(placeholder).encode(), literal.encode()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        content = request.read().replace(self._placeholder, self._literal)
        headers = {"content-type": request.headers["content-type"]}
        return super().handle_request(httpx.Request(request.method, request.url, headers=headers, content=content))


@pytest.mark.parametrize("ask", [*PLAIN, *TOOLS])
def test_a_number_beyond_doubles_is_refused_by_its_place(door: httpx.Client, ask: Door) -> None:
    placeholder = 987654321
    with httpx.Client(base_url=door.base_url, timeout=60, transport=Literally(placeholder, "1e400")) as client:
        answer = ask(client, {"enum": [1, placeholder]})
    assert answer.status_code == 400
    assert "properties/x/enum/1 is beyond the range of a double" in answer.text and TAKES_STRING in answer.text


PATTERNS = {
    "pydantic's decimals": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
    "Zod's mail": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    "a password": r"^(?=.*[a-z])(?=.*\d)[a-z\d]{8,12}$",
    "a length": r"^(?=.{2,4}$)a*b*$",
    "no word": r"^(?!admin$)[a-z]{1,6}$",
}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_look_ahead_at_the_beginning_of_a_pattern_is_enforced(door: httpx.Client, pattern: str) -> None:
    for seed in range(4):
        wanted = {"json": {"type": "string", "pattern": pattern, "maxLength": 30}}
        answer = door.post(
            "/v1/completions", json=OPTIONS | {"prompt": "a", "seed": seed, "structured_outputs": wanted}
        ).json()["choices"][0]
        assert answer["finish_reason"] == "stop" and re.search(pattern, json.loads(answer["text"]), re.ASCII)


def test_look_ahead_that_no_pattern_says_is_refused(door: httpx.Client) -> None:
    answer = chat(door, {"type": "string", "pattern": "^(?!a.c)[abc]*$"})
    assert answer.status_code == 400 and "look-ahead" in answer.json()["error"]["message"]


def test_a_grammar_in_llama_cpps_notation_is_enforced(door: httpx.Client) -> None:
    grammar = 'root ::= greeting " " name # all\ngreeting ::= "hello" | "bye"\nname ::= [A-Z] [a-z]{1,3}'
    for name in ("grammar", "ebnf", "guided_grammar"):
        answer = door.post("/v1/completions", json=OPTIONS | {"prompt": "a", name: grammar}).json()["choices"][0]
        assert re.fullmatch("(hello|bye) [A-Z][a-z]{1,3}", answer["text"]) and answer["finish_reason"] == "stop"


def test_schemas_stand_where_llama_cpp_and_anthropics_beta_have_them(door: httpx.Client) -> None:
    schema = closed({"enum": ["yes", "no"]})
    of_chat = {"model": MODEL, "messages": ASKED, "max_tokens": 100}
    given = {"type": "json_object", "schema": schema}
    answer = door.post("/v1/chat/completions", json=of_chat | {"response_format": given}).json()
    assert json.loads(answer["choices"][0]["message"]["content"])["x"] in ("yes", "no")
    given = {"type": "json_schema", "schema": schema}
    answer = door.post("/v1/messages", json=of_chat | {"output_format": given}).json()
    assert json.loads(answer["content"][0]["text"])["x"] in ("yes", "no")
    both = {"output_format": given, "output_config": {"format": given}}
    refused = door.post("/v1/messages", json=of_chat | both)
    assert refused.status_code == 400 and "output_config.format" in refused.json()["error"]["message"]
    wrong = door.post("/v1/chat/completions", json=of_chat | {"response_format": {"type": "text", "schema": schema}})
    assert wrong.status_code == 400 and "json_object" in wrong.json()["error"]["message"]


def test_top_p_of_0_takes_the_most_likely_token(door: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "the gate", "max_tokens": 12}
    greedy, nucleus = (
        door.post("/v1/completions", json=body | option).json()["choices"][0]["text"]
        for option in ({"temperature": 0}, {"temperature": 1.5, "top_p": 0})
    )
    assert greedy == nucleus
