"""Beam search: which continuations are followed, which texts are complete, and when the search ends. Pure, no engine.

A step follows `width` beams. All continuations of all beams by one token are ordered by the sum of their tokens'
log-probabilities. Of the first `width`, those that end are complete; the first `width` that do not end are the beams of
the next step. The `width` best complete texts are kept, by that sum ÷ length ** `length_penalty`. transformers and the
paper on paged attention (W. Kwon et al., SOSP 2023) search in the same way.

*Equal scores*: the continuation of the better beam comes first, then the one with the lower token id. Of complete texts
with equal scores, the older one comes first. So the result is a function of the log-probabilities alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

EarlyStopping = Literal["never"] | bool


class Candidates(NamedTuple):
    """The likeliest next tokens of a beam, and their log-probabilities."""

    token_ids: list[int]
    logprobs: list[float]


class Continuation(NamedTuple):
    """A beam of the next step: the beam that it continues, by its index, and the token."""

    beam: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete text."""

    token_ids: tuple[int, ...]
    score: float


class BeamSearch:
    """One search. `beams` are its open texts, the best first."""

    def __init__(
        self,
        width: int,
        end_ids: frozenset[int],
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        """A text ends with a token of `end_ids` or has `max_tokens` tokens."""
        self._width = width
        self._end_ids = end_ids
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self.beams: list[tuple[int, ...]] = [()]
        self._sums: list[float] = [0.0]
        """Of each beam, the sum of its tokens' log-probabilities."""
        self.complete: list[Hypothesis] = []
        """The best complete texts, the best first."""

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest next tokens of each beam a step needs: `width` of them do not end the text."""
        return self._width + len(self._end_ids)

    def advance(self, candidates: Sequence[Candidates]) -> list[Continuation]:
        """Take a step with the candidates of each beam. Return the new beams, the best first; none at the end."""
        length = len(self.beams[0]) + 1
        ordered = sorted(
            (-self._sums[beam] - logprob, beam, token_id)
            for beam, (token_ids, logprobs) in enumerate(candidates)
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        )
        is_last = length >= self._max_tokens
        for cost, beam, token_id in ordered[: self._width]:
            if is_last or token_id in self._end_ids:
                score = -cost / length**self._length_penalty
                self.complete.append(Hypothesis((*self.beams[beam], token_id), score))
        self.complete.sort(key=lambda one: -one.score)
        del self.complete[self._width :]
        going_on = [] if is_last else [one for one in ordered if one[2] not in self._end_ids][: self._width]
        self.beams = [(*self.beams[beam], token_id) for _, beam, token_id in going_on]
        self._sums = [-cost for cost, _, _ in going_on]
        if not going_on or self._has_ended(length):
            self.beams.clear()
            return []
        return [Continuation(beam, token_id) for _, beam, token_id in going_on]

    def _has_ended(self, length: int) -> bool:
        """Return whether no open beam is expected to become better than the worst complete text."""
        if len(self.complete) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            # The sum only falls; at most it is divided by the greatest length.
            length = self._max_tokens
        best_score: float = self._sums[0] / length**self._length_penalty
        return best_score <= self.complete[-1].score
