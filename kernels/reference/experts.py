"""Mixtures of experts: how experts are chosen."""

from __future__ import annotations

import torch
from torch import Tensor

_SHARES_EPS = 1e-6


def choose_experts(
    scores: Tensor,
    per_token: int,
    *,
    by_sigmoid: bool = False,
    normalized: bool = False,
    scale: float = 1.0,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    num_shared: int = 0,
    gates: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and the weights of their outputs, both [tokens, per_token + num_shared].

    scores: [tokens, experts]; an expert's share is the softmax of the scores, or with `by_sigmoid` the sigmoid of its
    own; bias: [experts], added to shares for the choice alone; normalized: the weights of a token are divided by their
    sum; scale: of weights by sigmoid; factors: [experts], of the weights. num_shared: further experts that every token
    has, with the sigmoid of its own of `gates`, [tokens], as a weight, or 1.
    """
    shares = torch.sigmoid(scores.float()) if by_sigmoid else torch.softmax(scores.float(), dim=-1)
    chosen = (shares if bias is None else shares + bias).topk(per_token).indices
    weights = shares.gather(-1, chosen)
    if normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + (_SHARES_EPS if by_sigmoid else 0.0))
    weights = weights * scale if by_sigmoid else weights
    weights = weights if factors is None else weights * factors[chosen]
    every = torch.arange(num_shared, device=scores.device).expand(len(scores), -1) + scores.shape[1]
    gate = torch.ones(len(scores), device=scores.device) if gates is None else torch.sigmoid(gates.float())
    return torch.cat((chosen, every), -1), torch.cat((weights, gate.unsqueeze(-1).expand(every.shape)), -1)
