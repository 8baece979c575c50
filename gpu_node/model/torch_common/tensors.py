"""Convert a checkpoint's tensors to torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from penstock.gpu_node.model.checkpoint.recurrences import ScanValues, values_of
from penstock.gpu_node.model.checkpoint.stored_kinds import Stored, StoredTensor
from penstock.gpu_node.model.checkpoint.stored_layer import (
    StoredLayer,
    StoredLinear,
    StoredMixture,
    StoredNorm,
    StoredRecurrence,
    StoredRouting,
    StoredTokenGate,
    StoredTokenInputs,
)
from penstock.gpu_node.model.torch_common.layers import (
    HeadWeights,
    LayerWeights,
    MixtureWeights,
    NoNorm,
    Norm,
    Product,
    RecurrentWeights,
    ScanWeights,
    TokenGateWeights,
    TokenInputWeights,
    missing,
)

Convert: TypeAlias = Callable[[tuple[Stored, ...]], Tensor]
"""Converts stored tensors to one tensor, with their rows one after another."""

_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SLAB_BYTES = 1 << 20
"""A matrix is dequantized in slabs of this many bytes of float32."""


class Converter:
    """Converts stored tensors to torch tensors of one dtype, on a device or, without one, in host memory.

    In host memory, a tensor that is stored in that dtype is not copied: it is a read-only view of the mapped file.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | None = None) -> None:
        self.dtype = dtype
        self.device = device

    def __call__(self, parts: tuple[Stored, ...]) -> Tensor:
        """Convert the parts to one tensor, with their rows one after another."""
        return self.tensor(parts[0]) if len(parts) == 1 else self._filled(parts)

    def tensor(self, stored: Stored) -> Tensor:
        """Convert one tensor and keep its shape."""
        view = _view(stored) if self.is_mapped(stored) else None
        return self._filled((stored,)) if view is None else view

    def is_mapped(self, stored: Stored) -> bool:
        """Return whether `tensor` returns a view of the mapped file for this tensor."""
        is_as_stored = isinstance(stored, StoredTensor) and stored.row_order is None
        return self.device is None and is_as_stored and _FLOATS.get(stored.kind) is self.dtype

    def _filled(self, parts: tuple[Stored, ...]) -> Tensor:
        sizes = [part.shape[0] for part in parts]
        values = torch.empty(sum(sizes), *parts[0].shape[1:], dtype=self.dtype, device=self.device)
        for part, target in zip(parts, torch.split(values, sizes), strict=True):
            _fill(target, part)
        return values


def read_layer(
    stored: StoredLayer,
    convert: Converter,
    norm_eps: float,
    linear: Callable[[StoredLinear, Converter], Product],
    norm_offset: float = 0.0,
) -> LayerWeights:
    """Read a layer's weights; `linear` makes its matrices."""

    def norm(stored: StoredNorm) -> Norm:
        return read_norm(stored, convert, norm_eps, norm_offset)

    def norm_or_none(stored: StoredNorm | None) -> Norm | None:
        return None if stored is None else norm(stored)

    attention_norm = norm_or_none(stored.attention_norm) or NoNorm(convert.dtype, convert.device)
    q_and_k = None
    if stored.head_norms is not None:
        of_queries, of_keys = stored.head_norms
        k_norm = NoNorm(convert.dtype, convert.device) if of_keys is None else norm(StoredNorm(of_keys, None))
        q_and_k = norm(StoredNorm(of_queries, None)), k_norm

    def mixture(stored: StoredMixture) -> MixtureWeights:
        return MixtureWeights(
            norm=norm(stored.norm),
            output_norm=norm(stored.output_norm),
            dense_norm=norm(stored.dense_norm),
            experts=tuple(experts(stored.experts)),
        )

    def experts(pairs: Iterable[tuple[StoredLinear, StoredLinear]]) -> list[tuple[Product, Product]]:
        return [(linear(inner, convert), linear(out, convert)) for inner, out in pairs]

    mlps, routing = experts(stored.experts), stored.routing
    (mlp_in, mlp_out), *more = mlps or [(missing, missing)]
    return LayerWeights(
        attention_norm=attention_norm,
        qkv=missing if stored.qkv is None else linear(stored.qkv, convert),
        head_norms=q_and_k,
        out=missing if stored.out is None else linear(stored.out, convert),
        mlp_norm=norm_or_none(stored.mlp_norm) or attention_norm,
        mlp_in=mlp_in,
        mlp_out=mlp_out,
        post_attention_norm=norm_or_none(stored.post_attention_norm),
        post_mlp_norm=norm_or_none(stored.post_mlp_norm),
        router=None if stored.router is None else linear(_router(stored.router, routing), convert),
        more_experts=tuple(more),
        recurrence=None if stored.recurrence is None else _read_recurrence(stored.recurrence, convert.device),
        sinks=_floats(stored.sinks, convert.device),
        head_gate=_floats(stored.head_gate, convert.device),
        mixer_out=missing if stored.mixer_out is None else linear(stored.mixer_out, convert),
        choice_bias=None if routing is None else _floats(routing.choice_bias, convert.device),
        shared_gate=None if routing is None else _floats(routing.shared_gate, convert.device),
        router_norm=None if routing is None else read_router_norm(routing, convert, norm_eps),
        expert_factors=None if routing is None else _floats(routing.factors, convert.device),
        mixture=None if stored.mixture is None else mixture(stored.mixture),
        token_gate=None if (gate := stored.token_gate) is None else _token_gate(gate, convert, linear, norm),
        output_scale=_floats(stored.output_scale, convert.device),
    )


