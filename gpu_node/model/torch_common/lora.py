"""LoRA adapters of the torch runner: all rows of a step with the same adapter are multiplied together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_node.model.architecture.spec import MATRICES, ModelSpec
from penstock.gpu_node.model.protocol import NO_ADAPTER, Adapter, LowRank, MatrixName, StepPlan


@dataclass(frozen=True, slots=True)
class _Part:
    """A low-rank term that is added to the outputs from `first` on. down: [rank, in]; up: [rows, rank]."""

    first: int
    down: Tensor
    up: Tensor


_Weights: TypeAlias = dict[tuple[int, MatrixName], tuple[_Part, ...]]


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The adapter of each row of a step."""

    groups: tuple[tuple[_Weights, Tensor], ...]

    def add(self, layer: int, matrix: MatrixName, x: Tensor, out: Tensor) -> Tensor:
        """Add the adapters' products to the rows that have one, in place. x: [rows, in]; out: [rows, out]."""
        for weights, rows in self.groups:
            for part in weights.get((layer, matrix), ()):
                more = (x[rows] @ part.down.T) @ part.up.T
                out[rows, part.first : part.first + len(part.up)] += more
        return out

    def at(self, tokens: Tensor) -> Self:
        """Return the adapters of only the given tokens, [num_tokens]."""
        left = ((weights, torch.isin(tokens, rows).nonzero().flatten()) for weights, rows in self.groups)
        return type(self)(tuple(left))


class TorchAdapters:
    """The adapters that are loaded into a runner's adapter slots."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        """spec: of the rank's part."""
        self._spec = spec
        self._dtype = dtype
        self._weights: dict[int, _Weights] = {}

    def set(self, adapter_slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot."""
        matrices = ((layer, matrix) for layer in range(self._spec.num_layers) for matrix in MATRICES)
        self._weights[adapter_slot] = {
            at: tuple(self._part(at[1], part) for part in adapter.low_ranks(*at)) for at in matrices
        }

    def rows_of(self, plan: StepPlan) -> AdaptedRows:
        """Return the adapter of each row of a step."""
        if plan.adapters is None:
            return AdaptedRows(())
        slots = np.repeat(plan.adapters, np.diff(plan.query_starts))
        present = sorted({*slots.tolist()} - {NO_ADAPTER})
        return AdaptedRows(tuple((self._weights[at], torch.from_numpy(np.flatnonzero(slots == at))) for at in present))

    def _part(self, matrix: MatrixName, part: LowRank) -> _Part:
        firsts = list(accumulate((rows for _, rows in self._spec.parts_of(matrix)), initial=0))
        return _Part(firsts[part.part], *(torch.from_numpy(half).to(self._dtype) for half in (part.down, part.up)))
