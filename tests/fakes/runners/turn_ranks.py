"""Ranks of the GPU runner as threads that take turns, because Triton's interpreter runs on one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from fakes.runners.runner_options import runner_options
from numpy.typing import NDArray
from torch import Tensor

from penstock.gpu_node.model.loading.load import find_model, load_found
from penstock.gpu_node.model.protocol import Adapter, CacheSizes, Placement, StepPlan, StepResult
from penstock.gpu_node.model.torch_common.ranks import ThreadRanks

Result = TypeVar("Result")
Call: TypeAlias = tuple[str, tuple[int, ...], str]
"""Kind, shape and dtype of an exchange."""
_TURN = threading.Lock()


class TurnRanks(ThreadRanks):
    """Gives the turn to other ranks at each exchange, and records the exchanges."""

    calls: list[Call]

    def sum(self, x: Tensor) -> Tensor:
        """As NCCL does, in place."""
        self._record("sum", x)
        return x.copy_(super().sum(x.clone()))

    def all_gather(self, x: Tensor) -> Tensor:
        """Record it."""
        self._record("all_gather", x)
        return super().all_gather(x.clone())

    def _record(self, kind: str, x: Tensor) -> None:
        assert x.is_contiguous()
        if not hasattr(self, "calls"):
            self.calls = []
        self.calls.append((kind, tuple(x.shape), str(x.dtype).removeprefix("torch.")))

    def _exchanged(self, x: Tensor) -> list[Tensor]:
        _TURN.release()
        try:
            return super()._exchanged(x)
        finally:
            _TURN.acquire()


class TurnTakingRunner:
    """Runs each step on all ranks. All of them must sample the same tokens."""

    max_in_flight = 2
    verifies_drafts = False

    def __init__(self, folder: Path, size: int, **options: Any) -> None:
        self.ranks = [TurnRanks.group(size) for _ in range(2)]
        given = runner_options(runner="gpu", tensor_parallel_size=size, **options)
        self._threads = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(size)]

        def load(rank: int) -> Any:
            found = find_model(str(folder), given, lambda *_: None)
            device, host = (group[rank] for group in self.ranks)
            self.arithmetic = (loaded := load_found(found, given, lambda *_: None, (device, host))).arithmetic
            return loaded.runner

        self.runners = self._on_all(load)

    @property
    def cache_sizes(self) -> CacheSizes:
        """Those of rank 0."""
        return self.runners[0].cache_sizes

    @property
    def placement(self) -> Placement:
        """On no GPU."""
        return self.runners[0].placement

    def bind_thread(self) -> None:
        """Do nothing."""

    def submit(self, plan: StepPlan) -> _TurnStep:
        """Start a step at all ranks."""
        return _TurnStep(self, self._on_all(lambda rank: self.runners[rank].submit(plan)))

    def logits(self, plan: StepPlan) -> NDArray[np.float32]:
        """Return the logits, which all ranks must have alike."""
        first, *others = self._on_all(lambda rank: self.runners[rank].logits(plan))
        assert all(np.array_equal(first, other) for other in others)
        return first

    def set_adapter(self, adapter_slot: int, adapter: Adapter) -> None:
        """Load it at all ranks."""
        self._on_all(lambda rank: self.runners[rank].set_adapter(adapter_slot, adapter))

    def _on_all(self, work: Callable[[int], Result]) -> list[Result]:
        def in_turn(rank: int) -> Result:
            with _TURN:
                return work(rank)

        running = [thread.submit(in_turn, rank) for rank, thread in enumerate(self._threads)]
        return [one.result() for one in running]


class _TurnStep:
    def __init__(self, runner: TurnTakingRunner, steps: Sequence[Any]) -> None:
        self._runner = runner
        self._steps = steps

    def result(self) -> StepResult:
        first, *others = self._runner._on_all(lambda rank: self._steps[rank].result())
        assert all(np.array_equal(first.tokens, other.tokens) for other in others)
        return first
