"""Estimates of jobs: output lengths, KV tokens, tokens of a rate, and bytes; and how long nodes take for a cost.

Only estimates: scripts/submit.lua decides whether a job is accepted, because limits hold across processes. Clients and
gateways estimate a job before it is queued. Nodes learn the lengths of outputs and report them (`LengthPredictor`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.contract.errors import PromptTooLongError
from penstock.contract.job import MAX_TOKENS_LIMIT, PREDICTED_OUTPUT_TOKENS, JobDef
from penstock.contract.output import UNKNOWN_WAIT, WaitEstimate
from penstock.contract.pool import NodePressure, PoolRecord
from penstock.contract.tasks import Score, TextTask

OUTPUT_BYTES_PER_TOKEN = 110
"""The most bytes of log and result per token, without log-probabilities. A chunk of one token takes 96."""
RESULT_BYTES = 512
"""Bytes of log and result that do not depend on the number of tokens."""
BYTES_PER_LOGPROB = 14
"""Bytes of a log-probability in a log: id, value, and a text of a few bytes."""
REQUEST_BYTES_PER_TOKEN = 3
"""Assumed bytes of a request per prompt token, for text and for token ids."""
TASK_BYTES_PER_COST = 1_024
"""Bytes of a task's prompt that count as one KV token of cost. A node tokenizes about as many in 0.1 ms."""
TEMPLATE_TOKENS = 64
"""Tokens that a chat template or a tokenizer may add to a text, beside those that count for the bytes of the roles."""
TOOLS_TEMPLATE_TOKENS = 256
"""Tokens that a chat template may add for a call with tools, beside those of the tools."""
BYTES_PER_ID = 4
TASK_RESULT_BYTES = 4
"""Assumed bytes of a task's result per byte of its request: token ids, and the tokens' strings."""
EMBEDDING_BYTES = 16 << 10
"""Assumed size of an embedding in bytes: a hidden state with 4096 numbers."""
ROW_BYTES = 4 << 10
"""The same for each further text of a job, which only encoders take: 1024 numbers."""


def num_prompt_ids(job: JobDef) -> int | None:
    """Return the number of token ids of a prompt of token ids; None for text."""
    if job.packed_prompt is not None:
        return job.packed_prompt.num_tokens
    return None if job.prompt_token_ids is None else len(job.prompt_token_ids)


def prompt_bytes(job: JobDef) -> int:
    """Return the UTF-8 bytes of a text prompt or chat, roles and reasoning included; 0 for a prompt of token ids."""
    if job.packed_prompt is not None:
        return job.packed_prompt.num_text_bytes
    if job.prompt is not None:
        return len(job.prompt.encode())
    return sum(len(m.content.encode()) + len(m.reasoning.encode()) + len(m.role) for m in job.messages or ())


def call_bytes(job: JobDef) -> int:
    """Return the bytes of the names and arguments of a chat's earlier tool calls."""
    if job.packed_prompt is not None:
        return job.packed_prompt.num_tool_bytes
    calls = (call for message in job.messages or () for call in message.tool_calls)
    return sum(len(call.name) + len(call.arguments) for call in calls)


def tool_bytes(job: JobDef) -> int:
    """Return the bytes of a chat's tools and earlier calls. The chat template may render them longer or shorter."""
    return len(job.tools or "") + call_bytes(job)


def _num_rows(task: TextTask) -> int:
    """Return how many texts, or pairs, a task has."""
    return len(task.texts) if isinstance(task, Score) else 1 + len(task.texts)


def _texts_cost(task: TextTask, num_prompt_tokens: int) -> int:
    """Return the tokens that all texts of a task probably have. Each pair of a `Score` has the prompt's too."""
    sizes = [_tokens_of(text) for text in task.texts]
    if task.truncate_prompt_tokens is not None and task.truncate_prompt_tokens > 0:
        sizes = [min(size, task.truncate_prompt_tokens) for size in sizes]
    return sum(sizes) + num_prompt_tokens * (len(sizes) if isinstance(task, Score) else 1)


def _tokens_of(text: str | tuple[int, ...]) -> int:
    """Return the tokens of a text: exact for token ids, estimated for text."""
    return math.ceil(len(text.encode()) / REQUEST_BYTES_PER_TOKEN) if isinstance(text, str) else len(text)


