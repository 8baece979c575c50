"""Predict the length of an output: a quantile of recent outputs, for each tenant and class of prompt.

The last outputs of a group, kept sorted, give exact quantiles and forget old behavior. Of n lengths, take the k-th
smallest, with k = ceil(level × (n + 1)). While lengths are exchangeable, it is at least as long as the next output with
probability `level`.

Lengths are not exchangeable, because short outputs end first and habits change. So each prediction corrects the level:
up if it was too short, down a little if not. Then, for any lengths, the share of T predictions that held is within 1 /
(STEP × T) of the nominal one: adaptive conformal inference (Gibbs and Candès, 2021).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque

from penstock.contract.job import PREDICTED_OUTPUT_TOKENS

WINDOW = 128
"""Outputs remembered per group."""
MAX_GROUPS = 1024
"""Groups remembered; the least recently used one is dropped first."""
MAX_REPORTED = 32
"""Kinds of jobs whose predictions a node reports in its pressure record."""
STEP = 0.03
"""How far a wrong prediction moves the level: after 1,000 predictions the coverage is within 3.3 points of nominal."""


class LengthPredictor:
    """Predicts the output tokens of a choice from earlier ones. Each process starts without data."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
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
