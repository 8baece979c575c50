"""The GPU runner's ranks in one process, by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from fakes.runners.runner_options import runner_options
from fixtures.turn_ranks import TurnRanks, on_all_ranks
from numpy.typing import NDArray

from penstock.gpu_node.model.loading.load import find_model, load_found
from penstock.gpu_node.model.protocol import Adapter, CacheSizes, Placement, StateSizes, StepPlan, StepResult
from penstock.gpu_node.model.torch_common.ranks import RankLinks

Result = TypeVar("Result")


class TurnTakingRunner:
    """Runs each step on all ranks. All of them must sample the same tokens."""

    arithmetic = ""
    max_in_flight = 2
    verifies_drafts = False

    def __init__(self, folder: Path, size: int, **options: Any) -> None:
        self.ranks = [TurnRanks.group(size) for _ in range(2)]
        given = runner_options(runner="gpu", tensor_parallel_size=size, **options)
        self._size = size

        def load(rank: int) -> Any:
            found = find_model(str(folder), given, lambda *_: None)
            links = RankLinks(self.ranks[0][rank], self.ranks[1][rank])
            self.arithmetic = (loaded := load_found(found, given, lambda *_: None, links)).arithmetic
            return loaded.runner

        self.runners = self.on_all(load)

    @property
    def cache_sizes(self) -> CacheSizes:
        """Those of rank 0."""
        sizes: CacheSizes = self.runners[0].cache_sizes
        return sizes

    @property
    def state_sizes(self) -> StateSizes:
        """Those of rank 0."""
        sizes: StateSizes = self.runners[0].state_sizes
        return sizes

    @property
    def placement(self) -> Placement:
        """On no GPU."""
        placement: Placement = self.runners[0].placement
        return placement

    def bind_thread(self) -> None:
        """Do nothing."""

    def submit(self, plan: StepPlan) -> _TurnStep:
        """Start a step at all ranks."""
        return _TurnStep(self, self.on_all(lambda rank: self.runners[rank].submit(plan)))

    def logits(self, plan: StepPlan) -> NDArray[np.float32]:
        """Return the logits, which all ranks must have alike."""
        first: NDArray[np.float32]
        first, *others = self.on_all(lambda rank: self.runners[rank].logits(plan))
        assert all(np.array_equal(first, other) for other in others)
        return first

    def set_adapter(self, adapter_slot: int, adapter: Adapter) -> None:
        """Load it at all ranks."""
        self.on_all(lambda rank: self.runners[rank].set_adapter(adapter_slot, adapter))

    def on_all(self, work: Callable[[int], Result]) -> list[Result]:
        """Do the work of each rank; return the results by rank."""
        return on_all_ranks(self._size, work)


class _TurnStep:
    def __init__(self, runner: TurnTakingRunner, steps: Sequence[Any]) -> None:
        self._runner = runner
        self._steps = steps

    def result(self) -> StepResult:
        first: StepResult
        first, *others = self._runner.on_all(lambda rank: self._steps[rank].result())
        assert all(np.array_equal(first.tokens, other.tokens) for other in others)
        return first
