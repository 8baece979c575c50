"""`truncation: "auto"`: a conversation that is too long for the model loses its oldest turns."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgpack

from penstock.contract.job import PackedPrompt
from penstock.gateway.request.generation import GenerationRequest
from penstock.gateway.request.jobs import count_prompt_tokens
from penstock.producer.client import AsyncClient
from penstock.producer.client.request import pack_prompt_of
from penstock.queue.broker.producer import ServedPool

RESERVED_TOKENS = 1024
"""Tokens that a shortened conversation leaves to an answer without `max_output_tokens`, but at most a quarter of the
context."""
MAX_COUNTS = 8
"""Most times that one request has its tokens counted."""
_TOKENS_AROUND_MESSAGE = 16
"""More than most chat templates write around a message."""
_SPARE = 0.97
"""The share of the limit that a guess aims at. Texts differ in how many bytes a token has."""


async def shortened(
    client: AsyncClient, generation: GenerationRequest, prompt: PackedPrompt, pool: ServedPool
) -> PackedPrompt:
    """Return the conversation without as many of its oldest turns as the model's context requires.

    A turn begins with a message of the user. Instructions stay, and so does the last turn: if that alone is too long,
    the job fails as it would without truncation. Tokens are counted only if the bytes do not show that all fits.
    """
    context = pool.max_model_len
    asked = None if generation.lowers_max_tokens else generation.body.params.max_tokens
    limit = max(1, context - (asked or min(RESERVED_TOKENS, context // 4)))
    tools = len(generation.body.tool_use.tools or "")
    if not context or prompt.num_text_bytes + prompt.num_tool_bytes + tools < limit // 2:
        return prompt
    # Beyond a quarter of the context there may be megabytes, so other streams go on meanwhile.
    first, turns = await asyncio.to_thread(_turns_of, prompt)
    for _ in range(MAX_COUNTS):
        num_tokens = await _count(client, generation, prompt)
        if num_tokens <= limit or len(turns) < 2:
            return prompt
        prompt, turns = await asyncio.to_thread(_without_oldest, first, turns, 1 - _SPARE * limit / num_tokens, prompt)
    return prompt


_Messages = list[dict[str, Any]]


def _turns_of(prompt: PackedPrompt) -> tuple[_Messages, list[_Messages]]:
    """Return the instructions at the start, and the turns after them."""
    first: _Messages = []
    turns: list[_Messages] = []
    for message in msgpack.unpackb(prompt.data):
        if not turns and message["role"] in ("system", "developer"):
            first.append(message)
        elif not turns or message["role"] == "user":
            turns.append([message])
        else:
            turns[-1].append(message)
    return first, turns


def _without_oldest(
    first: _Messages, turns: list[_Messages], share: float, whole: PackedPrompt
) -> tuple[PackedPrompt, list[_Messages]]:
    """Return the conversation without the oldest turns that have this share of its text, and the turns that stay.

    At least one turn goes, and the last one stays.
    """
    sizes = [sum(map(_size_of, turn)) for turn in turns]
    excess, num_dropped = sum(sizes) * share, 0
    while num_dropped < len(turns) - 1 and (excess > 0 or not num_dropped):
        excess -= sizes[num_dropped]
        num_dropped += 1
    left = turns[num_dropped:]
    packed = pack_prompt_of([*first, *(message for turn in left for message in turn)])
    return replace(packed, first_words=whole.first_words), left


def _size_of(message: dict[str, Any]) -> int:
    """Return about how many bytes a message takes in the prompt."""
    calls = sum(len(call["name"]) + len(call["arguments"]) for call in message.get("tool_calls", ()))
    return _TOKENS_AROUND_MESSAGE + len(message["content"].encode()) + calls


async def _count(client: AsyncClient, generation: GenerationRequest, prompt: PackedPrompt) -> int:
    counted = replace(generation, body=replace(generation.body, prompts=[prompt]), cut_at=None)
    # The key belongs to the response.
    return await count_prompt_tokens(client, counted.with_options(idempotency_key=None))
