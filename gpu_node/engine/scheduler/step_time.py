"""Predict how long a step takes, from the steps before it."""

from __future__ import annotations

import math
from typing import NamedTuple, Self

from penstock.gpu_node.engine.steps import Step

_LEARNING_RATE = 0.3
"""Share of a prediction's error, as a ratio, that one step corrects."""
_MAX_LOG_ERROR = math.log(2)
"""Larger errors count as this: other processes may have delayed a single step."""
_DECODE_SHARE = 0.1
"""Weight of errors in steps with prompts for the decode cost: steps without prompts show that cost by itself."""
_MIN_MS = 1e-3
_CONTEXT_TOKENS = 1000


class StepWork(NamedTuple):
    """What a step computes, in the quantities that its time depends on."""

    num_decoded: int
    """Tokens of sequences that decode, drafted ones included."""
    num_prefilled: int
    """Prompt tokens."""
    num_attended: int
    """Sum, over prompt tokens, of the tokens that are stored before their chunk."""
    num_scored: int
    """Prompt tokens with log-probabilities requested; each needs a row of logits."""

    @classmethod
    def of(cls, step: Step, num_scored: int) -> Self:
        """Return the work of a step that scores `num_scored` prompt tokens."""
        num_attended = 0
        if step.num_prefill_tokens:
            counts = step.ends - step.starts
            is_chunk = counts > 1
            num_attended = int((counts[is_chunk].astype("int64") * step.starts[is_chunk]).sum())
        return cls(step.num_tokens - step.num_prefill_tokens, step.num_prefill_tokens, num_attended, num_scored)


class StepTime:
    """A linear model of a step's milliseconds with five positive weights.

    The weights are learned by normalized least mean squares (Haykin, Adaptive Filter Theory, chapter 7). The error is
    that of the logarithm of the prediction, so the weights stay positive and need no units. Each weight takes the part
    of the error that is in proportion to its part of the prediction. The first step sets the scale of all weights.
    """

    def __init__(self) -> None:
        # A fixed part, a decoded token, a prompt token, 1,000 tokens before a prompt token, a scored token: measured
        # ratios of a 135M model on two cores.
        self._weights = [4.0, 1.0, 1.0, 0.15, 0.3]
        self._has_scale = False

    def note(self, work: StepWork, took_ms: float) -> None:
        """Learn from a step that took `took_ms`."""
        parts = self._parts(work)
        predicted = sum(parts)
        error = math.log(max(took_ms, _MIN_MS) / predicted)
        if not self._has_scale:
            self._has_scale = True
            self._weights = [weight * math.exp(error) for weight in self._weights]
            return
        error = _LEARNING_RATE * min(max(error, -_MAX_LOG_ERROR), _MAX_LOG_ERROR)
        shares = [part / predicted for part in parts]
        steps = [_DECODE_SHARE * share if work.num_prefilled and i < 2 else share for i, share in enumerate(shares)]
        norm = sum(step * share for step, share in zip(steps, shares, strict=True))
        self._weights = [
            weight * math.exp(error * step / norm) for weight, step in zip(self._weights, steps, strict=True)
        ]

    def decode_ms(self, num_decoded: int) -> float:
        """Return the milliseconds of a step that decodes `num_decoded` tokens and nothing else."""
        return self.step_ms(StepWork(num_decoded, 0, 0, 0))

    def step_ms(self, work: StepWork) -> float:
        """Return the milliseconds of a step."""
        return sum(self._parts(work))

    def token_ms(self, num_before: int, *, is_scored: bool) -> float:
        """Return the milliseconds that a prompt token adds to a step after `num_before` stored tokens of its prompt."""
        _, _, token, context, scored = self._weights
        return token + context * num_before / _CONTEXT_TOKENS + (scored if is_scored else 0.0)

    def _parts(self, work: StepWork) -> tuple[float, ...]:
        fixed, decoded, token, context, scored = self._weights
        return (
            fixed,
            decoded * work.num_decoded,
            token * work.num_prefilled,
            context * work.num_attended / _CONTEXT_TOKENS,
            scored * work.num_scored,
        )
