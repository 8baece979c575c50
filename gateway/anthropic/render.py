"""Objects of Anthropic's answers: the message, its content blocks, its stop reason and its usage."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json, to_json

from penstock.contract.output import FinishReason, Usage
from penstock.gateway.stream.dialect import AnswerHead
from penstock.producer.openai.json_parts import Text
from penstock.producer.openai.parsed_text import ParsedText
from penstock.producer.openai.render import limit_member
from penstock.producer.openai.tool_calls import Call, warning_of


def message_of(head: AnswerHead) -> dict[str, Any]:
    """Return the members of a message that are known before its first token."""
    return {"id": f"msg_{head.job_ids[0]}", "type": "message", "role": "assistant", "model": head.model}


def usage_of(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> dict[str, int]:
    """Return Anthropic's usage, where `input_tokens` leaves out the tokens that the prefix cache supplied."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_output_tokens,
    }


def whole_usage_of(head: AnswerHead, usages: Sequence[Usage | None]) -> dict[str, int]:
    """Return the usage at the end of an answer, with the limit of its tokens if the context lowered it."""
    limit = limit_member(head.params.max_tokens, head.max_total_tokens, usages)
    used = [usage for usage in usages if usage is not None]
    return (
        usage_of(
            sum(usage.prompt_tokens for usage in used),
            sum(usage.cached_tokens for usage in used),
            sum(usage.completion_tokens for usage in used),
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


def blocks_of(parsed: ParsedText, *, shows_thinking: bool) -> list[dict[str, Any]]:
    """Return the thinking and text of a whole answer as blocks with lazy texts. White space alone makes no block."""
    blocks: list[dict[str, Any]] = []
    if parsed.reasoning and shows_thinking:
        blocks.append({"type": "thinking", "thinking": Text(lambda: (parsed.reasoning,)), "signature": ""})
    if parsed.content and not parsed.content.isspace():
        blocks.append({"type": "text", "text": Text(lambda: (parsed.content,))})
    return blocks
