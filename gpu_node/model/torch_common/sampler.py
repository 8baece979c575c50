"""What the torch runners compute of a step's logits: tokens, each row by its own rules, and logprobs.

The rules are those of kernels/reference/sampler.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.gpu_node.model.protocol import FAILED_TOKEN, Logprobs, SamplingRows
from penstock.kernels.philox import sampling_uniform

_NUM_CANDIDATES = 512
"""The number of best tokens that are tried for a top-p limit before the whole vocabulary is sorted.

torch selects them without a full sort only if the vocabulary is at least 64 times as large.
"""


def has_adjustments(rows: SamplingRows) -> bool:
    """Return whether `adjust` would change any logits."""
    return rows.masks is not None or any(map(len, rows.biased))


def adjust(logits: Tensor, rows: SamplingRows) -> None:
    """Add the rows' biases, then wait for their masks and set the logits of disallowed tokens to -inf.

    logits: [num_samples, vocab] on any device, changed in place.
    """
    if any(map(len, rows.biased)):
        at = tuple(index.to(logits.device) for index in _places(rows.biased))
        logits[at] += torch.from_numpy(np.concatenate(rows.biases)).to(logits.device)
    if rows.masks is not None:
        rows.masks.wait()
        allowed = np.unpackbits(rows.masks.words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        masked = np.flatnonzero(rows.masks.rows >= 0)
        forbidden = torch.from_numpy(allowed[rows.masks.rows[masked]] == 0).to(logits.device)
        masked_rows = torch.from_numpy(masked).to(logits.device)
        logits[masked_rows] = logits[masked_rows].masked_fill(forbidden, -torch.inf)


def sample(logits: Tensor, rows: SamplingRows) -> NDArray[np.int32]:
    """Sample one token per row; FAILED_TOKEN where logits are not finite before or after penalties and bans.

    logits: [num_samples, vocab] in float32, overwritten. A row's token depends only on that row.
    """
    best, at = logits.max(dim=-1)
    failed = ~torch.isfinite(best).numpy()
    if has_adjustments(rows) or any(map(len, (*rows.seen, *rows.banned))):
        adjust(logits, rows)
        _penalize(logits, rows)
        if any(map(len, rows.banned)):
            logits[_places(rows.banned)] = -torch.inf
        best, at = logits.max(dim=-1)
        failed |= ~torch.isfinite(best).numpy()
    tokens = at.numpy().astype(np.int32)
    drawn = np.flatnonzero((rows.temperature > 0) & ~failed)
    if len(drawn):
        tokens[drawn] = _draw(logits[torch.from_numpy(drawn)], rows, drawn)
    tokens[failed] = FAILED_TOKEN
    return tokens


def sample_rows(logits: Tensor, rows: SamplingRows) -> tuple[NDArray[np.int32], Logprobs | None]:
    """Sample one token per row. Return the tokens and, if any row wants them, logprobs of the unmodified logits."""
    if not len(logits):
        return np.empty(0, dtype=np.int32), None
    if rows.num_logprobs is None:
        return sample(logits, rows), None
    raw = logits.clone()
    tokens = sample(logits, rows)
    return tokens, to_numpy(*logprobs_of(raw, torch.from_numpy(tokens), rows.num_logprobs))


def _penalize(logits: Tensor, rows: SamplingRows) -> None:
    if not any(map(len, rows.seen)):
        return
    # As in CTRL (arXiv:1909.05858): positive logits of seen tokens are divided by the penalty, negative multiplied.
    at = _places(rows.seen)
    scores, penalty = logits[at], torch.from_numpy(rows.repetition_penalty)[at[0]]
    logits[at] = torch.where(scores < 0, scores * penalty, scores / penalty)
    for i in np.flatnonzero((rows.frequency_penalty != 0) | (rows.presence_penalty != 0)):
        # The frequency penalty counts for each occurrence of a token in the output, the presence penalty once.
        frequency, presence = float(rows.frequency_penalty[i]), float(rows.presence_penalty[i])
        found = np.unique(rows.seen[i][rows.num_seen_prompt[i] :], return_counts=True)
        row, (output, counts) = logits[i], map(torch.from_numpy, found)
        row[output] = row[output] - frequency * counts - presence


def _places(lists: Sequence[NDArray[np.int32]]) -> tuple[Tensor, Tensor]:
    """Return the row and the token of each entry of the rows' lists, of which one at least is not empty."""
    at = np.repeat(np.arange(len(lists)), [len(one) for one in lists])
    return torch.from_numpy(at), torch.from_numpy(np.concatenate(lists)).long()


