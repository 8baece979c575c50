"""What a prompt's tokens give beside its answer: log-probabilities, scores and embeddings."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.contract.logprobs import TokenLogprobs
from penstock.gpu_node.engine.prompt_state import PromptScores
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.model.protocol import NO_LOGPROBS, Logprobs, PooledTokens, ScoredTokens, StepPlan

if TYPE_CHECKING:
    pass


# Track how much of a prompt is scored: the log-probability of each token given the tokens before it.


# Log-probabilities: from a runner's arrays to records, for sampled tokens and for chunks of a prompt.


def logprobs_of(seq: Sequence, rows: Logprobs | None, row: int, tokenizer: Tokenizer) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of a sampled token, if its sequence asks for them."""
    if rows is None or seq.num_logprobs == NO_LOGPROBS:
        return ()
    return (_record_of(rows, row, seq.num_logprobs, tokenizer),)


def prompt_records(prompt: Items[int], scores: PromptScores, tokenizer: Tokenizer) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of a prompt with all tokens scored."""
    _make_records(scores, tokenizer)
    first = TokenLogprobs((prompt[0],), (), (tokenizer.name_of(prompt[0]),))
    return first, *scores.records


def make_records(seqs: Items[Sequence], tokenizer: Tokenizer) -> None:
    """Make the records of prompt tokens that a step has scored. A whole prompt at once would delay every stream."""
    for seq in seqs:
        if seq.prompt_scores is not None:
            _make_records(seq.prompt_scores, tokenizer)


def scored_tokens(step: Step, plan: StepPlan) -> ScoredTokens | None:
    """Return the tokens of a step to score for prompts, or None."""
    # A sequence that lacks only its last prompt token counts as decoding, and that token is not scored.
    if not step.num_prefill_tokens:
        return None
    parts: list[tuple[NDArray[np.int32], NDArray[np.int32], int, int]] = []
    for i, seq in enumerate(step.seqs):
        scores = seq.prompt_scores
        if scores is None:
            continue
        start = int(step.starts[i])
        first, end = max(start, scores.num_scored), min(int(step.ends[i]), scores.num_to_score)
        if first < end:
            tokens = np.arange(first - start, end - start, dtype=np.int32) + plan.query_starts[i]
            parts.append((tokens, scores.prompt[first + 1 : end + 1], scores.num_logprobs, i))
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


def note_scores(step: Step, plan: StepPlan, scores: Logprobs | None) -> None:
    """Store the prompt scores of a step."""
    if plan.scored is None or scores is None:
        return
    for i in np.unique(plan.scored.seqs).tolist():
        wanted = step.seqs[i].prompt_scores
        rows = np.flatnonzero(plan.scored.seqs == i)
        if wanted is not None:
            first = int(plan.positions[plan.scored.tokens[rows[0]]])
            wanted.add(first, Logprobs(scores.token_ids[rows], scores.values[rows]))


def _make_records(scores: PromptScores, tokenizer: Tokenizer) -> None:
    for part in scores.parts:
        scores.records += [_record_of(part, i, scores.num_logprobs, tokenizer) for i in range(len(part.values))]
    scores.parts.clear()


def _record_of(rows: Logprobs, row: int, num_logprobs: int, tokenizer: Tokenizer) -> TokenLogprobs:
    token_ids: list[int] = rows.token_ids[row, : 1 + num_logprobs].tolist()
    values: list[float] = rows.values[row, : 1 + num_logprobs].tolist()
    return TokenLogprobs(tuple(token_ids), tuple(values), tuple(map(tokenizer.name_of, token_ids)))


# The embedding of a prompt while the hidden states of its tokens arrive.


# Ask for the hidden states of a step's prompt tokens that are embedded, and pool them.


def pooled_tokens(step: Step, plan: StepPlan) -> PooledTokens | None:
    """Return the tokens of a step whose hidden states are wanted, or None."""
    parts: list[tuple[NDArray[np.int32], int]] = []
    for i, seq in enumerate(step.seqs):
        if (pooled := seq.pooled) is None:
            continue
        start = int(step.starts[i])
        first, end = max(start, pooled.next_token), min(int(step.ends[i]), pooled.end)
        if first < end:
            parts.append((np.arange(first - start, end - start, dtype=np.int32) + plan.query_starts[i], i))
    if not parts:
        return None
    tokens, seqs = zip(*parts, strict=True)
    return PooledTokens(np.concatenate(tokens), np.repeat(np.array(seqs, np.int32), [len(part) for part in tokens]))


def note_hidden(step: Step, plan: StepPlan, hidden: NDArray[np.float32] | None) -> None:
    """Pool the hidden states of a step."""
    if plan.pooled is None or hidden is None:
        return
    for i in np.unique(plan.pooled.seqs).tolist():
        pooled = step.seqs[i].pooled
        rows = np.flatnonzero(plan.pooled.seqs == i)
        if pooled is not None:
            pooled.add(int(plan.positions[plan.pooled.tokens[rows[0]]]), hidden[rows])