def _most_of(text: str | tuple[int, ...]) -> int:
    """Return the most tokens that a text may have: a byte of it is at most one token."""
    return len(text.encode()) + TEMPLATE_TOKENS if isinstance(text, str) else len(text)


def predict_output(nodes: Sequence[NodePressure], num_prompt_tokens: int, max_tokens: int) -> int:
    """Return the output tokens that a choice will probably not exceed, from lengths that these nodes measured lately.

    Requests are compared by the bit lengths of `num_prompt_tokens` and `max_tokens`.
    """
    kind = (num_prompt_tokens.bit_length(), max_tokens.bit_length())
    known = [tokens for node in nodes for *of_kind, tokens in node.predicted_outputs if tuple(of_kind) == kind]
    return min(max_tokens, max(known, default=PREDICTED_OUTPUT_TOKENS))


def estimate_cost(job: JobDef, record: PoolRecord, nodes: Sequence[NodePressure] = ()) -> int:
    """Return the KV tokens that a job will probably hold at its end. The node corrects this after tokenizing.

    `nodes` report the lengths of recent outputs. A task holds no KV tokens. Its cost stands for its other work, so that
    limits, fair shares and admission count it. Raises PromptTooLongError if the prompt exceeds the model's context
    even at the highest possible bytes per token.
    """
    num_ids = num_prompt_ids(job)
    if job.num_sequences == 0:
        size = prompt_bytes(job) + tool_bytes(job) + BYTES_PER_ID * (num_ids or 0)
        return 1 + size // TASK_BYTES_PER_COST
    if num_ids is not None:
        prompt = num_ids
    else:
        prompt = math.ceil((prompt_bytes(job) + tool_bytes(job)) / REQUEST_BYTES_PER_TOKEN)
    params = job.sampling
    if params.truncate_prompt_tokens is not None:
        prompt = min(prompt, params.truncate_prompt_tokens)
    _require_fit(job, record)
    if isinstance(job.task, TextTask):
        cost = _texts_cost(job.task, prompt) + params.num_sequences
        return max(1, min(cost, record.max_model_len * _num_rows(job.task)) if record.max_model_len else cost)
    cost = prompt + params.num_sequences * predict_output(nodes, prompt, params.max_tokens or MAX_TOKENS_LIMIT)
    return max(1, min(cost, record.max_model_len * params.num_sequences) if record.max_model_len else cost)


def _require_fit(job: JobDef, record: PoolRecord) -> None:
    """Raise PromptTooLongError if a text exceeds the model's context even if all of its tokens are the longest ones."""
    limit, cut = record.max_model_len, job.sampling.truncate_prompt_tokens
    if not limit or (cut is not None and record.texts_per_job > 1):
        # An encoder cuts what it may cut to what the model takes.
        return
    most_bytes, is_generated = record.max_token_bytes, job.task is None
    for name, num_ids, num_bytes in _sizes_of_texts(job):
        least = num_ids if num_ids is not None else math.ceil(num_bytes / most_bytes) if most_bytes else 0
        least = least if cut is None else min(least, cut)
        # Only generated text needs space for a token after the prompt.
        if least + is_generated > limit:
            counted = f"{least}" if num_ids is not None else f"at least {least}"
            raise PromptTooLongError(
                f"This model's maximum context length is {limit} tokens"
                f"{', with at least one to generate' if is_generated else ''}; the prompt has {counted} tokens",
                param=name,
            )


def _sizes_of_texts(job: JobDef) -> Iterator[tuple[str, int | None, int]]:
    """Yield the field of each text of a job, its number of token ids (None for text), and its bytes."""
    task = job.task if isinstance(job.task, TextTask) and job.task.texts else None
    has_number = task is not None and not isinstance(task, Score)
    yield f"prompt[{task.index_of(0)}]" if task and has_number else "prompt", num_prompt_ids(job), prompt_bytes(job)
    for at, text in enumerate(task.texts if task else (), int(has_number)):
        name = f"prompt[{task.index_of(at)}]" if task else "prompt"
        yield (name, None, len(text.encode())) if isinstance(text, str) else (name, len(text), 0)


