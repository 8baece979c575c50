"""Anthropic's answers: the message with its content blocks, stop reason and usage, and the error in place of one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json, to_json

from penstock.contract.calls.reading import Call, warning_of
from penstock.contract.errors import BusyError, PenstockError, PromptTooLongError
from penstock.contract.output import FinishReason, Usage
from penstock.contract.sampling import SamplingParams
from penstock.producer.openai.json_parts import Text, json_parts
from penstock.producer.openai.render import AnyResult, is_cut, limit_member
from penstock.producer.openai.seals import signature
from penstock.producer.parsing.parsed_text import AnswerFormat, ParsedText, joined

OVERLOADED = 529
"""Anthropic's status for a busy service. A caller that reached its own limit gets 429 instead."""
_OF_ALL_CALLERS = frozenset(("pool_busy", "redis_full"))
"""Codes of a BusyError that no limit of the caller caused."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    499: "api_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""Error types by status. Any other status below 500 is an invalid request, and any from 500 an error of the API."""
_API_FAILS_FROM = 500

# Objects of Anthropic's answers: the message, its content blocks, its stop reason and its usage.


def message_of(job_id: str, model: str) -> dict[str, Any]:
    """Return the members of a message that are known before its first token."""
    return {"id": f"msg_{job_id}", "type": "message", "role": "assistant", "model": model}


def usage_of(
    num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int, num_reasoning_tokens: int = 0
) -> dict[str, Any]:
    """Return Anthropic's usage, where `input_tokens` leaves out the tokens that the prefix cache supplied."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_output_tokens,
        "output_tokens_details": {"thinking_tokens": num_reasoning_tokens},
    }


def whole_usage_of(
    params: SamplingParams, max_total_tokens: int | None, usages: Sequence[Usage | None]
) -> dict[str, Any]:
    """Return the usage at the end of an answer, with the limit of its tokens if the context lowered it."""
    limit = limit_member(params.max_tokens, max_total_tokens, usages)
    used = [usage for usage in usages if usage is not None]
    return (
        usage_of(
            sum(usage.prompt_tokens for usage in used),
            sum(usage.cached_tokens for usage in used),
            sum(usage.completion_tokens for usage in used),
            sum(usage.reasoning_tokens for usage in used),
        )
        | limit
    )


def without_stop(text: str, finish_reason: FinishReason | None, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return the text without the stop string at its end, and that string, or None if the text ended otherwise.

    The job ends at the stop string that begins first. So of several that fit, it is the longest.
    """
    if finish_reason != "stop":
        return text, None
    stop = max((stop for stop in stops if text.endswith(stop)), key=len, default=None)
    return (text, None) if stop is None else (text[: len(text) - len(stop)], stop)


def stop_of(
    finish_reason: FinishReason | None, stop: str | None, *, calls: bool, fills_context: bool
) -> dict[str, str | None]:
    """Return the members that tell why the answer ended. `fills_context`: with `length`, it filled the context."""
    if stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    if finish_reason == "length":
        reason = "model_context_window_exceeded" if fills_context else "max_tokens"
    else:
        reason = "tool_use" if calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def tool_use_block(job_id: str, call: Call) -> dict[str, Any]:
    """Return a tool call as a block without its `input`."""
    # The id is the same in every reading of the answer. Mistral's chat templates require nine letters or digits.
    call_id = hashlib.blake2b(f"{job_id}:0:{call.index}".encode()).hexdigest()[:9]
    return {"type": "tool_use", "id": call_id, "name": call.name}


def input_of(call: Call) -> bytes:
    """Return a call's `input`, a JSON object. Of cut or broken arguments, it has the members that are whole."""
    if call.end == "whole":
        # The arguments are the text of a JSON object, so they need no second encoding.
        return call.arguments.encode()
    try:
        value = from_json(call.arguments, allow_partial=True)
    except ValueError:
        value = {}
    return to_json(value if isinstance(value, dict) else {})


def warning_member(call: Call) -> dict[str, str]:
    """Return the member that tells of a broken call, if it is one."""
    warning = warning_of(call)
    return {} if warning is None else {"warning": warning}


