"""Limits on the size of one HTTP answer, checked before its jobs are queued."""

from __future__ import annotations

import math

from penstock.contract.errors import RequestError
from penstock.contract.job import MAX_TOKENS_LIMIT
from penstock.contract.packed_prompt import PackedPrompt
from penstock.contract.pool import PoolRecord
from penstock.contract.problems import rename
from penstock.contract.tenant import NO_LIMIT, Terms
from penstock.gateway.stream.generation_request import RequestContent
from penstock.producer.client.request import Prompt
from penstock.queue.admission import REQUEST_BYTES_PER_TOKEN
from penstock.queue.broker.producer import ServedPool


def check_num_jobs(content: RequestContent, terms: Terms, record: ServedPool) -> None:
    """Raise RequestError if a request has more prompts than jobs may be open at once. A retry could not help it."""
    num_jobs = len(content.prompts)
    for limit, owner in ((terms.max_open_jobs, "this tenant"), (record.max_open_jobs, "this model's pool")):
        if NO_LIMIT < limit < num_jobs:
            message = (
                f"prompt: {num_jobs} prompts become as many jobs, and {owner} may have at most {limit} open jobs "
                "(max_open_jobs); send fewer prompts in one request"
            )
            error = RequestError(message, code="too_many_jobs", param="prompt")
            rename(error, content.names)
            raise error


def check_logprobs(content: RequestContent, record: PoolRecord, limit: int) -> None:
    """Raise RequestError if the answer may hold more than `limit` log-probabilities.

    The count covers the tokens of all prompts and all tokens that may be generated. For a prompt given as text it
    estimates tokens from bytes, as the queue does; the node later checks each job with exact counts.
    """
    params = content.params
    limit_of_prompt = params.truncate_prompt_tokens or math.inf
    num_tokens = int(sum(min(num_prompt_tokens(prompt, record), limit_of_prompt) for prompt in content.prompts))
    of_prompts = num_tokens * (_per_token(params.prompt_logprobs) or params.return_token_ids)
    # Without max_tokens, the node ends a choice when the job reaches its limit of log-probabilities.
    num_choices = len(content.prompts) * params.n
    max_tokens = min(params.max_tokens or 1, record.max_model_len or MAX_TOKENS_LIMIT)
    of_choices = num_choices * max_tokens * _per_token(params.logprobs)
    if of_prompts + of_choices > limit:
        of_prompt = "return_token_ids" if params.prompt_logprobs is None else "prompt_logprobs"
        name = of_prompt if of_prompts >= of_choices else "logprobs"
        message = (
            f"{name}: {len(content.prompts)} prompts and {num_choices} choices ask for up to "
            f"{of_prompts + of_choices} log-probabilities; a request may ask for at most {limit}"
        )
        error = RequestError(message, param=name)
        rename(error, content.names)
        raise error


def num_prompt_tokens(prompt: Prompt, record: PoolRecord) -> int:
    """Return the number of tokens in a prompt: exact for token ids, estimated from bytes for text."""
    if isinstance(prompt, PackedPrompt):
        num_tokens, num_bytes = prompt.num_tokens, prompt.num_text_bytes
    elif isinstance(prompt, str):
        num_tokens, num_bytes = None, len(prompt.encode(errors="replace"))
    else:
        # A chat cannot ask for log-probabilities of its prompt, so the length of its messages does not matter.
        num_tokens, num_bytes = len(prompt), 0
    counted = math.ceil(num_bytes / REQUEST_BYTES_PER_TOKEN) if num_tokens is None else num_tokens
    return min(counted, record.max_model_len or counted)


def _per_token(num_logprobs: int | None) -> int:
    return 0 if num_logprobs is None else 1 + num_logprobs