def _draw(logits: Tensor, rows: SamplingRows, drawn: NDArray[np.intp]) -> NDArray[np.int32]:
    """Sample by inverting each row's cumulative distribution, in token id order, at the row's own random number."""
    # Subtract the maximum first, so that a tiny temperature overflows to -inf and never to NaN.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / torch.from_numpy(rows.temperature[drawn])[:, None]
    min_p = rows.min_p[drawn]
    if min_p.any():
        logits.masked_fill_(logits < torch.from_numpy(min_p).log()[:, None], -torch.inf)
    limited = np.flatnonzero((rows.top_k[drawn] > 0) | (rows.top_p[drawn] < 1))
    if len(limited):
        index, chosen = torch.from_numpy(limited), drawn[limited]
        logits[index] = _limit(logits[index], rows.top_k[chosen], rows.top_p[chosen])
    cumulative = torch.softmax(logits, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    uniform = sampling_uniform(rows.seed[drawn], rows.choice[drawn], rows.position[drawn])
    total = cumulative[:, -1:].contiguous()
    target = torch.from_numpy(uniform)[:, None] * total
    # Rounding may make the target equal to the total; then the last token with a nonzero weight is chosen.
    token = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, total, right=False)
    return torch.minimum(token, last).squeeze(1).numpy().astype(np.int32)


def _limit(logits: Tensor, top_k: NDArray[np.int32], top_p: NDArray[np.float32]) -> Tensor:
    """Mask all tokens but each row's `top_k` best and, of these, the fewest that hold `top_p` of the probability."""
    vocab = logits.shape[-1]
    k = torch.from_numpy(np.where(top_k > 0, np.minimum(top_k, vocab), vocab).astype(np.int64))[:, None]
    # A sum of probabilities may round past 1, so "no limit" must exceed any sum.
    p = torch.from_numpy(np.where(top_p < 1, top_p, np.float32(np.inf)))[:, None]
    open_ended = bool(((top_p < 1) & (top_k == 0)).any())
    num_candidates = min(vocab, max(_NUM_CANDIDATES if open_ended else 1, int(top_k.max(initial=0))))
    threshold, found = _threshold(logits, k, p, num_candidates)
    if not bool(found.all()):
        open_rows = (~found).nonzero().squeeze(1)
        threshold[open_rows], _ = _threshold(logits[open_rows], k[open_rows], p[open_rows], vocab)
    return logits.masked_fill(logits < threshold, -torch.inf)


def _threshold(logits: Tensor, k: Tensor, p: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Return the lowest logit that each row keeps, [rows, 1], and whether `num_candidates` were enough to find it."""
    best = logits.topk(num_candidates, dim=-1).values
    whole = num_candidates == logits.shape[-1]
    kth = best.gather(1, k.clamp(max=num_candidates) - 1)
    in_k = torch.where(k <= num_candidates, logits >= kth, True)
    weight = torch.where(in_k, logits, -torch.inf).logsumexp(dim=-1, keepdim=True)
    shares = (best - weight).exp().cumsum(dim=-1)
    # A token is kept while the tokens better than it hold less than p.
    kept = 1 + (shares[:, :-1] < p).sum(dim=-1, keepdim=True)
    kept = torch.minimum(kept, k)
    found = whole | (k <= num_candidates) | (shares[:, -1:] >= p)
    return best.gather(1, kept.clamp(max=num_candidates) - 1), found.squeeze(1)


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
