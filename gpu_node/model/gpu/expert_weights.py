"""Loads mixtures of experts for a GPU: the experts of a layer as one tensor for each matrix, and their router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.architecture.mlp import Mlp
from penstock.gpu_node.model.checkpoint.block_repacking import BLOCK, in_blocks
from penstock.gpu_node.model.checkpoint.stored_kinds import Stored
from penstock.gpu_node.model.checkpoint.stored_layer import StoredLayer, StoredLinear
from penstock.gpu_node.model.gpu.experts import GpuExperts
from penstock.gpu_node.model.gpu.linear import (
    BlockLinear,
    Int4Linear,
    InvariantLinear,
    KeptLinear,
    PlainLinear,
    ScaledLinear,
)
from penstock.gpu_node.model.torch_common.tensors import Convert, Converter, read_router_norm
from penstock.kernels.triton.experts import ExpertChoice, ExpertFormat, ExpertMatrices


class MatrixLoader(Protocol):
    """Loads matrices, each in the format that it chooses."""

    deterministic: bool

    def __call__(self, stored: StoredLinear, convert: Convert) -> KeptLinear:
        """Load a matrix, whose parts are concatenated by rows."""

    def experts(self, matrices: Sequence[StoredLinear], convert: Convert) -> ExpertMatrices:
        """Load a matrix of each expert as one tensor."""


def read_experts(
    stored: StoredLayer, spec: Mlp, convert: Converter, load: MatrixLoader, device: torch.device, norm_eps: float
) -> GpuExperts:
    """Read the experts of a layer, or those beside its MLP."""
    experts, routing = spec.experts, stored.routing
    if experts is None or stored.router is None:
        raise InvariantError("a layer without experts was read as one that has some")

    def floats(vector: Stored | None) -> Tensor | None:
        return None if vector is None else torch.from_numpy(vector.to_float32()).to(device)

    bias = None if routing is None or routing.bias is None else convert((routing.bias,))
    choice = ExpertChoice(
        per_token=experts.per_token,
        num_shared=experts.num_shared,
        by_sigmoid=experts.by_sigmoid,
        normalized=experts.normalized,
        scale=experts.scale,
        bias=None if routing is None else floats(routing.choice_bias),
        factors=None if routing is None else floats(routing.factors),
    )
    firsts, lasts = zip(*(stored.experts if stored.mixture is None else stored.mixture.experts), strict=True)
    return GpuExperts(
        spec=spec,
        router=(InvariantLinear if load.deterministic else PlainLinear)(convert((stored.router,)), bias),
        choice=choice,
        shared_gate=None if routing is None else floats(routing.shared_gate),
        mlp_in=load.experts(firsts, convert),
        mlp_out=load.experts(lasts, convert),
        router_norm=None if routing is None else read_router_norm(routing, convert, norm_eps),
        deterministic=load.deterministic,
    )


def stacked(kept: Sequence[KeptLinear]) -> ExpertMatrices:
    """Return matrices of one format as one tensor."""
    biases = [one.bias for one in kept if one.bias is not None]
    if len(biases) not in (0, len(kept)):
        # Shared experts have none.
        zeros = torch.zeros_like(biases[0])
        biases = [zeros if one.bias is None else one.bias for one in kept]
    bias = torch.stack(biases) if biases else None
    if floats := _all_of(kept, PlainLinear) or _all_of(kept, InvariantLinear):
        return ExpertMatrices("plain", _stack(floats, "weight"), None, bias)
    if packed := _all_of(kept, Int4Linear):
        return ExpertMatrices("int4", _stack(packed, "packed"), _stack(packed, "pairs"), bias)
    scaled = _all_of(kept, ScaledLinear)
    if not (numbers := scaled or _all_of(kept, BlockLinear)):
        raise InvariantError("the experts of a layer have several formats")
    kind: ExpertFormat = "rows" if scaled else "blocks"
    return ExpertMatrices(kind, _stack(numbers, "weight"), _stack(numbers, "scales"), bias)


def _all_of(kept: Sequence[KeptLinear], kind: type[KeptLinear]) -> Sequence[KeptLinear]:
    """Return the matrices if all of them are of a kind, else nothing."""
    return kept if all(isinstance(one, kind) for one in kept) else ()


def _stack(kept: Sequence[KeptLinear], name: str) -> Tensor:
    return torch.stack([getattr(one, name) for one in kept])


def mxfp4_experts(matrices: Sequence[StoredLinear], bias: Tensor | None, device: torch.device) -> ExpertMatrices:
    """Return the matrices of experts that are stored as MXFP4, in GGUF's blocks: an exponent, then 32 numbers."""
    rows = np.concatenate([_blocks(part) for one in matrices for part in one.weights])
    rows = rows.reshape(len(matrices), -1, *rows.shape[1:])
    numbers, exponents = np.ascontiguousarray(rows[..., 1:]), np.ascontiguousarray(rows[..., 0])
    weight = torch.from_numpy(numbers.reshape(*numbers.shape[:2], -1)).to(device)
    return ExpertMatrices("mxfp4", weight, torch.from_numpy(exponents).to(device), bias)


def _blocks(part: Stored) -> NDArray[np.uint8]:
    """Return a matrix's blocks, [rows, columns / 32, 17]."""
    tensor = in_blocks(part)
    return tensor.rows.reshape(tensor.shape[0], tensor.shape[1] // BLOCK, -1)
