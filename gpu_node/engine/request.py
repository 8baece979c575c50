"""A request inside the engine: validation, its choices and its usage."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from penstock.contract.errors import PromptTooLongError, RequestError
from penstock.contract.job import MAX_TOKENS_LIMIT, Priority, SamplingParams
from penstock.contract.logprobs import MAX_LOGPROBS_OF_JOB, TokenLogprobs
from penstock.contract.output import Usage
from penstock.gpu_node.engine.logprobs import prompt_records
from penstock.gpu_node.engine.prompt_scores import PromptScores
from penstock.gpu_node.engine.records import EngineRequest, ResumedChoice, StepOutput
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.structured.compiler import GrammarCompiler
from penstock.gpu_node.engine.structured.guide import Guide
from penstock.gpu_node.engine.text.choice_output import ChoiceOutput
from penstock.gpu_node.engine.text.end_rule import EndRule
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.model.protocol import Adapter, LoadedModel


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits that requests are checked against."""

    vocab_size: int
    max_model_len: int
    bound_by: str
    """Explanation of `max_model_len` for error messages."""
    eos_token_ids: frozenset[int]


@dataclass(slots=True)
class LiveChoice:
    """A choice that is still generated. `unlogged_text` is text that an earlier node generated but did not log."""

    request: LiveRequest
    seq: Sequence
    output: ChoiceOutput
    guide: Guide | None = None
    """Constrains its output to a grammar."""
    unlogged_text: str = ""

    def step_output(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        prompt_logprobs: tuple[TokenLogprobs, ...],
        usage: Usage | None,
    ) -> StepOutput:
        """Return the output of a step, with the text that its tokens completed."""
        text, self.unlogged_text = self.unlogged_text + self.output.take_text(), ""
        is_failed = self.output.finish_reason == "error"
        return StepOutput(
            request_id=self.request.asked.request_id,
            choice=self.seq.choice,
            position=self.output.num_tokens - len(token_ids),
            token_ids=token_ids,
            text=text,
            finish_reason=self.output.finish_reason,
            usage=usage,
            kv_token_ms=self.seq.kv_token_ms,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            error=self.guide.failure if is_failed and self.guide is not None else None,
        )


@dataclass(slots=True)
class LiveRequest:
    """A request in the engine; a choice leaves `live` when it ends."""

    asked: EngineRequest
    root_hash: bytes
    """Parent of the first block's hash."""
    adapter: Adapter | None = None
    completion_tokens: int = 0
    live: dict[int, LiveChoice] = field(default_factory=dict)
    first: Sequence | None = None
    """The choice that computes the prompt for the others; its prefix hits are the request's."""
    prompt_scores: PromptScores | None = None
    """Log-probabilities of the prompt, until they are output."""

    def open(self, limits: RequestLimits, tokenizer: Tokenizer, guides: GrammarCompiler) -> None:
        """Create the choices that are not finished yet.

        Raises RequestError for a log that does not fit the request, or for a grammar that is not supported.
        """
        params, resume = self.asked.params, self.asked.resume
        num_logprobs = params.prompt_logprobs
        # A log has them before all tokens, so logged tokens prove that they were output.
        if num_logprobs is not None and not any(choice.token_ids for choice in resume):
            self.prompt_scores = PromptScores(self.asked.prompt_token_ids, num_logprobs)
        bad_words = _bad_words(params, limits, tokenizer)
        for choice in range(params.n):
            resumed = resume[choice] if choice < len(resume) else ResumedChoice((), "", None)
            self.completion_tokens += len(resumed.token_ids)
            if resumed.finish_reason is None:
                opened = self.live[choice] = open_choice(self, choice, resumed, limits, tokenizer)
                opened.seq.bad_words = bad_words
                opened.guide = _guide_of(self.asked, resumed, guides)
        self.first = next((choice.seq for choice in self.live.values()), None)

    def take_prompt_logprobs(self, tokenizer: Tokenizer) -> tuple[TokenLogprobs, ...]:
        """Return the prompt's log-probabilities once, when all are known."""
        if self.prompt_scores is None or not self.prompt_scores.is_complete:
            return ()
        scores, self.prompt_scores = self.prompt_scores, None
        return prompt_records(self.asked.prompt_token_ids, scores, tokenizer)

    def usage(self) -> Usage:
        """Return the token usage so far, over all choices; the prompt counts once."""
        cached_tokens = self.first.cached_tokens if self.first is not None else None
        return Usage(len(self.asked.prompt_token_ids), self.completion_tokens, cached_tokens or 0)


