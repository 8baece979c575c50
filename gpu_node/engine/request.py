"""A request inside the engine: its choices, its usage, and what it reports of its prompt."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import RequestError
from penstock.contract.output import TokenLogprobs, Usage
from penstock.contract.sampling import SamplingParams
from penstock.gpu_node.engine.pair_scores import ScoredPrompt
from penstock.gpu_node.engine.prompt_tokens import prompt_records
from penstock.gpu_node.engine.records import EngineRequest, Prepared, ResumedChoice, StepOutput
from penstock.gpu_node.engine.sequence import PooledPrompt, PromptScores, Sequence
from penstock.gpu_node.engine.served_model import RequestLimits, max_tokens_of_beams, max_tokens_with_logprobs
from penstock.gpu_node.engine.structured.compiler import GrammarCompiler
from penstock.gpu_node.engine.structured.guide import Guide
from penstock.gpu_node.engine.text.output import ChoiceOutput, EndRule
from penstock.gpu_node.engine.text.reasoning import ReasoningRule, ReasoningState
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.engine.texts import TextResults
from penstock.gpu_node.model.protocol import FAILED_TOKEN, NO_LOGPROBS


@dataclass(slots=True)
class LiveChoice:
    """A choice that is still generated. `unlogged_text` is text that an earlier node generated but did not log."""

    request: LiveRequest
    seq: Sequence
    output: ChoiceOutput
    guide: Guide | None = None
    """Constrains its output to a grammar."""
    unlogged_text: str = ""
    reasoning: ReasoningState | None = None
    """Counts the tokens of its reasoning, if it may reason."""

    def push(self, token_id: int) -> None:
        """Add a sampled token. If the prompt is embedded, the choice ends without it."""
        pooled = self.request.pooled
        if token_id == FAILED_TOKEN or (pooled is not None and pooled.vector() is None):
            self.output.fail()
        elif pooled is not None:
            self.output.finish_reason = "stop"
        else:
            self.output.push(token_id)
            self.request.completion_tokens += 1
            if self.reasoning is not None and not self.reasoning.is_over:
                self._count(self.reasoning, token_id)

    def _count(self, reasoning: ReasoningState, token_id: int) -> None:
        num_before = reasoning.num_tokens
        reasoning.push((token_id,))
        self.request.reasoning_tokens += reasoning.num_tokens - num_before

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
            num_preemptions=self.seq.num_preemptions,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            embedding=self.request.embedding() if self.output.finish_reason == "stop" else b"",
            error=self.guide.failure if is_failed and self.guide is not None else None,
            texts=self.request.scored() if self.output.finish_reason == "stop" else None,
        )


MAX_LOSSES = 3
"""Lost steps of a request, without progress between them, after which it ends with an error."""
PROGRESS_TOKENS = 64
"""Output tokens that count as progress."""


@dataclass(slots=True)
class LiveRequest:
    """A request in the engine; a choice leaves `live` when it ends."""

    asked: EngineRequest
    root_hash: bytes
    """Parent of the first block's hash."""
    prepared: Prepared
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Those of the completion tokens that are reasoning."""
    live: dict[int, LiveChoice] = field(default_factory=dict)
    first: Sequence | None = None
    """The choice that computes the prompt for the others; its prefix hits are the request's."""
    prompt_scores: PromptScores | None = None
    """Log-probabilities of the prompt, until they are output."""
    pooled: PooledPrompt | None = None
    """The prompt's embedding."""
    num_losses: int = 0
    """Lost steps that it was in since it last made progress."""
    next_progress: int = PROGRESS_TOKENS
    """The output tokens at which it has made progress since the last lost step."""
    all_seqs: tuple[Sequence, ...] = ()
    """The sequences of all choices that it began with."""

    def open(self, limits: RequestLimits, tokenizer: Tokenizer, guides: GrammarCompiler) -> None:
        """Create the choices that are not finished yet.

        Raises RequestError for a log that does not fit the request, or for a grammar that is not supported.
        """
        params, resume = self.asked.params, self.asked.resume
        rule = self._reasoning_rule(limits)
        num_logprobs = params.prompt_logprobs
        # A log has them before all tokens, so logged tokens prove that they were output.
        if num_logprobs is not None and not any(choice.token_ids for choice in resume):
            self.prompt_scores = PromptScores(self.asked.prompt_token_ids, num_logprobs)
        self.pooled = self._pooled(limits)
        # Converting a long tuple takes milliseconds of the engine's thread, copying an array microseconds.
        prompt = np.array(self.asked.prompt_token_ids, dtype=np.int32)
        if params.withholds_output:
            if len(resume) == params.n and all(one.finish_reason is not None for one in resume):
                return
            resume = ()  # Choices are ranked when all are complete, so they begin anew.
        for choice in range(params.num_sequences):
            resumed = resume[choice] if choice < len(resume) else ResumedChoice((), "", None)
            self.completion_tokens += len(resumed.token_ids)
            reasoning = self._reasoning_of(rule, resumed)
            if resumed.finish_reason is None:
                opened = self.live[choice] = open_choice(self, choice, prompt, resumed, limits, tokenizer)
                opened.reasoning = reasoning
                opened.guide = _guide_of(self.prepared, params, resumed, guides, rule)
                if rule is not None and rule.budget is not None:
                    opened.seq.reasoning = ReasoningState(rule)
        self.all_seqs = tuple(choice.seq for choice in self.live.values())
        self.first = next(iter(self.all_seqs), None)
        if params.use_beam_search:
            beams = list(self.all_seqs)
            for seq in beams:
                seq.beams = beams

    def _pooled(self, limits: RequestLimits) -> PooledPrompt | None:
        """Return what becomes of the hidden states of the prompt; None for a request for text."""
        num_tokens = len(self.asked.prompt_token_ids)
        if (wanted := self.asked.embed) is not None:
            return PooledPrompt(num_tokens, wanted.pooling or limits.default_pooling, wanted.dimensions)
        if self.asked.score is not None and limits.pairs is not None:
            return ScoredPrompt(num_tokens, self.asked.score, limits.pairs)
        return None

    def _reasoning_rule(self, limits: RequestLimits) -> ReasoningRule | None:
        rule, budget = self.asked.reasoning, self.asked.params.reasoning_budget
        return None if rule is None else replace(rule, budget=budget, vocab_size=limits.vocab_size)

    def _reasoning_of(self, rule: ReasoningRule | None, resumed: ResumedChoice) -> ReasoningState | None:
        """Return the state of a choice after its logged tokens, which are counted."""
        if rule is None:
            return None
        state = ReasoningState(rule)
        state.push(resumed.token_ids)
        self.reasoning_tokens += state.num_tokens
        return state

    def note_loss(self) -> list[Sequence]:
        """Note that a step with this request was lost. Return its open sequences if they are to fail.

        After several lost steps, without progress between them, the request may be what ends the ranks.
        """
        self.num_losses = 0 if self.completion_tokens >= self.next_progress else self.num_losses + 1
        self.next_progress = self.completion_tokens + PROGRESS_TOKENS
        return [choice.seq for choice in self.live.values()] if self.num_losses >= MAX_LOSSES else []

    def take_prompt_logprobs(self, tokenizer: Tokenizer) -> tuple[TokenLogprobs, ...]:
        """Return the prompt's log-probabilities once, when all are known."""
        if self.prompt_scores is None or not self.prompt_scores.is_complete:
            return ()
        scores, self.prompt_scores = self.prompt_scores, None
        return prompt_records(self.asked.prompt_token_ids, scores, tokenizer)

    def embedding(self) -> bytes:
        """Return the prompt's embedding, or nothing if the request asks for none."""
        vector = None if self.pooled is None or self.asked.score is not None else self.pooled.vector()
        return b"" if vector is None else vector.tobytes()

    def scored(self) -> TextResults | None:
        """Return the score of the pair, or None if the request asks for none."""
        vector = None if self.pooled is None or self.asked.score is None else self.pooled.vector()
        return None if vector is None else TextResults("score", vector.tobytes(), (len(self.asked.prompt_token_ids),))

    def usage(self) -> Usage:
        """Return the token usage so far, over all choices; the prompt counts once."""
        cached_tokens = self.first.cached_tokens if self.first is not None else None
        num_prompt_tokens = len(self.asked.prompt_token_ids)
        return Usage(num_prompt_tokens, self.completion_tokens, cached_tokens or 0, self.reasoning_tokens)


