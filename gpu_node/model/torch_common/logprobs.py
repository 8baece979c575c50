"""Compute logprobs from logits, in torch on any device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.gpu_node.model.protocol import Logprobs

_ROWS_AT_ONCE = 32
"""Rows converted to float64 at once: 31 MiB with a vocabulary of 128,256 tokens."""


def logprobs_of(logits: Tensor, token_ids: Tensor, num_logprobs: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
    """Return the arrays of `Logprobs` as tensors. logits: [rows, vocab]; token_ids: [rows]."""
    num_best = min(int(num_logprobs.max(initial=0)), logits.shape[-1])
    parts = zip(torch.split(logits, _ROWS_AT_ONCE), torch.split(token_ids, _ROWS_AT_ONCE), strict=True)
    ids, values = zip(*(_part(part.float(), own.long()[:, None], num_best) for part, own in parts), strict=True)
    return torch.cat(ids), torch.cat(values)


def to_numpy(ids: Tensor, values: Tensor) -> Logprobs:
    """Copy the arrays to the host as `Logprobs`."""
    return Logprobs(ids.to(torch.int32).cpu().numpy(), values.cpu().numpy())


def _part(logits: Tensor, own: Tensor, num_best: int) -> tuple[Tensor, Tensor]:
    best = logits.topk(num_best, dim=-1)
    # A failed row has token -1.
    chosen = logits.gather(1, own.clamp(min=0))
    values = torch.cat((chosen, best.values), dim=1) - _logsumexp(logits)
    return torch.cat((own, best.indices), dim=1), values


def _logsumexp(logits: Tensor) -> Tensor:
    """Return the logarithm of each row's sum of exponentials, [rows, 1].

    torch sums up a row in an order that depends on the number of rows. In float64, the order shows in no bit of the
    result, except where the sum happens to lie next to a rounding boundary: about once in 10^9 rows.
    """
    top = logits.amax(dim=-1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0)
    sums = (logits - top).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)
    return (sums.log() + top).float()