def _token_gate(
    stored: StoredTokenGate,
    convert: Converter,
    linear: Callable[[StoredLinear, Converter], Product],
    norm: Callable[[StoredNorm], Norm],
) -> TokenGateWeights:
    return TokenGateWeights(linear(stored.gate, convert), linear(stored.out, convert), norm(stored.norm))


def read_token_inputs(
    stored: StoredTokenInputs | None,
    convert: Converter,
    norm_eps: float,
    linear: Callable[[StoredLinear, Converter], Product],
) -> TokenInputWeights | None:
    """Read the weights of tokens' embeddings for each layer. Rows of the table are read when a step needs them."""
    if stored is None:
        return None
    norm = read_norm(StoredNorm(stored.norm, None), convert, norm_eps)
    return TokenInputWeights(rows_of(stored.table, convert), linear(stored.projection, convert), norm)


def rows_of(table: Stored, convert: Converter) -> Callable[[Tensor], Tensor]:
    """Return a function from ids to rows of a table, which reads only these from the file."""

    def rows(ids: Tensor) -> Tensor:
        return convert.tensor(table.take_rows(ids.numpy(), len(ids), table.shape[1]))

    return rows


def _router(matrix: Stored, routing: StoredRouting | None) -> StoredLinear:
    bias = None if routing is None else routing.bias
    return StoredLinear((matrix,), () if bias is None else (bias,))


def _placed(values: NDArray[np.float32], device: torch.device | None) -> Tensor:
    tensor = torch.from_numpy(values)
    return tensor if device is None else tensor.to(device)


def read_router_norm(routing: StoredRouting, convert: Converter, eps: float) -> Norm | None:
    """Read the norm through which a router reads the hidden state; None if it has none."""
    if routing.norm is None:
        return None
    gains = _placed(routing.norm.to_float32() * np.float32(routing.norm_factor), convert.device)
    return Norm(gains.to(convert.dtype), None, eps)


def _floats(stored: Stored | None, device: torch.device | None) -> Tensor | None:
    return None if stored is None else _placed(stored.to_float32(), device)


def _read_recurrence(stored: StoredRecurrence, device: torch.device | None) -> RecurrentWeights:
    placed = partial(_placed, device=device)
    values = values_of(stored)
    heads: HeadWeights | ScanWeights | None = None
    if isinstance(found := values.heads, ScanValues):
        durations, rates, skips = map(placed, (found.duration_biases, found.decay_rates, found.skips))
        heads = ScanWeights(durations, rates, skips, None if found.norm is None else placed(found.norm))
    elif found is not None:
        arrays = found.gates, found.decay_rates, found.decay_biases, found.norm
        heads = HeadWeights(*map(placed, arrays))
    bias = None if values.bias is None else placed(values.bias)
    return RecurrentWeights(placed(values.convolution), bias, heads)


def read_norm(stored: StoredNorm, convert: Converter, eps: float, offset: float = 0.0) -> Norm:
    """Read a norm's weights."""
    bias = None if stored.bias is None else convert.tensor(stored.bias)
    return Norm(convert.tensor(stored.weight), bias, eps, offset)


def _view(stored: Stored) -> Tensor | None:
    """Return a torch view of a float tensor, mapped if its rows are stored in order; None for other kinds."""
    kind = _FLOATS.get(stored.kind)
    if kind is None or not isinstance(stored, StoredTensor):
        return None
    rows = stored.rows
    if rows.ctypes.data % kind.itemsize:
        # A file header of odd length misaligns the data, which some kernels cannot read.
        rows = rows.copy()
    # from_dlpack accepts read-only arrays; from_numpy does not.
    return from_dlpack(rows).view(kind).reshape(stored.shape)


def _fill(target: Tensor, stored: Stored) -> None:
    """Write a stored tensor's values to `target`; dequantize matrices in slabs."""
    view = _view(stored)
    if view is not None:
        target.copy_(view)
        return
    if len(stored.shape) == 1:
        target.copy_(torch.from_numpy(stored.to_float32()))
        return
    slab_rows = max(1, _SLAB_BYTES // (4 * stored.shape[1]))
    for first in range(0, len(target), slab_rows):
        end = min(first + slab_rows, len(target))
        target[first:end] = torch.from_numpy(stored.span(first, end).to_float32())
