"""Ids of responses and of their items. Each contains the id of the response's job, so any gateway can resolve it."""

from __future__ import annotations

import hashlib
import re

from penstock.contract.errors import NotFoundError
from penstock.contract.job import is_job_id

_RESPONSE_PREFIX = "resp_"
ITEM_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
}
_ITEM_ID = re.compile(rf"(?:{'|'.join(ITEM_PREFIXES.values())})_(\d{{1,6}})_(.+)")
MAX_SHOWN_CHARS = 128


def response_id_of(job_id: str) -> str:
    """Return the id of a job's response."""
    return _RESPONSE_PREFIX + job_id


def job_id_of(response_id: str) -> str:
    """Return the id of a response's job. Raises NotFoundError for what is not the id of a response."""
    job_id = response_id.removeprefix(_RESPONSE_PREFIX)
    if not response_id.startswith(_RESPONSE_PREFIX) or not is_job_id(job_id):
        raise no_response(response_id)
    return job_id


def no_response(response_id: str) -> NotFoundError:
    """Return the error for a response that is unknown, deleted, expired, or of another tenant."""
    message = f"Response with id {response_id[:MAX_SHOWN_CHARS]!r} not found."
    return NotFoundError(message, code="response_not_found", param="response_id")


def output_item_id(kind: str, index: int, job_id: str) -> str:
    """Return the id of an item of a response's output."""
    return f"{ITEM_PREFIXES[kind]}_{index}_{job_id}"


def input_item_id(index: int, job_id: str) -> str:
    """Return the id of an item of a response's input that came without an id."""
    return f"item_{index}_{job_id}"


def compaction_id(job_id: str) -> str:
    """Return the id of the item with the summary that a job wrote. No reference can name it."""
    return f"cmp_{job_id}"


def place_of(item_id: str) -> tuple[str, int] | None:
    """Return the job and the index of an item of a response's output, or None for another id."""
    found = _ITEM_ID.fullmatch(item_id)
    return (found[2], int(found[1])) if found and is_job_id(found[2]) else None


def call_id_of(job_id: str, number: int) -> str:
    """Return the id of a response's call, by its number. It is that of the same call in a chat's answer.

    Mistral's chat templates require nine letters or digits.
    """
    return hashlib.blake2b(f"{job_id}:0:{number}".encode()).hexdigest()[:9]