def request_limits(model: LoadedModel, eos_token_ids: frozenset[int], block_size: int) -> RequestLimits:
    """Return the limits of a loaded model; `eos_token_ids` are the tokenizer's."""
    sizes = model.runner.cache_sizes
    num_kv_tokens, num_swap_tokens = sizes.num_device_blocks * block_size, sizes.num_host_blocks * block_size
    bound_by = "the model's context"
    # A sequence that both pools together cannot hold alone could never finish.
    if num_kv_tokens + num_swap_tokens < model.max_model_len:
        bound_by = f"the KV cache holds {num_kv_tokens} tokens, the swap space {num_swap_tokens}"
    return RequestLimits(
        vocab_size=model.vocab_size,
        max_model_len=min(model.max_model_len, num_kv_tokens + num_swap_tokens),
        bound_by=bound_by,
        # Model files may list end tokens for which the model has no logit.
        eos_token_ids=frozenset(one for one in model.eos_token_ids | eos_token_ids if 0 <= one < model.vocab_size),
    )


def check_request(request: EngineRequest, limits: RequestLimits) -> None:
    """Refuse a request that the engine cannot run; the error names field and limit.

    Raises PromptTooLongError if the prompt, or prompt and `max_tokens`, exceed the context; RequestError for the rest.
    """
    _check_prompt(request.prompt_token_ids, request.params, limits)
    _check_logprobs(request.prompt_token_ids, request.params)
    _check_tokens(request.prompt_token_ids, request.params, limits)
    _check_resume(request.resume, request.params, limits)
    if request.priority not in set(Priority):
        raise RequestError(f"priority is {request.priority}, but must be 0, 1 or 2", param="priority")
    if not 0 < request.weight < math.inf:
        raise RequestError(f"weight is {request.weight}, but must be finite and above 0", param="weight")


def truncated(token_ids: list[int], params: SamplingParams) -> list[int]:
    """Return the tokens of a prompt that the request keeps: the last `truncate_prompt_tokens`, or all."""
    limit = params.truncate_prompt_tokens
    return token_ids if limit is None else token_ids[-limit:]


def _check_prompt(prompt: Items[int], params: SamplingParams, limits: RequestLimits) -> None:
    """Refuse a request longer than the context."""
    if not prompt:
        raise RequestError("prompt must have at least one token", param="prompt")
    if len(prompt) + 1 > limits.max_model_len:
        raise PromptTooLongError(
            f"This model's maximum context length is {limits.max_model_len} tokens, with at least one to generate; "
            f"the prompt has {len(prompt)} tokens. Limit: {limits.bound_by}",
            param="prompt",
        )
    if params.max_tokens is not None and len(prompt) + params.max_tokens > limits.max_model_len:
        raise PromptTooLongError(
            f"This model's maximum context length is {limits.max_model_len} tokens; the prompt ({len(prompt)} tokens) "
            f"and max_tokens ({params.max_tokens}) exceed it together. Limit: {limits.bound_by}",
            param="max_tokens",
        )
    if len(prompt) + params.min_tokens > limits.max_model_len:
        raise PromptTooLongError(
            f"This model's maximum context length is {limits.max_model_len} tokens; the prompt ({len(prompt)} tokens) "
            f"and min_tokens ({params.min_tokens}) exceed it together. Limit: {limits.bound_by}",
            param="min_tokens",
        )


