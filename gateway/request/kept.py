"""The record of a generation: what a successor of this gateway needs to go on with its answer, beside the job's log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from penstock.contract.job import PackedPrompt, SubmitOptions
from penstock.gateway.request.encoding import decode_parsed_body, encode_parsed_body
from penstock.gateway.request.generation import GenerationRequest, StreamPosition
from penstock.producer.client.request import pack_prompt_of

_OPTIONS = (
    *("tenant", "hides_models", "lower_max_tokens", "idempotency_key", "background", "needs_reader", "job_id"),
    "token_durability",
)
"""The options of a submission on which its answer depends."""


def facts_of(generation: GenerationRequest, job_ids: Sequence[str], *, shows_prompts: bool) -> dict[str, Any]:
    """Return the record's facts about a request. `shows_prompts`: whether the answer repeats parts of its prompts."""
    body = generation.body
    prompts = [_packed(prompt) for prompt in body.prompts] if shows_prompts else []
    cut_at = generation.cut_at
    return {
        "job_ids": list(job_ids),
        "body": encode_parsed_body(body, prompts),
        "num_prompts": len(body.prompts),
        "options": {name: option for name, option in generation.options.items() if name in _OPTIONS},
        "cut_at": None if cut_at is None else [cut_at.job_id, cut_at.index, cut_at.num_tokens, cut_at.lacks_end],
        "event_ids": generation.event_ids,
        "replays": generation.replay_from_start,
    }


def _packed(prompt: Any) -> PackedPrompt:
    return prompt if isinstance(prompt, PackedPrompt) else pack_prompt_of(prompt)


def generation_of_record(record: Mapping[str, Any]) -> GenerationRequest:
    """Return the request of a record. Its prompts are empty unless the answer repeats them."""
    body = decode_parsed_body(record["body"])
    if not body.prompts:
        body = replace(body, prompts=("",) * record["num_prompts"])
    cut_at = None if record["cut_at"] is None else StreamPosition(*record["cut_at"])
    options = cast("SubmitOptions", record["options"])
    return GenerationRequest(body, options, cut_at, record["event_ids"], record["replays"])