def _guide_of(
    prepared: Prepared,
    params: SamplingParams,
    resumed: ResumedChoice,
    guides: GrammarCompiler,
    rule: ReasoningRule | None,
) -> Guide | None:
    """Return the grammar guide of a choice, advanced by its logged tokens.

    The grammar of calls describes the reasoning too; any other one begins behind it.
    If these tokens do not match the grammar, the choice ends with an error at its first mask.
    """
    if prepared.grammar is None:
        return None
    wanted = params.structured_outputs
    may_reason = rule is not None and wanted is not None and wanted.calls is None and rule.can_precede_grammar
    guide = guides.new_guide(prepared.grammar, ReasoningState(rule) if rule is not None and may_reason else None)
    guide.take(guide.new_tokens_of(np.array(resumed.token_ids, dtype=np.int32)))
    return guide


def _end_rule(asked: EngineRequest, limits: RequestLimits) -> EndRule:
    """Return the tokens that end a choice of the request, and the number of tokens that it may have."""
    params = asked.params
    end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else limits.eos_token_ids)
    # A prompt that is embedded may fill the context; the one token after it is dropped.
    num_left = max(1, limits.max_model_len - len(asked.prompt_token_ids))
    limit = min(num_left, max_tokens_with_logprobs(asked.prompt_token_ids, params))
    if params.use_beam_search:
        limit = min(limit, max_tokens_of_beams(asked.prompt_token_ids, params, limits))
    max_tokens = limit if params.max_tokens is None else min(limit, params.max_tokens)
    return EndRule(end_ids, params.min_tokens, max_tokens)


