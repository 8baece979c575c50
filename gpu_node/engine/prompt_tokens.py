"""What a prompt's tokens give beside its answer: which of them a step scores or pools, and the log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.contract.output import TokenLogprobs
from penstock.gpu_node.engine.sequence import PooledPrompt, PromptResults, PromptScores, Sequence
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.model.protocol import NO_LOGPROBS, Logprobs, PooledTokens, ScoredTokens, StepPlan, StepResult

Ints: TypeAlias = NDArray[np.int32]


def with_prompt_tokens(step: Step, plan: StepPlan) -> StepPlan:
    """Return the plan with the prompt tokens of the step whose scores or hidden states are wanted."""
    scored: list[tuple[Ints, Ints, int, int]] = []
    pooled: list[tuple[Ints, int]] = []
    for i, seq in enumerate(step.seqs):
        if (results := seq.prompt_results) is None:
            continue
        start = int(step.starts[i])
        first, end = max(start, results.next_token), min(int(step.ends[i]), results.end)
        if first >= end:
            continue
        tokens = np.arange(first - start, end - start, dtype=np.int32) + plan.query_starts[i]
        if isinstance(results, PromptScores):
            scored.append((tokens, results.prompt[first + 1 : end + 1], results.num_logprobs, i))
        else:
            pooled.append((tokens, i))
    if not scored and not pooled:
        return plan
    return replace(plan, scored=_scored_tokens(scored), pooled=_pooled_tokens(pooled))


def note_prompt_tokens(step: Step, plan: StepPlan, result: StepResult) -> None:
    """Store the scores and hidden states of a step's prompt tokens with their requests."""
    if plan.scored is not None and result.scores is not None:
        ids, values = result.scores.token_ids, result.scores.values
        for scores, first, rows in _by_request(step, plan, plan.scored):
            if isinstance(scores, PromptScores):
                scores.add(first, Logprobs(ids[rows], values[rows]))
    if plan.pooled is not None and result.hidden is not None:
        for pooled, first, rows in _by_request(step, plan, plan.pooled):
            if isinstance(pooled, PooledPrompt):
                pooled.add(first, result.hidden[rows])


def make_records(seqs: Items[Sequence], tokenizer: Tokenizer) -> None:
    """Make the records of prompt tokens that a step has scored. A whole prompt at once would delay every stream."""
    for seq in seqs:
        if seq.prompt_results is not None and isinstance(seq.prompt_results, PromptScores):
            _make_records(seq.prompt_results, tokenizer)


def prompt_records(prompt: Items[int], scores: PromptScores, tokenizer: Tokenizer) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of a prompt with all tokens scored."""
    _make_records(scores, tokenizer)
    first = TokenLogprobs((prompt[0],), (), (tokenizer.name_of(prompt[0]),))
    return first, *scores.records


def logprobs_of(seq: Sequence, rows: Logprobs | None, row: int, tokenizer: Tokenizer) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of a sampled token, if its sequence asks for them."""
    if rows is None or seq.num_logprobs == NO_LOGPROBS:
        return ()
    return (_record_of(rows, row, seq.num_logprobs, tokenizer),)


def _scored_tokens(parts: list[tuple[Ints, Ints, int, int]]) -> ScoredTokens | None:
    if not parts:
        return None
    tokens, targets, num_logprobs, seqs = zip(*parts, strict=True)
    counts = [len(part) for part in tokens]
    return ScoredTokens(
        np.concatenate(tokens),
        np.concatenate(targets),
        np.repeat(np.array(num_logprobs, np.int32), counts),
        np.repeat(np.array(seqs, np.int32), counts),
    )


def _pooled_tokens(parts: list[tuple[Ints, int]]) -> PooledTokens | None:
    if not parts:
        return None
    tokens, seqs = zip(*parts, strict=True)
    return PooledTokens(np.concatenate(tokens), np.repeat(np.array(seqs, np.int32), [len(part) for part in tokens]))


def _by_request(
    step: Step, plan: StepPlan, wanted: ScoredTokens | PooledTokens
) -> Iterator[tuple[PromptResults | None, int, NDArray[np.intp]]]:
    """Yield, for each sequence with wanted tokens, its results, the position of the first token, and their rows."""
    for i in np.unique(wanted.seqs).tolist():
        rows = np.flatnonzero(wanted.seqs == i)
        yield step.seqs[i].prompt_results, int(plan.positions[wanted.tokens[rows[0]]]), rows


def _make_records(scores: PromptScores, tokenizer: Tokenizer) -> None:
    for part in scores.parts:
        scores.records += [_record_of(part, i, scores.num_logprobs, tokenizer) for i in range(len(part.values))]
    scores.parts.clear()


def _record_of(rows: Logprobs, row: int, num_logprobs: int, tokenizer: Tokenizer) -> TokenLogprobs:
    token_ids: list[int] = rows.token_ids[row, : 1 + num_logprobs].tolist()
    values: list[float] = rows.values[row, : 1 + num_logprobs].tolist()
    return TokenLogprobs(tuple(token_ids), tuple(values), tuple(map(tokenizer.name_of, token_ids)))
