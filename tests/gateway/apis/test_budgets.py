"""The budget of an answer's reasoning: from the fields of each API, from an effort, or from the nodes' setting."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.contract.errors import RequestError
from penstock.contract.pool import PoolRecord
from penstock.contract.sampling import MAX_TOKENS_LIMIT, SamplingParams
from penstock.gateway.apis.anthropic.schemas import MessagesRequest
from penstock.gateway.apis.openai.schemas import ChatRequest
from penstock.gateway.apis.responses.body import ResponseBody
from penstock.gateway.request.generation import parse
from penstock.producer.client.request import build_job

CHAT = {"messages": [{"role": "user", "content": "x"}]}
RESPONSE, MESSAGE = {"input": "x"}, {**CHAT, "max_tokens": 5}
THINKER = PoolRecord("m", "m", reasoning_parser="think_open")
FIELDS: list[tuple[Any, dict[str, Any], str]] = [
    (ChatRequest, CHAT, "thinking_token_budget"),
    (ChatRequest, CHAT, "thinking_budget_tokens"),
    (ChatRequest, CHAT, "reasoning_budget_tokens"),
    (ChatRequest, CHAT, "reasoning.max_tokens"),
    (ResponseBody, RESPONSE, "reasoning.max_tokens"),
    (MessagesRequest, MESSAGE, "thinking.budget_tokens"),
]


def body_of(fields: dict[str, Any], name: str, value: Any) -> bytes:
    outer, _, inner = name.partition(".")
    given = value if not inner else {inner: value} | ({"type": "enabled"} if outer == "thinking" else {})
    return json.dumps({**fields, outer: given}).encode()


@pytest.mark.parametrize(("schema", "fields", "name"), FIELDS)
def test_each_api_has_its_name_for_the_budget(schema: Any, fields: dict[str, Any], name: str) -> None:
    body = parse(schema, body_of(fields, name, 77))
    assert body.params.reasoning_budget == 77 and body.names["reasoning_budget"] == name
    for wrong in (0, -2, MAX_TOKENS_LIMIT + 1):
        with pytest.raises(RequestError) as caught:
            parse(schema, body_of(fields, name, wrong))
        assert caught.value.param == name and name in caught.value.message


@pytest.mark.parametrize(("schema", "fields", "name"), FIELDS[:-1])
def test_minus_one_asks_for_no_limit(schema: Any, fields: dict[str, Any], name: str) -> None:
    assert parse(schema, body_of(fields, name, -1)).params.reasoning_budget == MAX_TOKENS_LIMIT


def test_budgets_and_efforts_that_contradict_each_other_are_refused() -> None:
    for fields, wrong in (
        ({"thinking_token_budget": 5, "reasoning_budget_tokens": 6}, "reasoning_budget_tokens"),
        ({"thinking_token_budget": 5, "reasoning": {"max_tokens": 6}}, "reasoning"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning"),
        ({"thinking_token_budget": 5, "use_beam_search": True}, "thinking_token_budget"),
    ):
        with pytest.raises(RequestError) as caught:
            parse(ChatRequest, json.dumps(CHAT | fields).encode())
        assert str(caught.value.param).startswith(wrong)
    same = {"thinking_token_budget": 5, "reasoning_budget_tokens": 5, "reasoning": {"max_tokens": 5, "effort": "low"}}
    body = parse(ChatRequest, json.dumps(CHAT | same | {"reasoning_effort": "low"}).encode())
    assert body.params.reasoning_budget == 5
    assert json.loads(body.template_kwargs or "")["reasoning_effort"] == "low"


def budget_of(record: PoolRecord = THINKER, prompt: Any = CHAT["messages"], **options: Any) -> int | None:
    return build_job(prompt, options, record, "default").params.reasoning_budget  # type: ignore[arg-type]


def test_given_budget_goes_before_the_effort_and_that_before_the_nodes_default() -> None:
    low = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    default = PoolRecord("m", "m", reasoning_parser="think", sampling_defaults={"reasoning_budget": 300})
    assert (budget_of(), budget_of(default), budget_of(default, **low)) == (None, 300, 1024)
    assert budget_of(default, **low, reasoning_budget=9) == budget_of(default, reasoning_budget=9) == 9
    assert budget_of(default, **low, params=SamplingParams(reasoning_budget=9)) == 9
    assert budget_of(default, reasoning_budget=-1) == MAX_TOKENS_LIMIT
    assert budget_of(default, chat_template_kwargs={"reasoning_effort": "xhigh"}) == 300
    assert budget_of(default, chat_template_kwargs='{"reasoning_effort": [1]}') == 300


def test_effort_is_the_templates_own_if_it_has_the_variable() -> None:
    record = PoolRecord("m", "m", reasoning_parser="think", takes_effort=True)
    assert budget_of(record, chat_template_kwargs={"reasoning_effort": "low"}) is None


def test_only_chats_of_models_that_reason_have_a_budget() -> None:
    for record, prompt in ((PoolRecord("m", "m"), CHAT["messages"]), (THINKER, "text"), (THINKER, [1, 2])):
        assert budget_of(record, prompt, reasoning_budget=9) is None
    default = PoolRecord("m", "m", reasoning_parser="think", sampling_defaults={"reasoning_budget": 300})
    assert budget_of(default, use_beam_search=True, n=2) is None