def _ranking_logprobs(params: SamplingParams, rule: EndRule) -> int:
    """Return how many of the likeliest tokens of each row a request needs to rank its choices, or NO_LOGPROBS."""
    if params.use_beam_search:
        return params.num_sequences + len(rule.end_ids)
    return 0 if params.withholds_output else NO_LOGPROBS


def open_choice(
    request: LiveRequest,
    choice: int,
    prompt: NDArray[np.int32],
    resumed: ResumedChoice,
    limits: RequestLimits,
    tokenizer: Tokenizer,
) -> LiveChoice:
    """Create a choice in the state that an earlier node logged: tokens, text and partial stop strings.

    `prompt`: [num_prompt_tokens], the request's, which is copied.

    Raises RequestError when the logged text does not match the logged tokens.
    """
    asked, params = request.asked, request.asked.params
    rule = _end_rule(asked, limits)
    includes_stop = params.include_stop_str_in_output
    detokenizer = tokenizer.new_detokenizer(begins_text=asked.begins_text)
    output = ChoiceOutput(rule, params.stop, detokenizer, includes_stop=includes_stop)
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
        # Beams draw nothing.
        params=params.model_copy(update={"temperature": 0.0}) if params.use_beam_search else params,
        seed=asked.seed,
        token_ids=np.concatenate((prompt, np.array(resumed.token_ids, dtype=np.int32))),
        num_prompt_tokens=len(asked.prompt_token_ids),
        num_resumed=len(resumed.token_ids),
        end_rule=rule,
        root_hash=request.root_hash,
        tenant=asked.tenant,
        weight=asked.weight,
        level=asked.level,
        urgency=asked.level,
        background=asked.background,
        priority=asked.priority,
        bad_words=request.prepared.bad_words,
        adapter=request.prepared.adapter,
        prompt_results=request.prompt_scores or request.pooled,
        ranking_logprobs=_ranking_logprobs(params, rule),
    )
    return LiveChoice(request, seq, output, unlogged_text=text[len(resumed.text) :])
