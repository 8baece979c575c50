"""How far a model's distributions are from a base model's, as `llama-perplexity --kl-divergence` defines it.

Each scored token has a divergence from the base's distribution, and a difference of probability: the model's minus the
base's, of the token that follows in the text. It is also noted whether the likeliest token is the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST_LOG_PROB = -16.0
"""Tokens that the base holds for less likely than e^-16 are left out of the divergence."""
Z95 = 1.96
_MAGIC = b"_logits_"
_FACTORS = 4
"""uint16 before each row's codes: its step and its smallest log probability, both float32."""


class BaseFile:
    """The file that `llama-perplexity --kl-divergence-base` writes: token ids and the base's log probabilities.

    Layout: magic, context, vocabulary, number of windows (int32 each), token ids, then of each window the rows of
    its second half but the last. A row's log probabilities are codes of 16 bits between their largest and the larger
    of their smallest and 16 below the largest.
    """

    def __init__(self, path: Path) -> None:
        """Raises ValueError for another kind of file, or one that is cut off."""
        head = np.fromfile(path, np.uint8, len(_MAGIC) + 12)
        if head[: len(_MAGIC)].tobytes() != _MAGIC:
            raise ValueError(f"{path} does not begin with {_MAGIC!r}, so llama-perplexity did not write it")
        window, self.vocab_size, self.num_windows = head[len(_MAGIC) :].view(np.int32).tolist()
        self.num_scored = window - 1 - window // 2
        tokens = np.fromfile(path, np.int32, window * self.num_windows, offset=len(head))
        shape = (self.num_windows, self.num_scored, 2 * -(-self.vocab_size // 2) + _FACTORS)
        start = len(head) + 4 * window * self.num_windows
        if path.stat().st_size != start + 2 * int(np.prod(shape, dtype=np.int64)):
            raise ValueError(f"{path} is cut off: {self.num_windows} windows of {window} tokens take more bytes")
        self.tokens = tokens.reshape(self.num_windows, window)
        self._rows = np.memmap(path, np.uint16, "r", start, shape)

    def log_probs(self, window: int) -> Tensor:
        """The base's log probabilities after each scored token of a window, [num_scored, vocab_size]."""
        rows = np.array(self._rows[window])
        factors = torch.from_numpy(rows[:, :_FACTORS].copy().view(np.float32))
        codes = torch.from_numpy(rows[:, _FACTORS : _FACTORS + self.vocab_size].astype(np.float32))
        return codes.mul_(factors[:, :1]).add_(factors[:, 1:])

    def targets(self, window: int) -> Tensor:
        """The tokens that follow the scored ones, [num_scored]."""
        return torch.from_numpy(self.tokens[window, -self.num_scored :].astype(np.int64))


class TokenErrors(NamedTuple):
    """The errors of scored tokens, one number for each."""

    kl: NDArray[np.float64]
    """Divergence from the base's distribution, in nats."""
    delta_p: NDArray[np.float64]
    """The model's probability of the token that follows, minus the base's."""
    same_top: NDArray[np.float64]
    """1 if the likeliest token is the base's likeliest, else 0."""


def token_errors(logits: Tensor, base: Tensor, targets: Tensor) -> TokenErrors:
    """Compare logits with the base's log probabilities, both [num_tokens, vocab]; targets: [num_tokens]."""
    ours = logits.log_softmax(-1)
    weights = torch.where(base > LEAST_LOG_PROB, base.exp(), 0.0)
    kl = (weights * (base - ours)).sum(-1, dtype=torch.float64)
    at = targets[:, None]
    delta_p = ours.gather(1, at).double().exp() - base.gather(1, at).double().exp()
    return TokenErrors(kl.numpy(), delta_p[:, 0].numpy(), (ours.argmax(-1) == base.argmax(-1)).double().numpy())


@dataclass(frozen=True)
class Figure:
    """A value and the half width of its interval of 95 %."""

    value: float
    error: float

    def overlaps(self, other: Figure) -> bool:
        return abs(self.value - other.value) <= self.error + other.error


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a model over many tokens. The intervals take tokens as independent, as llama-perplexity does."""

    kl: Figure
    """Mean divergence, in nats."""
    rms_delta_p: Figure
    """Root of the mean squared difference of probability, in percent."""
    same_top: Figure
    """How often both have the same likeliest token, in percent."""


def accuracy_of(errors: list[TokenErrors]) -> Accuracy:
    """The accuracy over all tokens of several windows."""
    kl, delta_p, same_top = (np.concatenate(parts) for parts in zip(*errors, strict=True))
    square = _mean(delta_p**2)
    rms = float(np.sqrt(square.value))
    # The derivative of a root: half the error of the mean square, divided by the root.
    root = Figure(100 * rms, 100 * square.error / (2 * rms) if rms else 0.0)
    top = _mean(same_top)
    return Accuracy(_mean(kl), root, Figure(100 * top.value, 100 * top.error))


def _mean(values: NDArray[np.float64]) -> Figure:
    return Figure(float(values.mean()), Z95 * float(values.std()) / (len(values) - 1) ** 0.5)


_PRINTED = {"kl": r"Mean +KLD", "rms_delta_p": r"RMS Δp", "same_top": r"Same top p"}


def accuracy_of_output(output: str) -> Accuracy:
    """The accuracy that `llama-perplexity --kl-divergence` printed. It prints standard errors; an interval has 1.96."""
    found = {}
    for name, label in _PRINTED.items():
        line = re.search(rf"^{label} *: *(-?[\d.]+) ± *([\d.]+)", output, re.MULTILINE)
        if line is None:
            raise ValueError(f"llama-perplexity printed no {label!r}: {output[-500:]}")
        found[name] = Figure(float(line[1]), Z95 * float(line[2]))
    return Accuracy(**found)