class RateTokens(NamedTuple):
    """What a job counts for its tenant's token rate."""

    prompt: int
    num_choices: int
    """0 for a job without generated text."""
    max_output: int
    """The most tokens of a choice; 0 if the caller names no limit."""
    may_use: int
    """The most tokens of the prompt and of all choices."""


def rate_tokens(job: JobDef, max_model_len: int = 0) -> RateTokens:
    """Return what a job counts for its tenant's token rate. submit.lua knows the tenant's own lengths.

    `max_model_len` is the model's context in tokens; 0: unknown.
    """
    num_ids, num_bytes = num_prompt_ids(job), prompt_bytes(job) + tool_bytes(job)
    prompt = num_ids if num_ids is not None else math.ceil(num_bytes / REQUEST_BYTES_PER_TOKEN)
    # A byte of text is at most one token.
    most = num_ids if num_ids is not None else num_bytes + TEMPLATE_TOKENS + (TOOLS_TEMPLATE_TOKENS if job.tools else 0)
    params, max_output = job.sampling, _max_output(job) or 0
    if params.truncate_prompt_tokens is not None:
        most = min(most, params.truncate_prompt_tokens)
    if isinstance(job.task, TextTask):
        size = _num_rows(job.task) if isinstance(job.task, Score) else 1
        most = size * most + sum(_most_of(text) for text in job.task.texts)
        limit = max_model_len * _num_rows(job.task)
        return RateTokens(_texts_cost(job.task, prompt), 0, 0, max(1, min(most, limit or most)))
    if job.task is not None:
        return RateTokens(prompt, 0, 0, max(1, min(most, max_model_len or most)))
    num_choices = params.num_sequences
    may_use = _most_tokens(num_ids or 0, most, num_choices, max_output or MAX_TOKENS_LIMIT, max_model_len)
    return RateTokens(prompt, num_choices, max_output, may_use)


def _most_tokens(fewest_prompt: int, most_prompt: int, n: int, max_output: int, max_model_len: int) -> int:
    """Return the most tokens of a prompt of a length in this interval, and of `n` choices after it.

    A longer prompt leaves each choice less of the context. So the sum is highest where the prompt and `max_output` just
    fill the context, or at the end of the interval that is closest to that.
    """
    if not max_model_len:
        return most_prompt + n * max_output
    prompt = min(most_prompt, max(fewest_prompt, max_model_len - max_output))
    return prompt + n * max(0, min(max_output, max_model_len - prompt))


def _max_output(job: JobDef) -> int | None:
    """Return the most tokens of a choice before the prompt is tokenized, or None if the caller names no limit."""
    max_tokens, max_total = job.sampling.max_tokens, job.max_total_tokens
    return max_tokens if max_tokens is None or max_total is None else min(max_tokens, max_total)


def estimate_output_bytes(job: JobDef, request_bytes: int) -> int:
    """Return the bytes of log and result that a job may write to Redis; those predicted without max_tokens."""
    if job.num_sequences == 0:
        return request_bytes * TASK_RESULT_BYTES + RESULT_BYTES
    if job.task is not None:
        further = len(job.task.texts) if isinstance(job.task, TextTask) else 0
        return EMBEDDING_BYTES + further * ROW_BYTES + RESULT_BYTES
    params = job.params
    max_output = _max_output(job)
    output = PREDICTED_OUTPUT_TOKENS if max_output is None else max_output
    token_bytes = OUTPUT_BYTES_PER_TOKEN + 2 * _logprob_bytes(params.logprobs)
    # The ids of a prompt's tokens are stored as log-probabilities without values.
    num_of_prompt = 0 if params.return_token_ids and params.prompt_logprobs is None else params.prompt_logprobs
    of_prompt = request_bytes // REQUEST_BYTES_PER_TOKEN * 2 * _logprob_bytes(num_of_prompt)
    return RESULT_BYTES + params.n * output * token_bytes + of_prompt


def _logprob_bytes(num_logprobs: int | None) -> int:
    """Return the log bytes of one token's log-probabilities, with this number of alternatives; None: not requested."""
    return 0 if num_logprobs is None else (1 + num_logprobs) * BYTES_PER_LOGPROB


