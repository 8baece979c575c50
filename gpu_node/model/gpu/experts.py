"""Mixtures of experts on a GPU: the matrices of a layer's experts as one tensor, and what its tokens get of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.gpu_node.model.architecture.mlp import Mlp
from penstock.gpu_node.model.gpu.linear import InvariantLinear, PlainLinear
from penstock.gpu_node.model.torch_common.layers import Norm
from penstock.gpu_node.model.torch_common.ranks import Communicator
from penstock.kernels.triton.blocks import quantize_blocks
from penstock.kernels.triton.experts import (
    ExpertChoice,
    ExpertMatrices,
    Routes,
    choose_experts,
    multiply_experts,
    sum_experts,
)
from penstock.kernels.triton.invariant import multiply_invariant
from penstock.kernels.triton.layers import Clamp, activate, gate_mul
from penstock.kernels.triton.norms import add_norm
from penstock.kernels.triton.products import quantize_vectors


@dataclass(frozen=True, slots=True)
class GpuExperts:
    """The mixture of experts of a layer."""

    spec: Mlp
    router: PlainLinear | InvariantLinear
    """Never quantized: its few outputs decide which experts are computed."""
    choice: ExpertChoice
    shared_gate: Tensor | None
    """[1, hidden] in float32"""
    mlp_in: ExpertMatrices
    mlp_out: ExpertMatrices
    router_norm: Norm | None = None
    """Through which the router reads the hidden state; None: it reads what the experts read."""
    deterministic: bool = False

    def mix(self, normed: Tensor, residual: Tensor, slots: Tensor, ranks: Communicator) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, [num_tokens, hidden] in float32.

        normed: what experts read of `residual`, [num_tokens, hidden]; slots: [num_tokens], negative for padding tokens;
        ranks: each has a part of every expert, so they must choose alike.
        """
        read = normed if self.router_norm is None else add_norm(residual, None, self.router_norm)
        scores = ranks.from_first(self.router(read).contiguous())
        gates = None
        if self.shared_gate is not None:
            gates = multiply_invariant(normed.float(), self.shared_gate, None).flatten()
        routes = choose_experts(scores, self.choice, slots, gates)
        inner = self._product(normed, self.mlp_in, routes, gathers=True)
        return sum_experts(self._product(activated(inner, self.spec), self.mlp_out, routes, gathers=False), routes)

    def _product(self, x: Tensor, matrices: ExpertMatrices, routes: Routes, *, gathers: bool) -> Tensor:
        rows, scales = x, None
        if matrices.format == "rows":
            rows, scales = quantize_vectors(x, matrices.weight.dtype)
        elif matrices.format == "blocks":
            rows, scales = quantize_blocks(x)
        fixed = self.deterministic
        return multiply_experts(rows, matrices, routes, x.dtype, gathers=gathers, x_scales=scales, deterministic=fixed)


def clamp_of(spec: Mlp) -> Clamp | None:
    """Return the limit and the slope of an MLP's clamped gates."""
    return None if spec.clamped_gate is None else (spec.clamped_gate.limit, spec.clamped_gate.slope)


def scale_halves(inner: Tensor, spec: Mlp) -> None:
    """Multiply gates and up projections by an MLP's factors, in place: outputs grow with what gates multiply.

    No MLP without gates, or with clamped ones, has a factor here (`special_features`).
    """
    for part, factor in zip(inner.chunk(2, dim=1), (spec.gate_factor, spec.output_factor), strict=True):
        if factor != 1:
            part.mul_(factor)


def activated(inner: Tensor, spec: Mlp) -> Tensor:
    """Return the activation of an MLP. inner: the products with its first matrix, which this may change."""
    scale_halves(inner, spec)
    if not spec.is_gated:
        return activate(inner, spec.activation)
    return gate_mul(inner, spec.activation, clamp_of(spec))
