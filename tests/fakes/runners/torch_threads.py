"""Ranks of the torch runner as threads of the test's process: what they compute is the same, and they start at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
from fixtures.thread_ranks import linked_threads
from numpy.typing import NDArray

from penstock.gpu_node.model.loading import load
from penstock.gpu_node.model.protocol import Adapter, CacheSizes, Placement, StateSizes, StepPlan, StepResult
from penstock.gpu_node.model.torch_common.exchanges import RankFailedError
from penstock.gpu_node.model.torch_cpu.runner import TorchRunner

Result = TypeVar("Result")


class RankedStep:
    """A step that all ranks compute."""

    def __init__(self, steps: Sequence[Future[StepResult]]) -> None:
        self._steps = steps

    def result(self) -> StepResult:
        """Wait for all ranks; return the result of rank 0. Raises the error of the rank that failed."""
        return _of_first(step.result for step in self._steps)


class RankThreads:
    """Runs each step on all ranks of a group; each rank has its own thread."""

    max_in_flight = 1

    def __init__(self, ranks: Sequence[TorchRunner]) -> None:
        self._ranks = ranks

    @property
    def cache_sizes(self) -> CacheSizes:
        """The number of the KV blocks; a block's bytes are those of all ranks."""
        return self._ranks[0].cache_sizes

    @property
    def state_sizes(self) -> StateSizes:
        """Those of rank 0."""
        return self._ranks[0].state_sizes

    @property
    def placement(self) -> Placement:
        """On the CPU."""
        return self._ranks[0].placement

    @property
    def verifies_drafts(self) -> bool:
        """True: a step may sample after any of its tokens."""
        return True

    def bind_thread(self) -> None:
        """Do nothing: steps run on separate threads."""

    def submit(self, plan: StepPlan) -> RankedStep:
        """Start a step."""
        return RankedStep([rank.submit(plan) for rank in self._ranks])

    def logits(self, plan: StepPlan) -> NDArray[np.float32]:
        """Run a step that samples nothing and return the logits after each of its tokens, [num_tokens, vocab]."""
        steps = [rank.start_logits(plan) for rank in self._ranks]
        return _of_first(step.result for step in steps)

    def set_adapter(self, adapter_slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot of each rank, after the steps that were already submitted."""
        loads = [rank.start_adapter(adapter_slot, lambda: adapter) for rank in self._ranks]
        _of_first(load.result for load in loads)

    def start_profile(self) -> None:
        """Start recording the operations of rank 0."""
        self._ranks[0].start_profile()

    def stop_profile(self) -> None:
        """Stop recording."""
        self._ranks[0].stop_profile()

    def write_profile(self, path: Path) -> None:
        """Write what was recorded as a compressed Chrome trace."""
        self._ranks[0].write_profile(path)


def _of_first(waits: Iterable[Callable[[], Result]]) -> Result:
    """Wait for all ranks and return the result of rank 0. If ranks failed, raise the error of one with a reason."""
    results, errors = [], []
    for wait in waits:
        try:
            results.append(wait())
        except Exception as error:
            errors.append(error)
    if errors:
        raise min(errors, key=lambda error: isinstance(error, RankFailedError))
    return results[0]


def _load_ranks(_described: Any, options: Any, load_rank: Any) -> tuple[RankThreads, str]:
    sizes = options.tensor_parallel_size, options.pipeline_parallel_size
    loaded = [load_rank(options=options, links=links) for links in linked_threads(*sizes)]
    return RankThreads([runner for runner, _ in loaded]), loaded[0][1]


@contextmanager
def torch_ranks_as_threads() -> Iterator[None]:
    """Start further ranks as threads."""
    with mock.patch.object(load, "_load_ranks", _load_ranks):
        yield
