"""Counting of a prompt's tokens by a node, because the gateway has no tokenizer."""

from __future__ import annotations

from penstock.contract.errors import InvariantError
from penstock.gateway.stream.generation_request import GenerationRequest, open_jobs
from penstock.producer.client import AsyncClient


async def count_prompt_tokens(client: AsyncClient, generation: GenerationRequest) -> int:
    """Return the number of tokens of a request's only prompt, as the model would receive it.

    The prompt runs as a job of one output token, so its limits and its usage are those of that job. Its KV blocks stay
    in the prefix cache, where the answer to the same prompt finds them. Raises what a submission and its job raise.
    """
    async with open_jobs(client, generation) as (job,):
        result = await job.packed_result()
    if result.usage is None:
        raise InvariantError(f"job {job.id} ended without usage")
    return result.usage.prompt_tokens
