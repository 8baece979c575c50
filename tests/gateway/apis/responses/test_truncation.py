"""A conversation that is too long for the model loses its oldest turns, and nothing else."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.job import SamplingParams
from penstock.gateway.apis.responses import truncation
from penstock.gateway.request.generation import GenerationRequest
from penstock.producer.client.request import pack_prompt_of
from penstock.producer.parsed_body import ParsedBody
from penstock.queue.broker.producer import ServedPool

CONTEXT, MAX_TOKENS, PER_MESSAGE = 4000, 500, 5
user = st.integers(0, 900).map(lambda n: {"role": "user", "content": "u" * n})
answer = st.integers(0, 900).map(lambda n: {"role": "assistant", "content": "é" * n})
result = st.builds(
    lambda n: [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "name": "f", "arguments": "{}"}]},
        {"role": "tool", "content": "r" * n, "tool_call_id": "c"},
    ],
    st.integers(0, 900),
)
turn = st.builds(lambda asked, rest: [asked, *rest], user, st.just([]) | answer.map(lambda one: [one]) | result)


def size_of(messages: list[dict[str, Any]]) -> int:
    return sum(PER_MESSAGE + len(one["content"]) for one in messages)


@given(st.booleans(), st.lists(turn, min_size=1, max_size=14))
def test_oldest_turns_go_until_the_rest_fits(has_system: bool, turns: list[list[dict[str, Any]]]) -> None:
    first = [{"role": "system", "content": "s" * 100}] if has_system else []
    whole = [*first, *(message for turn in turns for message in turn)]
    counted: list[int] = []

    async def count(_: object, generation: GenerationRequest) -> int:
        counted.append(size_of(msgpack.unpackb(generation.body.prompts[0].data)))  # type: ignore[union-attr]
        return counted[-1]

    pool = ServedPool("m", "m", max_model_len=CONTEXT)
    generation = GenerationRequest(ParsedBody(params=SamplingParams(max_tokens=MAX_TOKENS)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(truncation, "count_prompt_tokens", count)
        short = asyncio.run(truncation.shortened(None, generation, pack_prompt_of(whole), pool))  # type: ignore[arg-type]
    kept = msgpack.unpackb(short.data)
    num_kept = next(n for n in range(1, len(turns) + 1) if kept == [*first, *chain(*turns[-n:])])
    limit = CONTEXT - MAX_TOKENS
    assert size_of(kept) <= limit or num_kept == 1
    assert len(counted) <= truncation.MAX_COUNTS
    if size_of(whole) <= limit:
        assert kept == whole
    elif num_kept < len(turns):
        # Not much more than needed is gone: the guess leaves a few percent, and whole turns go.
        assert size_of([*first, *chain(*turns[-num_kept - 1 :])]) > 0.5 * limit
