"""A job's prompt: its field in the request, its sizes, and its packed form for a process that only forwards it."""

from __future__ import annotations

from typing import Any, cast

from penstock.contract.job import Job
from penstock.contract.packed_prompt import PackedPrompt, PromptField
from penstock.queue.msgpack_codec import pack


def prompt_fields(job: Job) -> dict[str, Any]:
    """Return the request's single field that holds the prompt. The job's prompt must not be packed yet."""
    if job.prompt is not None:
        return {"prompt": job.prompt}
    if job.prompt_token_ids is not None:
        return {"tokens": job.prompt_token_ids}
    return {"messages": [m.model_dump(exclude_defaults=True) for m in job.messages or ()]}


def pack_prompt(job: Job) -> PackedPrompt:
    """Pack a job's prompt as its request carries it."""
    ((name, value),) = prompt_fields(job).items()
    return PackedPrompt(cast(PromptField, name), pack(value), prompt_bytes(job), num_prompt_ids(job), call_bytes(job))


def num_prompt_ids(job: Job) -> int | None:
    """Return the number of token ids of a prompt of token ids; None for text."""
    if job.packed_prompt is not None:
        return job.packed_prompt.num_tokens
    return None if job.prompt_token_ids is None else len(job.prompt_token_ids)


def prompt_bytes(job: Job) -> int:
    """Return the UTF-8 bytes of a text prompt or chat, roles included; 0 for a prompt of token ids."""
    if job.packed_prompt is not None:
        return job.packed_prompt.num_text_bytes
    if job.prompt is not None:
        return len(job.prompt.encode())
    return sum(len(m.content.encode()) + len(m.role) for m in job.messages or ())


def call_bytes(job: Job) -> int:
    """Return the bytes of the names and arguments of a chat's earlier tool calls."""
    if job.packed_prompt is not None:
        return job.packed_prompt.num_tool_bytes
    calls = (call for message in job.messages or () for call in message.tool_calls)
    return sum(len(call.name) + len(call.arguments) for call in calls)
