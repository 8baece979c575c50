"""The main loop of a rank that is not rank 0: it does what the messages ask for, and ends with the group."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from penstock.contract.adapters import AdapterRef
from penstock.gpu_node.model.ranks.control import GroupMemory
from penstock.gpu_node.model.ranks.messages import Kind, RankStep, read_adapter, read_step
from penstock.kernels.cpu.exchange import Exchange

log = logging.getLogger(__package__)

_PATIENCE_S = 1.0
"""How long one wait for a message lasts. It ends at once if the group ends."""
_LOOK_S = 0.25


class RankRunner(Protocol):
    """A runner's part in a rank: it computes its share of each step, and samples nothing."""

    def run(self, step: RankStep) -> None:
        """Compute a step together with the other ranks; returns when this rank has done its part, or was told to stop.

        Memory that is lacking is voted on with the other ranks. Then no rank computes the step.
        """

    def load_adapter(self, adapter_slot: int, adapter: AdapterRef) -> None:
        """Load an adapter into a slot. Raises an error if it cannot, or if the adapter has another digest here."""


class MessageWords(Protocol):
    """What a rank needs to wait for messages; `Exchange` has it."""

    @property
    def is_aborted(self) -> bool:
        """Whether the group has ended."""

    def next_message(self, seen: int, patience_s: float) -> int:
        """Wait for a message after `seen`, for the end of the group, or for some time. Return the last one's number."""


def serve(memory: GroupMemory, exchange: Exchange, runner: RankRunner) -> None:
    """Do what the messages ask for, until the group is aborted."""
    for _ in numbers_of_messages(exchange):
        try:
            kind = memory.map_message()
        except MemoryError:
            # The first meeting of a step and that of an adapter are the same kind of vote.
            exchange.meet(is_refused=True)
            continue
        if kind is Kind.ADAPTER:
            _load_adapter(memory, exchange, runner)
        else:
            runner.run(read_step(memory.messages))


def numbers_of_messages(exchange: MessageWords) -> Iterator[int]:
    """Yield the number of each message, until the group is aborted."""
    seen = 0
    while not exchange.is_aborted:
        number = exchange.next_message(seen, _PATIENCE_S)
        if number != seen and not exchange.is_aborted:
            seen = number
            yield number


def _load_adapter(memory: GroupMemory, exchange: Exchange, runner: RankRunner) -> None:
    adapter_slot, adapter = read_adapter(memory.messages)
    is_refused = False
    try:
        runner.load_adapter(adapter_slot, adapter)
    except Exception as error:
        log.warning("a rank cannot load an adapter", extra={"adapter": adapter.name, "reason": str(error)})
        is_refused = True
    exchange.meet(is_refused=is_refused)


def end_without(
    memory: GroupMemory, lease_s: float, end: Callable[[], None] = lambda: os._exit(1), rank: int | None = None
) -> None:
    """Call `end` on a thread of its own once rank 0 has shown no life for `lease_s`. Rank 0 may be stopped or gone.

    With `rank`, the thread also shows that this rank's process runs.
    """
    threading.Thread(target=_watch, args=(memory, lease_s, end, rank), name="penstock-lease", daemon=True).start()


def _watch(memory: GroupMemory, lease_s: float, end: Callable[[], None], rank: int | None) -> None:
    life, silent_s, looked_s = memory.life, 0.0, time.monotonic()
    while silent_s < lease_s:
        if rank is not None:
            memory.pulses[rank] += 1
        time.sleep(_LOOK_S)
        now_s = time.monotonic()
        # Time in which this process did not run either does not count.
        silent_s += min(now_s - looked_s, 2 * _LOOK_S)
        looked_s = now_s
        if memory.life != life:
            life, silent_s = memory.life, 0.0
    end()
