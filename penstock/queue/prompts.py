"""A job's prompt: its field of the request, its sizes, and the same packed for a process that only passes it on."""

from __future__ import annotations

from typing import Any, cast

from penstock.contract.job import Job
from penstock.contract.packed_prompt import PackedPrompt, PromptField
from penstock.queue.msgpack_codec import pack


def prompt_fields(job: Job) -> dict[str, Any]:
    """The one member of a request that holds the prompt, for a prompt that is not packed."""
    if job.prompt is not None:
        return {"prompt": job.prompt}
    if job.prompt_token_ids is not None:
        return {"tokens": job.prompt_token_ids}
    return {"messages": [m.model_dump(exclude_defaults=True) for m in job.messages or ()]}


def pack_prompt(job: Job) -> PackedPrompt:
    """The prompt of a job, packed as its request carries it."""
    ((name, value),) = prompt_fields(job).items()
    return PackedPrompt(cast(PromptField, name), pack(value), prompt_bytes(job), num_prompt_ids(job), call_bytes(job))


def num_prompt_ids(job: Job) -> int | None:
    """Token ids of a prompt that consists of them."""
    if job.packed_prompt is not None:
        return job.packed_prompt.num_tokens
    return None if job.prompt_token_ids is None else len(job.prompt_token_ids)


def prompt_bytes(job: Job) -> int:
    """UTF-8 bytes of a job's prompt in text form; 0 for one of token ids."""
    if job.packed_prompt is not None:
        return job.packed_prompt.num_text_bytes
    if job.prompt is not None:
        return len(job.prompt.encode())
    return sum(len(m.content.encode()) + len(m.role) for m in job.messages or ())


def call_bytes(job: Job) -> int:
    """Bytes of the names and arguments of a chat's earlier calls."""
    if job.packed_prompt is not None:
        return job.packed_prompt.num_tool_bytes
    calls = (call for message in job.messages or () for call in message.tool_calls)
    return sum(len(call.name) + len(call.arguments) for call in calls)
