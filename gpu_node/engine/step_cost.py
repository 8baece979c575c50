"""What a step of so many tokens takes, as learnt from the steps before."""

from __future__ import annotations

_FADE = 0.99
_LEAST_SPREAD = 0.3
"""Steps whose numbers of tokens differ by a smaller part of their mean say little about what a token costs."""


class StepCost:
    """A line through the times of the last steps: so much for a step, so much for each of its tokens.

    Errors count relative to a step's time, so that one that something else held up says little.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._squares = self._ms = self._products = 0.0
        self.token_ms = 0.0
        """Of one token more."""

    def note(self, num_tokens: int, ms: float) -> None:
        """A step of so many tokens took so long."""
        if ms <= 0:
            return
        weight = 1 / (ms * ms)
        self._weight = self._weight * _FADE + weight
        self._tokens = self._tokens * _FADE + weight * num_tokens
        self._squares = self._squares * _FADE + weight * num_tokens * num_tokens
        self._ms = self._ms * _FADE + weight * ms
        self._products = self._products * _FADE + weight * ms * num_tokens
        mean_tokens, mean_ms = self._tokens / self._weight, self._ms / self._weight
        variance = self._squares / self._weight - mean_tokens * mean_tokens
        covariance = self._products / self._weight - mean_tokens * mean_ms
        least_variance = (_LEAST_SPREAD * mean_tokens) ** 2
        slope = (covariance + least_variance * self.token_ms) / (variance + least_variance)
        # A step of no tokens costs something, and a token does.
        self.token_ms = min(max(slope, 0.0), mean_ms / mean_tokens)

    def step_ms(self, num_tokens: int) -> float:
        """A step of so many tokens; 0 before the first one."""
        if not self._weight:
            return 0.0
        return max(0.0, (self._ms - self.token_ms * self._tokens) / self._weight + self.token_ms * num_tokens)
