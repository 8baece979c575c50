"""Counting of a prompt's tokens by a node, because the gateway has no tokenizer."""

from __future__ import annotations

from dataclasses import replace

from penstock.contract.job import SamplingParams
from penstock.contract.tasks import Tokenize, Tokenized
from penstock.gateway.stream.generation_request import GenerationRequest, open_jobs
from penstock.producer.client import AsyncClient
from penstock.producer.client.tasks import output_of


async def count_prompt_tokens(client: AsyncClient, generation: GenerationRequest) -> int:
    """Return the number of tokens of a request's only prompt, as the model would receive it.

    A node's tokenizer counts them as a job without KV cache. Raises what a submission and its job raise.
    """
    content = replace(generation.content, params=SamplingParams(), task=Tokenize(return_tokens=False))
    async with open_jobs(client, replace(generation, content=content)) as (job,):
        return output_of(await job.result(), Tokenized).num_tokens
