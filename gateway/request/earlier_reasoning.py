"""The reasoning of earlier answers that a request sends back under a seal, and the secret of the seals.

Clients go on with a conversation on another server or with another model. What was sealed there, or was changed since,
is left out of the prompt and named in the answer; it never makes the request invalid.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import msgpack

from penstock.contract.job import PackedPrompt
from penstock.contract.tasks import GENERATE
from penstock.gateway.request.generation import GenerationRequest
from penstock.producer.client import AsyncClient
from penstock.producer.client.pool_choice import names_of
from penstock.producer.client.request import Prompt, pack_prompt_of
from penstock.producer.openai.seals import THOUGHTS, Seal, is_genuine
from penstock.producer.parsed_body import MAX_IGNORED_SHOWN

SEAL = "seal"
"""The option of an answer with the terms by which its reasoning is sealed."""


class SealTerms(TypedDict):
    """The secret of the seals, and what they bind a text to."""

    key: bytes
    tenant: str
    model: str


async def may_reason(client: AsyncClient, generation: GenerationRequest) -> bool:
    """Return whether the request's model may reason in marks that are known. Raises as `served_pool` does."""
    asked = generation.body.model or None
    pool = await client.served_pool(asked, key=generation.key, kind=GENERATE, hides_models=generation.hides_models)
    return pool.reasoning_parser != "none"


async def seal_terms_of(client: AsyncClient, generation: GenerationRequest) -> SealTerms:
    """Return the terms of a request's seals. Its aliases stand for the model. Raises UnavailableError."""
    asked = generation.body.model or None
    pool = await client.served_pool(asked, key=generation.key, kind=GENERATE, hides_models=generation.hides_models)
    model = pool.model if not asked or asked in names_of(pool) else asked
    key = await client.servers.directory.responses.seal_key()
    return {"key": key, "tenant": generation.tenant, "model": model}


def without_foreign_reasoning(generation: GenerationRequest, terms: SealTerms, name: str) -> GenerationRequest:
    """Return the request without the earlier reasoning that has no genuine seal. `name`: as the answer lists it."""
    seals: Sequence[Sequence[Any]] = generation.body.options.get(THOUGHTS, ())
    foreign = {index for index, *seal in seals if not is_genuine("reasoning", Seal(*seal), **terms)}
    if not foreign:
        return generation
    body = generation.body
    (prompt,) = body.prompts
    ignored = [*dict.fromkeys((*body.ignored, name))][:MAX_IGNORED_SHOWN]
    return replace(generation, body=replace(body, prompts=[_without(prompt, foreign)], ignored=ignored))


def _without(prompt: Prompt, indexes: Collection[int]) -> Prompt:
    """Return a chat whose messages at these indexes have no reasoning."""
    packed = prompt if isinstance(prompt, PackedPrompt) else pack_prompt_of(prompt)
    messages: list[dict[str, Any]] = msgpack.unpackb(packed.data)
    for index in indexes:
        messages[index].pop("reasoning", None)
    return replace(pack_prompt_of(messages), first_words=packed.first_words)
