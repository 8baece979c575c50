"""What one HTTP answer may hold, checked before its jobs are queued."""

from __future__ import annotations

import math

from penstock.contract.errors import RequestError
from penstock.contract.packed_prompt import PackedPrompt
from penstock.contract.problems import rename
from penstock.gateway.stream.generation_request import GenerationRequest
from penstock.producer.client.request import Prompt
from penstock.queue.wire import PoolRecord


def check_logprobs(order: GenerationRequest, record: PoolRecord, limit: int) -> None:
    """Refuse an answer of more log-probabilities than `limit`: of all prompts, and of all tokens that may be generated.

    A prompt of texts is counted as the queue counts it, by bytes; its node counts the tokens of each job once more.
    """
    params = order.params
    of_prompts = sum(num_prompt_tokens(prompt, record) for prompt in order.prompts) * _per_token(params.prompt_logprobs)
    # Without max_tokens the node ends a choice where its job's log-probabilities are used up.
    num_choices = len(order.prompts) * params.n
    of_choices = num_choices * (params.max_tokens or 1) * _per_token(params.logprobs)
    if of_prompts + of_choices > limit:
        name = "prompt_logprobs" if of_prompts >= of_choices else "logprobs"
        said = (
            f"{name}: {len(order.prompts)} prompts and {num_choices} choices ask for up to {of_prompts + of_choices} "
            f"log-probabilities; a request has at most {limit}"
        )
        error = RequestError(said, param=name)
        rename(error, order.names)
        raise error


def num_prompt_tokens(prompt: Prompt, record: PoolRecord) -> int:
    """Tokens of a prompt: as many as its ids, or what its text probably has."""
    if isinstance(prompt, PackedPrompt):
        num_tokens, num_bytes = prompt.num_tokens, prompt.num_text_bytes
    elif isinstance(prompt, str):
        num_tokens, num_bytes = None, len(prompt.encode(errors="replace"))
    else:
        # Messages come with no log-probabilities of their own.
        num_tokens, num_bytes = len(prompt), 0
    counted = math.ceil(num_bytes / record.bytes_per_token) if num_tokens is None else num_tokens
    return min(counted, record.max_model_len or counted)


def _per_token(num_logprobs: int | None) -> int:
    return 0 if num_logprobs is None else 1 + num_logprobs