def _check_tokens(prompt: Items[int], params: SamplingParams, limits: RequestLimits) -> None:
    """Refuse token ids outside the vocabulary."""
    fields = (("prompt", prompt), ("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias))
    for name, token_ids in fields:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limits.vocab_size:
            raise RequestError(f"{name} has a token id outside the vocabulary of {limits.vocab_size}", param=name)


def _check_logprobs(prompt: Items[int], params: SamplingParams) -> None:
    """Refuse more log-probabilities than a result can hold."""
    limit = _max_tokens_with_logprobs(prompt, params)
    name = "prompt_logprobs" if params.logprobs is None else "logprobs"
    if limit < (params.max_tokens or max(1, params.min_tokens)):
        raise RequestError(
            f"{name}: at most {MAX_LOGPROBS_OF_JOB} values in all, those of the prompt and of the tokens themselves "
            f"included, allow {max(0, limit)} tokens for each choice",
            param=name,
        )


def _max_tokens_with_logprobs(prompt: Items[int], params: SamplingParams) -> int:
    """Return how many tokens each choice may have before the log-probabilities exceed the size of a result."""
    of_prompt = 0 if params.prompt_logprobs is None else len(prompt) * (1 + params.prompt_logprobs)
    left = MAX_LOGPROBS_OF_JOB - of_prompt
    if params.logprobs is None:
        return MAX_TOKENS_LIMIT if left >= 0 else 0
    return left // (params.n * (1 + params.logprobs))


def _check_resume(resume: Items[ResumedChoice], params: SamplingParams, limits: RequestLimits) -> None:
    """Refuse a log that this model cannot have written for this request."""
    if len(resume) > params.n:
        raise RequestError(f"resume has {len(resume)} choices, but n is {params.n}", param="resume")
    for choice in resume:
        if any(not 0 <= token_id < limits.vocab_size for token_id in choice.token_ids):
            raise RequestError("a logged token id is outside the vocabulary", param="resume")


def _guide_of(asked: EngineRequest, resumed: ResumedChoice, guides: GrammarCompiler) -> Guide | None:
    """Return the grammar guide of a choice, advanced by its logged tokens.

    If these tokens do not match the grammar, the choice ends with an error at its first mask.
    """
    if asked.params.structured_outputs is None:
        return None
    guide = guides.new_guide(asked.params.structured_outputs, asked.tenant)
    guide.take(guide.new_tokens_of(np.array(resumed.token_ids, dtype=np.int32)))
    return guide


def _bad_words(params: SamplingParams, limits: RequestLimits, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of the bad words, without those that have tokens outside the model's vocabulary."""
    sequences = (sequence for word in params.bad_words for sequence in tokenizer.encode_word(word))
    return tuple(sequence for sequence in sequences if max(sequence) < limits.vocab_size)


def open_choice(
    request: LiveRequest, choice: int, resumed: ResumedChoice, limits: RequestLimits, tokenizer: Tokenizer
) -> LiveChoice:
    """Create a choice in the state that an earlier node logged: tokens, text and partial stop strings.

    Raises RequestError when the logged text does not match the logged tokens.
    """
    asked, params = request.asked, request.asked.params
    end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else limits.eos_token_ids)
    limit = min(
        limits.max_model_len - len(asked.prompt_token_ids), _max_tokens_with_logprobs(asked.prompt_token_ids, params)
    )
    max_tokens = limit if params.max_tokens is None else min(limit, params.max_tokens)
    rule = EndRule(end_ids, params.min_tokens, max_tokens)
    includes_stop = params.include_stop_str_in_output
    output = ChoiceOutput(rule, params.stop, tokenizer.new_detokenizer(), includes_stop=includes_stop)
    for token_id in resumed.token_ids:
        if output.finish_reason is not None:
            raise RequestError(f"choice {choice} has logged tokens after its end", param="resume")
        output.push(token_id)
    text = output.take_text()
    if not text.startswith(resumed.text):
        raise RequestError(f"the logged text of choice {choice} does not match its tokens", param="resume")
    seq = Sequence(
        request_id=asked.request_id,
        choice=choice,
        params=params,
        seed=asked.seed,
        token_ids=np.array((*asked.prompt_token_ids, *resumed.token_ids), dtype=np.int32),
        num_prompt_tokens=len(asked.prompt_token_ids),
        end_rule=rule,
        root_hash=request.root_hash,
        tenant=asked.tenant,
        weight=asked.weight,
        priority=asked.priority,
        urgency=asked.priority,
        adapter=request.adapter,
        prompt_scores=request.prompt_scores,
    )
    return LiveChoice(request, seq, output, unlogged_text=text[len(resumed.text) :])
