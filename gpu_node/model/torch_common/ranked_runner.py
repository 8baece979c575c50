"""A model of the torch or the GPU runner that several processes compute: rank 0's side of its group."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import ConfigError, RequestError
from penstock.gpu_node.model.protocol import (
    Adapter,
    CacheSizes,
    Placement,
    RankBytes,
    RanksLostError,
    RankStats,
    StateSizes,
    StepHandle,
    StepPlan,
    StepResult,
    StepRunner,
    TokenMasks,
)
from penstock.gpu_node.model.ranks.group import RankGroup
from penstock.gpu_node.model.ranks.plain_exchange import PlainExchange
from penstock.gpu_node.model.torch_common.exchanges import RankFailedError
from penstock.gpu_node.model.torch_common.ranks import BrokenExchangeError, Communicator, RankLinks

log = logging.getLogger(__package__)

Result = TypeVar("Result")

_LOOK_S = 0.1
_GRACE_S = 2.0
"""An exchange with a rank that has ended fails within milliseconds; one with a host that is gone may wait for long."""
_NAME_BYTES = 128


class PartRunner(StepRunner, Protocol):
    """The runner of one rank's part of a model. The cache sizes are those of all ranks.

    `submit` also raises BrokenExchangeError if another rank is gone, and so does the result of its step.
    """

    @property
    def all_sample(self) -> bool:
        """Whether every rank samples, so that each needs to know what the rows sample by."""

    @property
    def held(self) -> RankBytes:
        """What this rank holds."""

    def start_logits(self, plan: StepPlan) -> Future[NDArray[np.float32]]:
        """Run a step that samples nothing; the result is the logits after each of its tokens, [num_tokens, vocab]."""

    def start_adapter(self, adapter_slot: int, find: Callable[[], Adapter]) -> Future[None]:
        """Load an adapter into a slot. If `find` or loading fails at one rank, it fails at all of them."""

    def start_profile(self) -> None:
        """As `ProfiledRunner.start_profile`."""

    def stop_profile(self) -> None:
        """As `ProfiledRunner.stop_profile`."""

    def write_profile(self, path: Path) -> None:
        """As `ProfiledRunner.write_profile`."""


class RankHost(Protocol):
    """Starts the further ranks of a model."""

    @property
    def group(self) -> RankGroup[PlainExchange]:
        """The group that it starts."""

    @property
    def num_stages(self) -> int:
        """The stages of the pipeline that its ranks are."""

    def start(self) -> None:
        """Start all ranks, and wait until each could join. Raises what `RankGroup.start` raises."""

    def load(self) -> tuple[PartRunner, str, RankLinks]:
        """Join the other ranks, and load this rank's part. Return it, the name of its arithmetic, and the links."""

    def leave(self, *, is_lost: bool) -> None:
        """End what `load` has joined, and `start` opened. is_lost: whether other ranks are gone."""

    def close(self) -> None:
        """Let no rank join any more."""


class _Facts(NamedTuple):
    """What does not change when the ranks start again, and is read meanwhile."""

    max_in_flight: int
    cache_sizes: CacheSizes
    placement: Placement
    verifies_drafts: bool