def blocks_of(
    parsed: ParsedText, *, shows_thinking: bool, seal: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the thinking and text of a whole answer as blocks with lazy texts. White space alone makes no block.

    `seal`: how thinking is signed; None: its signature is empty.
    """
    blocks: list[dict[str, Any]] = []
    if parsed.reasoning and shows_thinking:
        digest = hashlib.sha256(parsed.reasoning.encode(errors="replace")).digest()
        signed = "" if seal is None else signature("reasoning", digest, **seal)
        blocks.append({"type": "thinking", "thinking": Text(lambda: (parsed.reasoning,)), "signature": signed})
    if parsed.content and not parsed.content.isspace():
        blocks.append({"type": "text", "text": Text(lambda: (parsed.content,))})
    return blocks


class WholeMessage:
    """Writes a whole answer in parts. Its blocks come in the order thinking, text, tool calls."""

    def __init__(
        self,
        job_id: str,
        model: str,
        params: SamplingParams,
        answer_format: AnswerFormat,
        *,
        shows_thinking: bool,
        max_total_tokens: int | None,
        seal: Mapping[str, Any] | None = None,
    ) -> None:
        """`max_total_tokens`: prompt and output together, to which `max_tokens` is lowered."""
        self._head = message_of(job_id, model)
        self._params = params
        self._answer_format = answer_format
        self._shows_thinking = shows_thinking
        self._seal = seal
        self._max_total_tokens = max_total_tokens

    def head(self) -> bytes:
        """Return the members before the content."""
        return to_json(self._head)[:-1] + b',"content":['

    def parts_of(self, result: AnyResult) -> Iterator[bytes]:
        """Yield the content and the stop reason. Empty parts come while the text is parsed."""
        choice = result.choices[0]
        text, stop = without_stop(choice.text, choice.finish_reason, self._params.stop)
        parts = list[ParsedText]()
        for more in self._answer_format.parts_of(text, is_cut=is_cut(choice.finish_reason)):
            parts += more
            yield b""
        parsed = joined(parts)
        blocks = blocks_of(parsed, shows_thinking=self._shows_thinking, seal=self._seal)
        for number, block in enumerate(blocks):
            yield b"," if number else b""
            yield from json_parts(block)
        for number, call in enumerate(parsed.calls, start=len(blocks)):
            begun = to_json(tool_use_block(result.job_id, call) | warning_member(call))[:-1]
            yield (b"," if number else b"") + begun + b',"input":' + input_of(call) + b"}"
        fills = "max_tokens" in self._usage_of([result.usage])
        ending = stop_of(choice.finish_reason, stop, calls=bool(parsed.calls), fills_context=fills)
        yield b"]," + to_json(ending)[1:-1]

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the usage."""
        return b',"usage":' + to_json(self._usage_of(usages)) + b"}"

    def object_of(self, result: AnyResult) -> dict[str, Any]:
        """Return the message for the result of its only job."""
        parts = [self.head(), *self.parts_of(result), self.tail([result.usage])]
        message: dict[str, Any] = from_json(b"".join(parts))
        return message

    def _usage_of(self, usages: Sequence[Usage | None]) -> dict[str, Any]:
        return whole_usage_of(self._params, self._max_total_tokens, usages)


# Errors in Anthropic's shape, with its types and status codes.


def status_of(error: PenstockError) -> int:
    """Return the HTTP status of an error."""
    return OVERLOADED if isinstance(error, BusyError) and error.code in _OF_ALL_CALLERS else error.status


def error_body(message: str, status: int, request_id: str | None) -> dict[str, Any]:
    """Return Anthropic's error object."""
    kind = _TYPES.get(status, "api_error" if status >= _API_FAILS_FROM else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def message_of_error(error: PenstockError) -> str:
    """Return the text for people. Coding agents look for Anthropic's words to shorten their conversation."""
    if isinstance(error, PromptTooLongError) and error.param != "max_tokens":
        return f"prompt is too long: {error.message}"
    return error.message