class Ahead(NamedTuple):
    """The queued jobs that start before a job: their number, and their predicted KV tokens by kind of work."""

    num_jobs: int
    foreground_cost: float
    background_cost: float = 0.0


_UNKNOWN_SPREAD = 0.5
"""Standard error of the logarithm of a pace, for a node that reports none."""


def expected_wait(nodes: Sequence[NodePressure], ahead: Ahead, *, is_background: bool) -> WaitEstimate:
    """Return how long a job waits: until the nodes have completed what is ahead, and one of the jobs that they hold."""
    live = [node for node in nodes if not node.draining]
    rates = [_rate_of(node, is_background=is_background) for node in live]
    held = mean_held_cost(nodes)
    foreground = ahead.foreground_cost + (0.0 if is_background else held)
    background = ahead.background_cost + (held if is_background else 0.0)
    seconds = drain_s(live, foreground, background)
    if seconds is None or not any(rates):
        return UNKNOWN_WAIT
    spreads = (_spread_of(node, is_background=is_background) for node in live)
    spread = sum(rate * of_node for rate, of_node in zip(rates, spreads, strict=True)) / sum(rates)
    return WaitEstimate.of(1000 * seconds, spread_with_jobs(spread, ahead.num_jobs))


def spread_with_jobs(pace_spread: float, num_jobs: int) -> float:
    """Return the standard error of a wait's logarithm: that of the pace, and that of this many jobs' lengths."""
    return math.sqrt(pace_spread**2 + 0.5 / (1 + num_jobs))


def drain_s(nodes: Sequence[NodePressure], foreground_cost: float, background_cost: float = 0.0) -> float | None:
    """Return the seconds in which the nodes complete jobs of these costs; None if a pace is needed and unknown."""
    seconds = 0.0
    for cost, is_background in ((foreground_cost, False), (background_cost, True)):
        if cost <= 0:
            continue
        rate = sum(_rate_of(node, is_background=is_background) for node in nodes if not node.draining)
        if rate <= 0:
            return None
        seconds += cost / rate
    return seconds


def _rate_of(node: NodePressure, *, is_background: bool) -> float:
    return (node.background_cost_per_s if is_background else 0.0) or node.drain_cost_per_s


def _spread_of(node: NodePressure, *, is_background: bool) -> float:
    return node.pace_spreads[is_background] if len(node.pace_spreads) > is_background else _UNKNOWN_SPREAD


def mean_held_cost(nodes: Sequence[NodePressure]) -> float:
    """Return the mean cost of the jobs that these nodes hold, in KV tokens; 0 if they hold none."""
    held = sum(max(0, node.kv_blocks_total * node.block_size - node.kv_tokens_available) for node in nodes)
    return held / max(1, sum(node.num_jobs for node in nodes))


# How long a token of cost is held, and lengths of outputs, as nodes learn them.

HOLD_MS = 1000.0
"""Expected time for which a KV token of a job's cost is held, in ms, before any job has ended."""
_HOLD_WEIGHT = 0.05


def learned_hold_ms(hold_ms: float, kv_token_ms: float, cost: int) -> float:
    """Return the updated moving average of the time for which a KV token of cost is held, in ms.

    `kv_token_ms` is the KV tokens × milliseconds that a job with predicted `cost` has held.
    """
    return hold_ms + _HOLD_WEIGHT * (kv_token_ms / max(1, cost) - hold_ms)


WINDOW = 128
"""Outputs remembered per group."""
MAX_GROUPS = 1024
"""Groups remembered; the least recently used one is dropped first."""
MAX_REPORTED = 32
"""Kinds of jobs whose predictions a node reports in its pressure record."""
STEP = 0.03
"""How far a wrong prediction moves the level: after 1,000 predictions the coverage is within 3.3 points of nominal."""


