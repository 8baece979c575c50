"""`context_management`: a conversation beyond a threshold is shortened as `/v1/responses/compact` does it.

The model sums up what was said before the last message of the user. The answer then follows from the messages of the
user and the summary, and the first item of its output is the summary under its seal.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from penstock.contract.errors import JobFailedError
from penstock.contract.job import PackedPrompt
from penstock.contract.sampling import SamplingParams
from penstock.contract.tools import NO_TOOLS
from penstock.gateway.request.earlier_reasoning import SealTerms
from penstock.gateway.request.generation import GenerationRequest
from penstock.gateway.request.jobs import count_prompt_tokens, open_jobs
from penstock.producer.client import AsyncClient
from penstock.producer.client.request import answer_format, pack_prompt_of
from penstock.producer.openai.bodies import effort_variables
from penstock.producer.openai.render import is_cut
from penstock.producer.responses.compaction import asking, sealed, summary_limit, summary_message
from penstock.queue.broker.producer import ServedPool

DEFAULT_SHARE = 0.75
"""The share of the model's context from which on a conversation without a threshold of its own is shortened."""

_Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Compacted:
    """A conversation that was shortened."""

    prompt: PackedPrompt
    """The instructions, and one message of the user with those of before, the summary, and the last one."""
    content: str
    """The summary with its seal."""


async def compacted(
    client: AsyncClient, generation: GenerationRequest, prompt: PackedPrompt, pool: ServedPool, terms: SealTerms
) -> Compacted | None:
    """Return the shortened conversation, or None if it is below its threshold or has only one turn.

    Tokens are counted only if the bytes do not show that all fits. Raises what the job of the summary raises.
    """
    threshold = generation.body.options["compact_threshold"] or int(DEFAULT_SHARE * pool.max_model_len)
    tools = len(generation.body.tool_use.tools or "")
    if prompt.num_text_bytes + prompt.num_tool_bytes + tools < threshold // 2:
        return None
    # The key belongs to the response.
    asked = replace(generation, body=replace(generation.body, prompts=[prompt]), cut_at=None)
    asked = asked.with_options(idempotency_key=None)
    if await count_prompt_tokens(client, asked) < threshold:
        return None
    first, before, last = await asyncio.to_thread(_parts_of, prompt)
    if not any(message["role"] != "user" for message in before):
        return None
    summary = await _summary_of(client, asked, [*first, *before], pool)
    texts = [message["content"] for message in before if message["role"] == "user"]
    texts += [summary_message(summary), *(message["content"] for message in last)]
    short = pack_prompt_of([*first, {"role": "user", "content": "\n\n".join(texts)}])
    return Compacted(replace(short, first_words=prompt.first_words), sealed(summary, **terms))


def _parts_of(prompt: PackedPrompt) -> tuple[_Messages, _Messages, _Messages]:
    """Return the instructions at the start, the messages to sum up, and a last message of the user."""
    messages: _Messages = msgpack.unpackb(prompt.data)
    start = next((at for at, one in enumerate(messages) if one["role"] not in ("system", "developer")), len(messages))
    end = len(messages) - (bool(messages) and messages[-1]["role"] == "user")
    return messages[:start], messages[start:end], messages[max(start, end) :]


async def _summary_of(client: AsyncClient, generation: GenerationRequest, messages: _Messages, pool: ServedPool) -> str:
    prompt = await asyncio.to_thread(pack_prompt_of, asking(messages))
    max_tokens = summary_limit(prompt.num_text_bytes + prompt.num_tool_bytes)
    params = SamplingParams(max_tokens=max_tokens, cache_salt=generation.body.params.cache_salt)
    kwargs = json.dumps(effort_variables("none"))
    body = replace(generation.body, prompts=[prompt], params=params, tool_use=NO_TOOLS, template_kwargs=kwargs)
    asked = replace(generation, body=body).with_options(background=False, lower_max_tokens=True)
    async with open_jobs(client, asked) as (job,):
        (choice,) = (await job.result()).choices
    form = answer_format(NO_TOOLS, params, kwargs, pool)
    summary = form.read(choice.text, is_cut=is_cut(choice.finish_reason)).content.strip()
    if not summary:
        message = "the model wrote no summary; send the conversation again, or without context_management"
        raise JobFailedError(message, code="no_summary")
    return summary
