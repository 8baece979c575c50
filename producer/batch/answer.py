"""Rows of the output file: OpenAI's batch format around the response bodies of the HTTP API."""

from __future__ import annotations

from typing import Any

from penstock.contract.errors import PenstockError
from penstock.contract.output import Result
from penstock.producer.batch.request import CHAT_URL, Request
from penstock.producer.openai.render import ChatRenderer, CompletionRenderer


def answer_row(row_id: str, custom_id: str, body: dict[str, Any], job_id: str) -> dict[str, Any]:
    """Return the row of an answered request."""
    response = {"status_code": 200, "request_id": job_id, "body": body}
    return {"id": row_id, "custom_id": custom_id, "response": response, "error": None}


def error_row(row_id: str, custom_id: str, error: PenstockError) -> dict[str, Any]:
    """Return the row of a request that failed permanently."""
    details = {"code": error.code, "message": error.message, "param": error.param}
    return {"id": row_id, "custom_id": custom_id, "response": None, "error": details}


def body_of(request: Request, model: str, result: Result, max_total_tokens: int | None = None) -> dict[str, Any]:
    """Return OpenAI's response object for a result. The same result always gives the same object.

    `max_total_tokens`: prompt and output together, to which `max_tokens` was lowered.
    """
    made = ChatRenderer if request.url == CHAT_URL else CompletionRenderer
    renderer = made(
        job_id=result.job_id,
        model=model,
        created_s=result.submitted_ms // 1000,
        params=request.params,
        include_usage=False,
        echoes=request.echoes,
    )
    renderer.max_total_tokens = max_total_tokens
    return renderer.whole([result])
