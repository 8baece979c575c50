"""Mixers with a state of fixed size, one sequence and one token after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.arguments import StateRows

_LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys."""


def convolve(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: StateRows,
    dtype: torch.dtype = torch.float32,
    *,
    gated: bool = False,
) -> Tensor:
    """Return the convolution of each token's inputs with those of the tokens before it, [num_tokens, channels].

    x: [num_tokens, ...], rows of equal stride, of which the first `channels` are convolved, and SiLU follows. With
    `gated`: three times `channels`, a gate of the inputs, a gate of the outputs, and the inputs. states: [num_slots,
    taps - 1, channels] float32; weight: [taps, channels] float32, the oldest token's first; bias: [channels] float32.
    """
    channels = weight.shape[1]
    wide = x.float()
    inputs, out = wide[:, :channels], torch.empty(len(x), channels, dtype=dtype, device=x.device)
    if gated:
        inputs = inputs * wide[:, 2 * channels : 3 * channels]

    def advance(token: int, known: Tensor) -> None:
        window = torch.cat((known, inputs[token : token + 1]))
        total = (window * weight).sum(0)
        if bias is not None:
            total += bias
        out[token] = total * wide[token, channels : 2 * channels] if gated else functional.silu(total)
        known.copy_(window[1:])

    _continue(states, rows, advance)
    return out


def delta_rule(
    mixed: Tensor,
    gates: Tensor,
    rates: Tensor,
    biases: Tensor,
    matrices: Tensor,
    rows: StateRows,
    *,
    num_key_heads: int,
    tiled: bool,
) -> Tensor:
    """Return what each token's queries find, [num_tokens, value heads * value_dim], and continue the states.

    mixed: [num_tokens, channels] float32: queries, keys and values; gates: [num_tokens, 2 * value heads] float32, of
    learning, then of the decay, before their functions; rates, biases: [value heads] float32; matrices: [num_slots,
    value heads, key_dim, value_dim] float32; tiled: value head h belongs to key head h modulo their number.
    """
    _, heads, key_dim, value_dim = matrices.shape
    queries, keys, values = torch.split(mixed, [num_key_heads * key_dim] * 2 + [heads * value_dim], dim=1)
    at = torch.arange(heads, device=mixed.device)
    key_heads = at % num_key_heads if tiled else at // (heads // num_key_heads)
    out = torch.empty(len(mixed), heads, value_dim, device=mixed.device)

    def unit(vectors: Tensor) -> Tensor:
        by_head = vectors.view(num_key_heads, key_dim)[key_heads]
        return by_head * torch.rsqrt(by_head.square().sum(1, keepdim=True) + _LENGTH_EPS)

    def advance(token: int, current: Tensor) -> None:
        query, key = unit(queries[token]) * key_dim**-0.5, unit(keys[token])
        learning, decay = torch.sigmoid(gates[token, :heads]), functional.softplus(gates[token, heads:] + biases)
        current *= torch.exp(rates * decay)[:, None, None]
        known = torch.einsum("hk,hkv->hv", key, current)
        error = (values[token].view(heads, value_dim) - known) * learning[:, None]
        current += torch.einsum("hk,hv->hkv", key, error)
        out[token] = torch.einsum("hk,hkv->hv", query, current)

    _continue(matrices, rows, advance)
    return out.flatten(1)


def scan(
    mixed: Tensor,
    durations: Tensor,
    biases: Tensor,
    rates: Tensor,
    skips: Tensor,
    matrices: Tensor,
    rows: StateRows,
    *,
    num_groups: int,
    duration_factor: float = 1.0,
) -> Tensor:
    """Return what each token reads, with its share of the values, [num_tokens, heads * head_dim]; continue the states.

    mixed: [num_tokens, channels] float32: values, then what writes and what reads, by group; durations: [num_tokens,
    heads], rows of any stride, before their function; biases, rates, skips: [heads] float32; matrices: [num_slots,
    heads, head_dim, state_size] float32.
    """
    _, heads, head_dim, state_size = matrices.shape
    values, writes, reads = torch.split(mixed, [heads * head_dim] + [num_groups * state_size] * 2, dim=1)
    lasting = functional.softplus(duration_factor * durations.float() + biases)
    out = torch.empty(len(mixed), heads, head_dim, device=mixed.device)

    def of_heads(of_groups: Tensor) -> Tensor:
        return of_groups.view(num_groups, state_size).repeat_interleave(heads // num_groups, dim=0)

    def advance(token: int, current: Tensor) -> None:
        value, duration = values[token].view(heads, head_dim), lasting[token]
        current *= torch.exp(duration * rates)[:, None, None]
        current += torch.einsum("hd,hs->hds", value * duration[:, None], of_heads(writes[token]))
        out[token] = torch.einsum("hds,hs->hd", current, of_heads(reads[token])) + skips[:, None] * value

    _continue(matrices, rows, advance)
    return out.flatten(1)


def gate_outputs(
    x: Tensor,
    gates: Tensor,
    weight: Tensor | None,
    dtype: torch.dtype,
    *,
    width: int,
    eps: float,
    norm_first: bool,
    gate_factor: float = 1.0,
    factor: float = 1.0,
) -> Tensor:
    """Return x times the SiLU of its gates, with an RMS norm of each `width` channels before or after that.

    x: [num_tokens, channels] float32; gates: [num_tokens, channels], rows of any stride; weight: [width] float32 with
    `norm_first`, else [channels], or None: there is no norm; gate_factor, factor: of gates and outputs.
    """
    gate = functional.silu(gates.float() * gate_factor)

    def normed(y: Tensor, gains: Tensor) -> Tensor:
        return functional.rms_norm(y.view(len(y), -1, width), (width,), eps=eps) * gains.view(-1, width)

    if weight is not None and norm_first:
        return (normed(x, weight).flatten(1) * gate * factor).to(dtype)
    gated = x * gate
    return ((gated if weight is None else normed(gated, weight).flatten(1)) * factor).to(dtype)


def _continue(states: Tensor, rows: StateRows, advance: Callable[[int, Tensor], None]) -> None:
    """Continue the states of a step's sequences in place, and keep them where the step says. states: by slot."""
    # All are read before one is written.
    found = [torch.zeros_like(states[0]) if read < 0 else states[read].clone() for read in rows.reads.tolist()]
    for seq, (current, tokens) in enumerate(zip(found, _spans(rows.starts), strict=True)):
        first, last = rows.save_starts[seq : seq + 2].tolist()
        saves = dict(rows.saves[first:last].tolist())
        for token in tokens:
            advance(token, current)
            if token in saves:
                states[saves[token]] = current
        if tokens:
            states[int(rows.writes[seq])] = current


def _spans(starts: Tensor) -> Iterator[range]:
    bounds = starts.tolist()
    return map(range, bounds[:-1], bounds[1:])
