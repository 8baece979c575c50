"""Results as rows of the output: OpenAI's batch form around the bodies that the HTTP API gives."""

from __future__ import annotations

from typing import Any

from penstock.contract.errors import PenstockError
from penstock.contract.job import Choice, Result, Usage
from penstock.producer.batch.request import CHAT_URL, Request


def answer_row(row_id: str, custom_id: str, body: dict[str, Any], job_id: str) -> dict[str, Any]:
    """The row of a request that was answered."""
    response = {"status_code": 200, "request_id": job_id, "body": body}
    return {"id": row_id, "custom_id": custom_id, "response": response, "error": None}


def error_row(row_id: str, custom_id: str, error: PenstockError) -> dict[str, Any]:
    """The row of a request that has no answer and will get none."""
    said = {"code": error.code, "message": error.message, "param": error.param}
    return {"id": row_id, "custom_id": custom_id, "response": None, "error": said}


def body_of(request: Request, model: str, result: Result) -> dict[str, Any]:
    """OpenAI's response object; the same result always gives the same one."""
    is_chat = request.url == CHAT_URL
    return {
        "id": ("chatcmpl-" if is_chat else "cmpl-") + result.job_id,
        "created": result.submitted_ms // 1000,
        "model": model,
        "object": "chat.completion" if is_chat else "text_completion",
        "choices": [_choice(choice, is_chat=is_chat) for choice in result.choices],
        "usage": _usage(result.usage or Usage(0, 0)),
    }


def _choice(choice: Choice, *, is_chat: bool) -> dict[str, Any]:
    said = (
        {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        if is_chat
        else {"text": choice.text}
    )
    return {**said, "index": choice.index, "logprobs": None, "finish_reason": choice.finish_reason}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
