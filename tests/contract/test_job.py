"""Parsing of jobs and sampling parameters: an invalid field is refused with its name and its limit."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import msgpack
import pytest
from annotated_types import Le
from fakes.queue.harness import new_id, new_job
from pydantic import ValidationError

from penstock.contract.job import (
    DURATIONS,
    JobDef,
    Message,
    Priority,
    QueueFields,
    created_at,
    is_job_id,
    pool_of,
    seed_of,
)
from penstock.contract.sampling import (
    MAX_ALTERNATIVE_CHARS,
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_STOP_STRINGS,
    MAX_TOKENS_LIMIT,
    SamplingParams,
)
from penstock.contract.tools import MAX_CALLS, MAX_CALLS_OF_CHAT
from penstock.queue.wire import WireError, decode_request

UUID = "01890a5d-ac96-774b-bcce-b302099a8057"


def problem_of(model: type[Any], fields: dict[str, Any]) -> tuple[str, str]:
    """Field and message of the first problem with these values."""
    with pytest.raises(ValidationError) as caught:
        model(**fields)
    problem = caught.value.errors()[0]
    return ".".join(map(str, problem["loc"])), problem["msg"]


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("n", 0, "1"),
        ("n", MAX_CHOICES + 1, str(MAX_CHOICES)),
        ("temperature", -0.1, "0"),
        ("temperature", 10.1, "10"),
        ("temperature", float("nan"), "finite"),
        ("top_p", -0.1, "0"),
        ("top_p", 1.1, "1"),
        ("top_k", -2, "-1"),
        ("top_k", 1 << 31, str(1 << 31)),
        ("repetition_penalty", 0.009, "0.01"),
        ("repetition_penalty", float("inf"), "finite"),
        ("min_p", -0.1, "0"),
        ("min_p", 1.1, "1"),
        ("presence_penalty", -2.1, "-2"),
        ("presence_penalty", 2.1, "2"),
        ("frequency_penalty", -2.1, "-2"),
        ("frequency_penalty", 2.1, "2"),
        ("frequency_penalty", float("nan"), "finite"),
        ("seed", 1 << 63, str(1 << 63)),
        ("max_tokens", 0, "1"),
        ("max_tokens", MAX_TOKENS_LIMIT + 1, str(MAX_TOKENS_LIMIT)),
        ("min_tokens", -1, "0"),
        ("stop", ["x"] * (MAX_STOP_STRINGS + 1), str(MAX_STOP_STRINGS)),
        ("stop_token_ids", [1] * 65, "64"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "1024"),
        ("bad_words", ["x"] * 65, "64"),
        ("max_tokens", "many", "integer"),
        ("ignore_eos", "perhaps", "boolean"),
    ],
)
def test_wrong_sampling_parameter_is_named_with_its_limit(field: str, value: object, limit: str) -> None:
    where, message = problem_of(SamplingParams, {field: value})
    assert where == field
    assert limit in message


@pytest.mark.parametrize(
    ("field", "value", "where"),
    [
        ("stop", [""], "stop.0"),
        ("stop", ["ok", "x" * 257], "stop.1"),
        ("stop_token_ids", [-1], "stop_token_ids.0"),
        ("stop_token_ids", [1 << 31], "stop_token_ids.0"),
        ("logit_bias", {"-1": 1.0}, "logit_bias.-1.[key]"),
        ("logit_bias", {"a": 1.0}, "logit_bias.a.[key]"),
        ("logit_bias", {5: 100.1}, "logit_bias.5"),
        ("bad_words", ["ok", ""], "bad_words.1"),
    ],
)
def test_wrong_item_is_named_by_its_path(field: str, value: object, where: str) -> None:
    assert problem_of(SamplingParams, {field: value})[0] == where


@pytest.mark.parametrize("field", ["top_a", "beams", "Temperature"])
def test_parameter_that_is_not_honoured_is_refused_by_name(field: str) -> None:
    assert problem_of(SamplingParams, {field: 1})[0] == field


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({}, "exactly one of"),
        ({"regex": "a", "json_object": True}, "exactly one of"),
        ({"json_object": False}, "exactly one of"),
        ({"json": "[1]"}, "JSON object"),
        ({"json": "{"}, "JSON object"),
        ({"json": {"a": "x" * (1 << 18)}}, str(1 << 18)),
        ({"choice": []}, "1"),
        ({"choice": ["a", ""]}, "1"),
        ({"regex": "a" * 8193}, "8192"),
        ({"xml": "a"}, "unknown field"),
    ],
)
def test_structured_outputs_without_or_with_several_constraints_are_refused(form: dict[str, object], said: str) -> None:
    where, message = problem_of(SamplingParams, {"structured_outputs": form})
    assert where.startswith("structured_outputs") and said in message


@pytest.mark.parametrize("option", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_options_that_contradict_structured_outputs_are_refused(option: dict[str, object]) -> None:
    where, message = problem_of(SamplingParams, {"structured_outputs": {"regex": "a"}, **option})
    assert where == "structured_outputs" and next(iter(option)) in message


def test_a_schema_is_kept_as_text_however_it_was_given() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    forms = [{name: given} for name in ("json", "json_schema") for given in (schema, json.dumps(schema))]
    assert len({SamplingParams(structured_outputs=form).structured_outputs for form in forms}) == 1


def test_biases_are_kept_in_the_order_of_tokens_whatever_the_keys_are() -> None:
    for given in ({"20": 100, "3": -1.5}, {20: 100, 3: -1.5}, {3: -1.5, 20: 100}):
        assert [*SamplingParams(logit_bias=given).logit_bias.items()] == [(3, -1.5), (20, 100.0)]


def test_minimum_above_maximum_is_refused() -> None:
    where, message = problem_of(SamplingParams, {"min_tokens": 5, "max_tokens": 4})
    assert where == "min_tokens" and "5 must not exceed max_tokens (4)" in message
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=5).max_tokens is None


def test_limits_themselves_are_accepted() -> None:
    params = SamplingParams(
        n=MAX_CHOICES,
        temperature=10,
        top_p=1,
        top_k=-1,
        min_p=1,
        repetition_penalty=10,
        presence_penalty=-2,
        frequency_penalty=2,
        seed=-(1 << 63),
        max_tokens=MAX_TOKENS_LIMIT,
        stop=("x" * 256,) * MAX_STOP_STRINGS,
        stop_token_ids=((1 << 31) - 1,) * 64,
    )
    assert params.n == MAX_CHOICES


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        ({}, "none"),
        ({"prompt": "x", "prompt_token_ids": (1,)}, "'prompt', 'prompt_token_ids'"),
        ({"prompt": "x", "messages": (Message(role="user", content="x"),)}, "'prompt', 'messages'"),
    ],
)
def test_job_has_exactly_one_prompt(prompts: dict[str, Any], named: str) -> None:
    _, message = problem_of(JobDef, {"id": new_id(), **prompts})
    assert "exactly one of prompt, prompt_token_ids, messages" in message
    assert named in message


@pytest.mark.parametrize(
    ("field", "value", "where"),
    [
        ("id", "m", "id"),
        ("id", UUID, "id"),
        ("id", f"m.{UUID.replace('-7', '-4', 1)}", "id"),
        ("id", f"a b.{UUID}", "id"),
        ("id", f"m{{x}}.{UUID}", "id"),
        ("id", f"m.{UUID.upper()}", "id"),
        ("id", f"m~x.{UUID}", "id"),
        ("id", f"m.{UUID}\n", "id"),
        ("tenant", "", "tenant"),
        ("tenant", "a:b", "tenant"),
        ("tenant", "x" * 65, "tenant"),
        ("tenant", "acme\n", "tenant"),
        ("priority", 3, "priority"),
        ("deadline_ms", 0, "deadline_ms"),
        ("deadline_ms", 367 * 24 * 3600 * 1000, "deadline_ms"),
        ("ttl_ms", 0, "ttl_ms"),
        ("ttl_ms", 367 * 24 * 3600 * 1000, "ttl_ms"),
        ("idempotency_key", "", "idempotency_key"),
        ("idempotency_key", "x" * 257, "idempotency_key"),
        ("model", "x", "model"),
    ],
)
def test_wrong_job_field_is_named(field: str, value: object, where: str) -> None:
    assert problem_of(JobDef, {"id": f"m.{UUID}", "prompt": "x", field: value})[0] == where


@pytest.mark.parametrize("field", ["prompt", "idempotency_key"])
def test_text_with_lone_surrogates_is_refused(field: str) -> None:
    assert problem_of(JobDef, {"id": new_id(), "prompt": "x", field: "\ud800"})[0] == field
    assert problem_of(SamplingParams, {"stop": ["\ud800"]})[0] == "stop.0"


@pytest.mark.parametrize("field", ["prompt_token_ids", "messages"])
def test_empty_prompt_lists_are_refused_but_an_empty_text_is_a_prompt(field: str) -> None:
    assert problem_of(JobDef, {"id": new_id(), field: ()})[0] == field
    assert new_job(prompt="").prompt == ""


def test_message_needs_a_known_role() -> None:
    found = problem_of(JobDef, {"id": new_id(), "messages": [{"role": "function", "content": "x"}]})
    assert found[0] == "messages.0.role"


def test_jobs_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        new_job().tenant = "other"  # type: ignore[misc]


@pytest.mark.parametrize(("text", "right"), [(f"m.{UUID}", True), (f"m~12.{UUID}", True), (UUID, False), ("", False)])
def test_job_id_names_its_pool(text: str, right: bool) -> None:
    assert is_job_id(text) is right
    if right:
        assert JobDef(id=text, prompt="x").pool == pool_of(text) == text.split(".")[0]


def test_job_id_with_a_trailing_newline_is_invalid() -> None:
    assert not is_job_id(f"m.{UUID}\n")


def test_seed_is_the_callers_or_a_function_of_the_id() -> None:
    assert seed_of("m.a", SamplingParams(seed=5)) == seed_of("m.b", SamplingParams(seed=5)) == 5
    assert seed_of("m.a", SamplingParams(seed=-1)) == 2**64 - 1
    assert seed_of("m.a", SamplingParams()) == seed_of("m.a", SamplingParams()) != seed_of("m.b", SamplingParams())
    assert 0 <= seed_of("m.a", SamplingParams()) < 2**64


def test_priorities_are_ordered_by_urgency() -> None:
    assert Priority.INTERACTIVE < Priority.STANDARD < Priority.BATCH


def test_a_choice_of_texts_has_a_limit_for_all_of_them_together() -> None:
    text = "x" * MAX_ALTERNATIVE_CHARS
    fits = [text[: -len(str(i))] + str(i) for i in range(MAX_CHOICE_CHARS // MAX_ALTERNATIVE_CHARS)]
    assert SamplingParams(structured_outputs={"choice": fits})
    field, said = problem_of(SamplingParams, {"structured_outputs": {"choice": [*fits, "y"]}})
    assert field == "structured_outputs.choice"
    assert f"{MAX_CHOICE_CHARS + 1} characters" in said and f"limit is {MAX_CHOICE_CHARS}" in said


def test_tool_calls_of_all_messages_of_a_chat_have_one_limit() -> None:
    call = {"id": "c", "name": "f", "arguments": "{}"}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call] * MAX_CALLS}] * (MAX_CALLS_OF_CHAT // MAX_CALLS)
    assert new_job(prompt=None, messages=turns)
    one_more = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(ValueError, match=f"{MAX_CALLS_OF_CHAT + 1} tool calls together; the limit is"):
        new_job(prompt=None, messages=[*turns, one_more])
    request = msgpack.packb({"v": 1, "kind": "generate", "messages": [*turns, one_more], "params": {}})
    with pytest.raises(WireError, match="messages: the messages have"):
        decode_request(request)


def test_the_time_in_a_job_id_is_in_utc() -> None:
    assert created_at(f"m~3.{UUID}") == datetime(2023, 6, 30, 3, 34, 18, 518000, UTC)


@pytest.mark.parametrize(("option", "field"), DURATIONS.items())
def test_a_duration_may_be_as_long_as_the_milliseconds_of_the_job(option: str, field: str) -> None:
    longest_s: Any
    (longest_s,) = (mark.le for mark in QueueFields.model_fields[option].metadata if isinstance(mark, Le))
    assert getattr(new_job(**{field: 1000 * longest_s}), field) == 1000 * longest_s
    with pytest.raises(ValidationError):
        new_job(**{field: 1000 * longest_s + 1})
