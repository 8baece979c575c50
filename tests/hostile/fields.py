"""Every limit of a request's fields, with bodies exactly at the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from penstock.contract import job, prompt, sampling, tools
from penstock.contract.channel import MAX_CHANNEL_NAME_CHARS
from penstock.contract.job import MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS
from penstock.contract.output import MAX_LOGPROBS
from penstock.gateway.http.protocol import MAX_HEAD_BYTES
from penstock.gateway.request.reading import MAX_KEY_CHARS
from penstock.gateway.settings import GatewaySettings
from penstock.producer.openai.bodies import MAX_PROMPTS
from penstock.producer.parsed_body import MAX_CHOICES_OF_REQUEST

MAX_BODY_BYTES: int = GatewaySettings.model_fields["max_body_bytes"].default
MAX_MODEL_CHARS = 256
"""`model` of a body."""


def _texts(count: int, chars: int) -> list[str]:
    return [f"{i:06d}".ljust(chars, "q")[:chars] for i in range(count)]


Limited = Callable[[int], dict[str, Any]]


def _call(**function: Any) -> dict[str, Any]:
    call = {"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}", **function}}
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]}


def _calls(count: int) -> dict[str, Any]:
    body = _call()
    body["messages"][1]["tool_calls"] *= count
    return body


def _calls_of_chat(count: int) -> dict[str, Any]:
    """Return tool calls in messages, each with the largest number of calls."""
    body = _call()
    turn = body["messages"].pop()
    for first in range(0, count, tools.MAX_CALLS):
        calls = turn["tool_calls"] * min(tools.MAX_CALLS, count - first)
        body["messages"].append({**turn, "tool_calls": calls})
    return body


def _offered(count: int) -> dict[str, Any]:
    function = {"type": "function", "function": {"name": "f"}}
    return {"messages": [{"role": "user", "content": "x"}], "tools": [function] * count}


def _response(**fields: Any) -> dict[str, Any]:
    """Return the body of a response that is not stored."""
    return {"input": "x", "max_output_tokens": 2, "store": False, **fields}


def _field(name: str, value_of: Callable[[int], Any], **beside: Any) -> Limited:
    return lambda v: {**beside, name: value_of(v)}


def _of_sampling() -> Iterator[tuple[str, tuple[int, Limited]]]:
    """Yield the limits that the sampling options declare."""
    for name, schema in sampling.SamplingParams.model_json_schema()["properties"].items():
        for form in (schema, *schema.get("anyOf", ())):
            if (limit := form.get("maximum")) is not None:
                needs = {"use_beam_search": True} if name in ("beam_width", "length_penalty") else {}
                yield name, (int(limit), _field(name, int, max_tokens=1, **needs))
            if (limit := form.get("maxLength")) is not None:
                yield name, (limit, _field(name, "s".__mul__, max_tokens=1))
            if (limit := form.get("maxProperties")) is not None:
                yield name, (limit, _field(name, lambda v: {str(i): 1 for i in range(v)}))
            if (limit := form.get("maxItems")) is not None:
                is_text = form["items"]["type"] == "string"
                yield name, (limit, _field(name, partial(_texts, chars=9) if is_text else lambda v: [*range(v)]))
            if (limit := form.get("items", {}).get("maxLength")) is not None:
                yield f"{name} characters", (limit, _field(name, lambda v: ["s" * v]))


LIMITS: dict[str, tuple[int, Limited]] = {
    **dict(_of_sampling()),
    "max_tokens": (job.MAX_TOKENS_LIMIT, lambda v: {"max_tokens": v, "stop": [" ", "e", "a"], "n": 1}),
    "cache_salt of a response": (sampling.MAX_CACHE_SALT_CHARS, lambda v: _response(cache_salt="s" * v)),
    "prompts": (MAX_PROMPTS, lambda v: {"prompt": ["x"] * v, "max_tokens": 1}),
    "choices of a request": (
        MAX_CHOICES_OF_REQUEST,
        lambda v: {"prompt": ["x"] * (v // 8 if v <= MAX_CHOICES_OF_REQUEST else 33), "n": 8, "max_tokens": 1},
    ),
    "messages": (job.MAX_MESSAGES, lambda v: {"messages": [{"role": "user", "content": ""}] * v}),
    "model": (MAX_MODEL_CHARS, lambda v: {"model": "m" * v}),
    "regex characters": (sampling.MAX_REGEX_CHARS, lambda v: {"structured_outputs": {"regex": "r" * v}}),
    "grammar characters": (
        sampling.MAX_GRAMMAR_CHARS,
        lambda v: {"structured_outputs": {"grammar": 'start: "x"'.ljust(v)}},
    ),
    "choice": (sampling.MAX_ALTERNATIVES, lambda v: {"structured_outputs": {"choice": _texts(v, 8)}}),
    "choice characters": (sampling.MAX_ALTERNATIVE_CHARS, lambda v: {"structured_outputs": {"choice": ["c" * v]}}),
    "choice characters together": (
        sampling.MAX_CHOICE_CHARS,
        lambda v: {"structured_outputs": {"choice": [*_texts(512, 511), "z" * (v - 512 * 511)]}},
    ),
    "schema characters": (
        sampling.MAX_SCHEMA_CHARS,
        lambda v: {"structured_outputs": {"json": '{"type": "null"}'.ljust(v)}},
    ),
    "name of a participant": (
        prompt.MAX_PARTICIPANT_NAME_CHARS,
        lambda v: {"messages": [{"role": "user", "content": "x", "name": "n" * v}]},
    ),
    "template variables": (
        tools.MAX_TEMPLATE_KWARGS,
        lambda v: {**_offered(0), "chat_template_kwargs": {f"a{i}": i for i in range(v)}},
    ),
    "template variables' characters": (
        tools.MAX_TEMPLATE_KWARGS_CHARS,
        lambda v: {**_offered(0), "chat_template_kwargs": {"a": "x" * (v - len('{"a": ""}'))}},
    ),
    "tools": (tools.MAX_TOOLS, _offered),
    "calls": (tools.MAX_CALLS, _calls),
    "calls of a chat": (tools.MAX_CALLS_OF_CHAT, _calls_of_chat),
    "name of a called function": (tools.MAX_FUNCTION_NAME_CHARS, lambda v: _call(name="f" * v)),
    "arguments of a call": (tools.MAX_ARGUMENTS_CHARS, lambda v: _call(arguments='{"a": "' + "x" * (v - 9) + '"}')),
    "deadline": (job.MAX_DEADLINE_S, lambda v: {"deadline_s": v}),
    "ttl": (job.MAX_DEADLINE_S, lambda v: {"ttl_s": v}),
    "ttl of a response": (job.MAX_DEADLINE_S, lambda v: _response(ttl_s=v)),
    "deadline of a response": (job.MAX_DEADLINE_S, lambda v: _response(deadline_s=v)),
    "name of a channel": (MAX_CHANNEL_NAME_CHARS, lambda v: {"channel": {"name": "n" * v}}),
    "reader grace": (job.MAX_READER_GRACE_S, lambda v: _response(background=True, reader_grace_s=v)),
    "log-probabilities of a response": (MAX_LOGPROBS, lambda v: _response(top_logprobs=v)),
    "tools of a response": (
        tools.MAX_TOOLS,
        lambda v: _response(tools=[{"type": "function", "name": "f"}] * v, tool_choice="none"),
    ),
    "metadata": (MAX_METADATA, lambda v: _response(metadata={f"{i}": "v" for i in range(v)})),
    "characters of a key of metadata": (MAX_METADATA_KEY_CHARS, lambda v: _response(metadata={"k" * v: "v"})),
    "characters of a value of metadata": (MAX_METADATA_VALUE_CHARS, lambda v: _response(metadata={"k": "v" * v})),
    "head": (MAX_HEAD_BYTES, lambda v: {}),
    "idempotency key": (MAX_KEY_CHARS, lambda v: {}),
    "body": (MAX_BODY_BYTES, lambda v: {}),
}
"""What is limited, the limit, and a body that says so much of it."""