class LengthPredictor:
    """Predicts the output tokens of a choice: a quantile of recent outputs, for each tenant and class of prompt.

    Each process starts without data. The last outputs of a group, kept sorted, give exact quantiles and forget old
    behavior. Of n lengths, take the k-th smallest, with k = ceil(level × (n + 1)). While lengths are exchangeable, it
    is at least as long as the next output with probability `level`.

    Lengths are not exchangeable, because short outputs end first and habits change. So each prediction corrects the
    level: up if it was too short, down a little if not. Then, for any lengths, the share of T predictions that held is
    within 1 / (STEP × T) of the nominal one: adaptive conformal inference (Gibbs and Candès, 2021).
    """

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        # Keyed by tenant: (tenant, classes of lengths); '' is the sum over all tenants.
        self._windows: OrderedDict[tuple[str, int, int], _Window] = OrderedDict()

    def predict(self, tenant: str, num_prompt_tokens: int, max_tokens: int) -> int | None:
        """Return a length, at most `max_tokens`, that a new choice will probably not exceed; None without data."""
        for group in _groups(tenant, num_prompt_tokens, max_tokens):
            window = self._windows.get(group)
            length = window.predict() if window is not None else None
            if length is not None:
                return min(length, max_tokens)
        return None

    def remaining(self, tenant: str, num_prompt_tokens: int, max_tokens: int, num_output_tokens: int) -> int:
        """Return how many more tokens a choice with `num_output_tokens` will probably have; at least 1.

        The estimate is the quantile of those earlier outputs that were longer. So it shrinks by one with each token,
        and grows once the choice is longer than they. Without longer ones, it assumes PREDICTED_OUTPUT_TOKENS in all; a
        choice that is longer than that counts as halfway.
        """
        limit = max(1, max_tokens - num_output_tokens)
        for group in _groups(tenant, num_prompt_tokens, max_tokens):
            window = self._windows.get(group)
            length = window.predict_longer_than(num_output_tokens) if window is not None else None
            if length is not None:
                return min(length - num_output_tokens, limit)
        unknown = PREDICTED_OUTPUT_TOKENS - num_output_tokens
        return min(unknown if unknown > 0 else num_output_tokens, limit)

    def of_all_tenants(self) -> tuple[tuple[int, int, int], ...]:
        """Return (bits of prompt tokens, bits of `max_tokens`, prediction) of the kinds that ended last."""
        wide = [(prompt, limit, window.predict()) for (of, prompt, limit), window in self._windows.items() if not of]
        known = [(prompt, limit, length) for prompt, limit, length in wide if length is not None]
        return tuple(known[-MAX_REPORTED:])

    def ended(
        self, tenant: str, num_prompt_tokens: int, max_tokens: int, num_output_tokens: int, predicted: int
    ) -> None:
        """Learn from a choice that ended by itself or by its limit, and from its prediction. Canceled choices do not
        count.
        """
        for group in _groups(tenant, num_prompt_tokens, max_tokens):
            window = self._windows.setdefault(group, _Window(self._quantile))
            self._windows.move_to_end(group)
            window.add(num_output_tokens)
            window.level += STEP * (self._quantile - (num_output_tokens <= predicted))
        while len(self._windows) > MAX_GROUPS:
            self._windows.popitem(last=False)


class _Window:
    """The last outputs of one group, by time and by length."""

    def __init__(self, level: float) -> None:
        self.level = level
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        if len(self._recent) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(length)
        insort(self._sorted, length)

    def predict(self) -> int | None:
        """Return the length at the current level; None without enough outputs."""
        rank = max(1, math.ceil(self.level * (len(self._sorted) + 1)))
        return self._sorted[rank - 1] if rank <= len(self._sorted) else None

    def predict_longer_than(self, length: int) -> int | None:
        """Return the length at the current level among the longer outputs; None without such outputs."""
        longer = len(self._sorted) - bisect_right(self._sorted, length)
        rank = min(longer, max(1, math.ceil(self.level * (longer + 1))))
        return self._sorted[rank - longer - 1] if longer else None


def _groups(tenant: str, num_prompt_tokens: int, max_tokens: int) -> tuple[tuple[str, int, int], ...]:
    """Return the groups of earlier outputs that a choice belongs to, from narrow to wide.

    Limits are part of the class because they cut outputs off. '' stands for all tenants, because no tenant has that
    name.
    """
    prompt_class, limit_class = num_prompt_tokens.bit_length(), max_tokens.bit_length()
    return (tenant, prompt_class, limit_class), ("", prompt_class, limit_class)