class RankedRunner:
    """Rank 0's part of a model, and the group of the others, which follow its messages."""

    def __init__(self, host: RankHost) -> None:
        """Start the ranks and load the model at all of them. Raises ConfigError that names a rank, and MemoryError."""
        self._host = host
        self._group = host.group
        self._adapters: dict[int, Adapter] = {}
        self._part: PartRunner | None = None
        self._masks: TokenMasks | None = None
        # An engine is not closed, but collected, or left to the end of the process.
        self._end = weakref.finalize(self, _end, host)
        try:
            self.arithmetic = self._begin()
        except BaseException:
            self._end()
            raise

    def _begin(self) -> str:
        self._why_loading = self._group.lost or "the ranks load the model"
        self._part = self._masks = None
        gc.collect()  # The memory of the part before is needed for the next one.
        self._host.leave(is_lost=self._group.is_lost)
        self._host.start()

        def load() -> tuple[PartRunner, str]:
            part, arithmetic, links = self._host.load()
            check_arithmetic(links.world, arithmetic)
            return part, arithmetic

        try:
            self._part, arithmetic = self._unless_lost(load)
        except RanksLostError as error:
            self._group.close()
            raise ConfigError(str(error)) from error
        except BaseException:
            self._group.close()
            raise
        part = self._own
        self._facts = _Facts(part.max_in_flight, part.cache_sizes, part.placement, part.verifies_drafts)
        return arithmetic

    @property
    def _own(self) -> PartRunner:
        if self._part is None:
            raise RanksLostError("the ranks were ended")
        return self._part

    @property
    def max_in_flight(self) -> int:
        """Steps in flight at once."""
        return self._facts.max_in_flight

    @property
    def cache_sizes(self) -> CacheSizes:
        """The KV blocks; a block's bytes are those of all ranks of the torch runner, or of one GPU."""
        return self._facts.cache_sizes

    @property
    def state_sizes(self) -> StateSizes:
        """None: ranks have no state slots."""
        return StateSizes()

    @property
    def placement(self) -> Placement:
        """Where rank 0's part is."""
        return self._facts.placement

    @property
    def verifies_drafts(self) -> bool:
        """Whether a step may sample after any of its tokens."""
        return self._facts.verifies_drafts

    def bind_thread(self) -> None:
        """As rank 0's part does."""
        self._own.bind_thread()

    def submit(self, plan: StepPlan) -> StepHandle:
        """Hand a step to all ranks, and start it here. Raises RanksLostError."""
        own = self._own
        self._hand_out_masks()
        self._hand_out(plan)
        self._masks = plan.sampling.masks if own.all_sample else None
        try:
            step = own.submit(plan)
        except BrokenExchangeError as error:
            self.note_step_end()
            raise self._lost(error) from error
        return _RankedStep(self, step)

    def note_step_end(self) -> None:
        """Note that a step has ended, or failed."""
        self._group.note_step_end()

    def logits(self, plan: StepPlan) -> NDArray[np.float32]:
        """Run a step that samples nothing and return the logits after each of its tokens, [num_tokens, vocab]."""
        own = self._own
        self._hand_out_masks()
        self._hand_out(plan, returns_logits=True)
        try:
            return self.wait(own.start_logits(plan))
        finally:
            self.note_step_end()

    def set_adapter(self, adapter_slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot of all ranks. Raises RequestError if one cannot."""
        own, words = self._own, self._group.exchange
        self._hand_out_masks()
        words.await_done()
        self._group.hand_out_adapter(adapter_slot, AdapterRef(name=adapter.name, digest=adapter.digest))
        try:
            self.wait(own.start_adapter(adapter_slot, lambda: adapter))
        except RankFailedError as error:
            problem = f"adapter {adapter.name!r} cannot be loaded by all ranks"
            raise RequestError(problem, code="adapter_unusable") from error
        self._adapters[adapter_slot] = adapter

    def recover(self) -> None:
        """Start all ranks again, load the model at all of them, and give them the adapters that they had."""
        self._begin()
        for adapter_slot, adapter in list(self._adapters.items()):
            self.set_adapter(adapter_slot, adapter)

    @property
    def is_lost(self) -> bool:
        """Whether a rank was lost."""
        return self._group.is_lost

    @property
    def ranks(self) -> RankStats:
        """The ranks, what they hold, and what they have spent at exchanges.

        An exchange within a stage takes at least as long as the rank of the stage spends at it that waits least. The
        rest counts as waiting. So does all of the time until another stage has computed something, and sent it.
        On GPUs exchanges are parts of graphs and are not measured.
        """
        part, stats = self._part, replace(self._group.stats, num_stages=self._host.num_stages)
        if part is None and not stats.lost:
            return replace(stats, lost=self._why_loading)
        if part is None or stats.lost:
            return stats
        stats = self._group.with_bytes(stats, part.held)
        if part.all_sample:
            return replace(stats, waited_s=(), exchanged_s=(), num_meetings=0)
        each = stats.num_ranks // stats.num_stages
        firsts = (rank - rank % each for rank in range(stats.num_ranks))
        least_s = tuple(min(stats.exchanged_s[first : first + each]) for first in firsts)
        spent_s = zip(stats.waited_s, stats.exchanged_s, least_s, strict=True)
        waited_s = tuple(for_stages_s + at_exchanges_s - own_s for for_stages_s, at_exchanges_s, own_s in spent_s)
        return replace(stats, waited_s=waited_s, exchanged_s=least_s)

    @property
    def rank_pids(self) -> list[int]:
        """The process of each further rank."""
        return self._group.pids

    def start_profile(self) -> None:
        """Start recording the operations of rank 0."""
        self._own.start_profile()

    def stop_profile(self) -> None:
        """Stop recording."""
        self._own.stop_profile()

    def write_profile(self, path: Path) -> None:
        """Write what was recorded as a compressed Chrome trace."""
        self._own.write_profile(path)

    def close(self) -> None:
        """End the ranks."""
        self._part = None
        self._end()

    def wait(self, step: Future[Result]) -> Result:
        """Wait for what all ranks do together. Raises RanksLostError."""
        while not wait([step], _LOOK_S).done:
            self._check(step)
        try:
            return step.result()
        except BrokenExchangeError as error:
            raise self._lost(error) from error

    def wait_for_device(self, step: StepHandle) -> StepResult:
        """Wait for a step of a GPU. Raises RanksLostError."""
        self._hand_out_masks()
        try:
            with self._group.exchange.waiting:
                result = step.result()
        except BrokenExchangeError as error:
            raise self._lost(error) from error
        self._group.check()  # An exchange that was ended leaves wrong numbers.
        return result

    def _hand_out(self, plan: StepPlan, *, returns_logits: bool = False) -> None:
        self._group.check()
        self._group.exchange.await_done()
        self._group.hand_out_step(plan, returns_logits=returns_logits, all_sample=self._own.all_sample)

    def _hand_out_masks(self) -> None:
        """Hand out the masks of the last step, which the engine writes while it runs."""
        masks, self._masks = self._masks, None
        if masks is None:
            return
        masks.wait()
        self._group.check()
        self._group.exchange.await_done()
        self._group.hand_out_masks(masks)

    def _check(self, work: Future[Any]) -> None:
        """Raise RanksLostError if a rank was lost, once `work` has ended or had the time to."""
        if not self._group.is_lost:
            return
        ends_s = time.monotonic() + _GRACE_S
        while not work.done() and time.monotonic() < ends_s:
            time.sleep(0.01)
        self._group.check()

    def _lost(self, error: BrokenExchangeError) -> RanksLostError:
        """Return the loss that broke an exchange. The group is lost afterwards."""
        ends_s = time.monotonic() + _GRACE_S
        while not self._group.is_lost and time.monotonic() < ends_s:
            time.sleep(0.01)
        self._group.lose(str(error))
        return RanksLostError(self._group.lost or str(error))

    def _unless_lost(self, work: Callable[[], Result]) -> Result:
        """Do work on a thread of its own, which is left alone if a rank is lost meanwhile. Raises RanksLostError."""
        done: Future[Result] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, name="penstock-load-rank", daemon=True).start()
        return self.wait(done)


class _RankedStep:
    """A step that all ranks compute."""

    def __init__(self, runner: RankedRunner, step: StepHandle) -> None:
        self._runner = runner
        self._step = step

    def result(self) -> StepResult:
        """Wait for the step. Raises its error, RanksLostError among them."""
        step = self._step
        try:
            return self._runner.wait(step) if isinstance(step, Future) else self._runner.wait_for_device(step)
        finally:
            self._runner.note_step_end()


def _end(host: RankHost) -> None:
    host.group.close()
    host.leave(is_lost=True)
    host.close()


def check_arithmetic(world: Communicator, name: str) -> None:
    """Wait until all ranks have loaded their parts. Raises ConfigError if one computes with another arithmetic."""
    own = torch.zeros(1, _NAME_BYTES, dtype=torch.uint8)
    text = name.encode()[:_NAME_BYTES]
    own[0, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    names = [bytes(row.tolist()).rstrip(b"\0").decode() for row in world.all_gather(own)]
    for rank, other in enumerate(names):
        if other != names[0]:
            raise ConfigError(f"rank {rank} has another arithmetic: {other}, and rank 0 has {names[0]}")
