"""Admission: from the pool's pressure and backlog to accept, come back later, or no.

Pure functions, used by client and gateway alike; caps that must hold across processes stand behind them in submit.lua.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.contract.errors import BusyError, PromptTooLongError, UnavailableError
from penstock.contract.job import MAX_TOKENS_LIMIT, Job
from penstock.queue.prompts import call_bytes, num_prompt_ids, prompt_bytes
from penstock.queue.wire import NodePressure, PoolPressure, PoolRecord

PREDICTED_OUTPUT_TOKENS = 256
"""Output assumed of each choice, or max_tokens if that is less, until nodes know better."""
JOB_BYTES = 2_048
"""What a job takes in Redis beside its request, its log and its result."""
LOG_BYTES_PER_TOKEN = 45
"""A token of a log takes 96 bytes when it comes alone and 30 when four come together; few jobs write all they may."""
BYTES_PER_LOGPROB = 14
"""In a log: id, value, and a text of a few bytes."""
REQUEST_BYTES_PER_TOKEN = 3
"""Of a prompt, as text or as ids."""
MAX_WAIT_MS = 60_000
"""A job that would wait longer than this for its turn is told to come back."""
MIN_RETRY_AFTER_MS = 1_000


def tool_bytes(job: Job) -> int:
    """Bytes of a chat's tools and calls, which its template may write in another way, longer or shorter."""
    return len(job.tools or "") + call_bytes(job)


def predict_output(nodes: Sequence[NodePressure], num_prompt_tokens: int, max_tokens: int) -> int:
    """Tokens that a choice will probably not exceed, from what ended lately on these nodes."""
    kind = (num_prompt_tokens.bit_length(), max_tokens.bit_length())
    known = [tokens for node in nodes for *of_kind, tokens in node.predicted_outputs if tuple(of_kind) == kind]
    return min(max_tokens, max(known, default=PREDICTED_OUTPUT_TOKENS))


def estimate_cost(job: Job, record: PoolRecord, nodes: Sequence[NodePressure] = ()) -> int:
    """KV tokens that a job will probably hold at its end; the node corrects it after tokenizing.

    `nodes` tell how long outputs of its kind were lately.
    Raises PromptTooLongError when the prompt cannot fit the model whatever its tokens are.
    """
    num_ids = num_prompt_ids(job)
    if num_ids is not None:
        prompt = fewest = num_ids
    else:
        size = prompt_bytes(job)
        prompt = math.ceil((size + tool_bytes(job)) / record.bytes_per_token)
        fewest = math.ceil(size / record.max_token_bytes) if record.max_token_bytes else 0
    if record.max_model_len and fewest >= record.max_model_len:
        counted = f"{fewest}" if num_ids is not None else f"at least {fewest}"
        raise PromptTooLongError(
            f"prompt has {counted} tokens; the model's limit is {record.max_model_len} with at least one of output",
            param="prompt",
        )
    params = job.params
    cost = prompt + params.n * predict_output(nodes, prompt, params.max_tokens or MAX_TOKENS_LIMIT)
    return max(1, min(cost, record.max_model_len * params.n) if record.max_model_len else cost)


def estimate_bytes(job: Job, request_bytes: int) -> int:
    """Bytes that a job may come to hold in Redis: its request, its record, and a log of all the tokens it may have."""
    params = job.params
    output = params.max_tokens if params.max_tokens is not None else PREDICTED_OUTPUT_TOKENS
    token_bytes = LOG_BYTES_PER_TOKEN + _logprob_bytes(params.logprobs)
    of_prompt = request_bytes // REQUEST_BYTES_PER_TOKEN * _logprob_bytes(params.prompt_logprobs)
    return request_bytes + JOB_BYTES + params.n * output * token_bytes + of_prompt


def _logprob_bytes(num_logprobs: int | None) -> int:
    """What is said of a token beside it, with so many alternatives."""
    return 0 if num_logprobs is None else (1 + num_logprobs) * BYTES_PER_LOGPROB


def decide(pressure: PoolPressure, *, cost: int, priority: int, admitted_since: int = 0) -> None:
    """Accept by returning; else raise BusyError with an honest wait, or UnavailableError when no node is alive.

    The wait is what stands before the job, less what the nodes can hold at once, over the rate at which they drain.
    `admitted_since` is the cost this process has admitted since the pressure was read.
    """
    nodes = [n for n in pressure.nodes if not n.draining]
    if not nodes:
        raise UnavailableError("no node serves this pool at the moment", code="no_node")
    room = sum(n.kv_tokens_unclaimed for n in nodes)
    ahead = sum(pressure.backlog_cost[: priority + 1]) + admitted_since + cost - room
    rate = sum(n.drain_cost_per_s for n in nodes)
    if ahead <= 0 or rate <= 0:
        return
    wait_ms = math.ceil(1000 * ahead / rate)
    if wait_ms > MAX_WAIT_MS:
        raise BusyError(
            f"about {wait_ms // 1000} s of work stand before this job, more than {MAX_WAIT_MS // 1000} s",
            retry_after_ms=max(MIN_RETRY_AFTER_MS, wait_ms - MAX_WAIT_MS),
        )
