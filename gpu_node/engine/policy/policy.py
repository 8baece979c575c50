"""Scheduling policies of an engine: the interface, first come first served, and the order of adapter slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.model.protocol import Adapter, ModelRunner

NumTokens = Callable[[Sequence], int]
"""Number of tokens of a running sequence, prompt included."""


@dataclass(frozen=True, slots=True)
class SharedDevice:
    """What sequences share."""

    num_slots: int
    num_blocks: int
    blocks_of: Callable[[int], int]
    """The number of blocks for a number of tokens."""


class SchedulingPolicy(Protocol):
    """The order in which a scheduler starts and preempts sequences."""

    @property
    def has_shares(self) -> bool:
        """Whether tenants have shares of the device and of a step's budget."""

    @property
    def takes_turns(self) -> bool:
        """Whether sequences get a step's tokens in turns where these do not suffice for all."""

    def added(self, seq: Sequence) -> None:
        """Note that a sequence is about to be queued."""

    def ended(self, seq: Sequence, num_output_tokens: int) -> None:
        """Note that a sequence ended by itself, with its number of output tokens."""

    def startable(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        """Return the waiting sequences that could start now if rows and blocks were free."""

    def offer(self, waiting: Iterable[Sequence], start: Callable[[Sequence], bool]) -> None:
        """Call `start` for waiting sequences, in the policy's order. It returns False where a sequence does not fit.

        A policy must offer the turns of `in_turns` one after another. Within a turn it may offer more sequences after
        one that does not fit. In `waiting` swapped sequences come first, then those that lost their blocks, then new
        ones in order of arrival.
        """

    def preemption_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], num_tokens: NumTokens
    ) -> tuple[Sequence, list[Sequence]] | None:
        """Return a waiting sequence that may preempt others, with the sequences to preempt, in order; or None."""

    def share_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], device: SharedDevice
    ) -> tuple[Sequence, list[Sequence]] | None:
        """Return a sequence of a tenant below its share, with those to preempt for it, in order; or None."""

    def victim(self, running: list[Sequence], num_tokens: NumTokens) -> Sequence:
        """Return the sequence to preempt when a running one finds no free block; it may be the same one."""


def in_turns(waiting: Iterable[Sequence]) -> Iterator[list[Sequence]]:
    """Yield waiting sequences in turns: protected background work, foreground work, other background work.

    The caller starts sequences of a turn before it asks for the next one. Other background work may not start while a
    foreground sequence waits, because that one would need its capacity.
    """
    queued = list(waiting)
    foreground = [seq for seq in queued if not seq.background]
    if len(foreground) == len(queued):
        yield queued
        return
    yield [seq for seq in queued if seq.is_protected]
    yield foreground
    if all(seq.row >= 0 for seq in foreground):
        yield [seq for seq in queued if seq.background and not seq.is_protected]


class FirstComeFirstServed:
    """First come, first served: no sequence overtakes another, and the newest running one is preempted."""

    has_shares = takes_turns = False

    def added(self, seq: Sequence) -> None:
        """Do nothing: the queue keeps the order of arrival."""

    def ended(self, seq: Sequence, num_output_tokens: int) -> None:
        """Do nothing: output lengths do not matter here."""

    def startable(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        """Return all waiting sequences."""
        return waiting

    def offer(self, waiting: Iterable[Sequence], start: Callable[[Sequence], bool]) -> None:
        """Start sequences in queue order, up to the first one that does not fit."""
        for turn in in_turns(waiting):
            for seq in turn:
                if not start(seq):
                    break

    def preemption_request(self, waiting: Iterable[Sequence], running: list[Sequence], num_tokens: NumTokens) -> None:
        """Return None: waiting sequences never preempt running ones."""

    def share_request(self, waiting: Iterable[Sequence], running: list[Sequence], device: SharedDevice) -> None:
        """Return None: tenants have no shares."""

    def victim(self, running: list[Sequence], num_tokens: NumTokens) -> Sequence:
        """Return the newest running sequence."""
        return running[-1]


class AdapterSlots:
    """The adapter in each slot, and the running sequences that use it.

    A slot without users keeps its adapter until another adapter needs the slot; the least recently used one is replaced
    first.
    """

    def __init__(self, count: int) -> None:
        self._users: list[set[Sequence]] = [set() for _ in range(count)]
        self._adapters: OrderedDict[int, Adapter | None] = OrderedDict.fromkeys(range(count))
        # Keyed by id: digest of an adapter, which the operator chose.
        self._slots: dict[str, int] = {}
        """Slot by adapter digest."""
        self._pending: set[int] = set()

    def release_stopped(self) -> None:
        """Remove sequences that no longer run from the users of their slots."""
        for slot, users in enumerate(self._users):
            gone = [seq for seq in users if seq.row < 0]
            if gone:
                users.difference_update(gone)
                self._adapters.move_to_end(slot)

    def slot_for(self, adapter: Adapter) -> int | None:
        """Return the slot that has an adapter or could load it; None while other adapters are in use in all slots."""
        known = self._slots.get(adapter.digest)
        return known if known is not None else next((at for at in self._adapters if not self._users[at]), None)

    def use(self, slot: int, adapter: Adapter, seqs: Iterable[Sequence]) -> None:
        """Assign a slot, as returned by `slot_for`, to an adapter and the sequences that just started with it."""
        before = self._adapters[slot]
        if before is None or before.digest != adapter.digest:
            if self._users[slot]:
                raise InvariantError(f"slot {slot} cannot change its adapter while sequences use it")
            if before is not None:
                del self._slots[before.digest]
            self._adapters[slot], self._slots[adapter.digest] = adapter, slot
            self._pending.add(slot)
        self._adapters.move_to_end(slot)
        self._users[slot].update(seqs)

    def closed_slot(self, waiting: Iterable[Sequence]) -> int | None:
        """Return the slot that stops accepting sequences so that a waiting adapter gets it; None if no adapter waits.

        It is the slot with the fewest users.
        """
        if all(seq.adapter is None or self.slot_for(seq.adapter) is not None for seq in waiting):
            return None
        return min(range(len(self._users)), key=lambda slot: len(self._users[slot]))

    def load_pending(self, runner: ModelRunner) -> None:
        """Load newly assigned adapters into the runner, before a step that uses them.

        An adapter that cannot be loaded fails only steps with its own sequences.
        """
        for slot in sorted(self._pending):
            adapter = self._adapters[slot]
            if adapter is not None and any(seq.row >= 0 for seq in self._users[slot]):
                runner.set_adapter(slot, adapter)
                self._pending.discard(slot)


class ByAdapter:
    """Wraps a policy so that a sequence starts only with a slot for its adapter; others may overtake it meanwhile."""

    def __init__(self, inner: SchedulingPolicy, slots: AdapterSlots) -> None:
        self._inner = inner
        self._slots = slots

    @property
    def has_shares(self) -> bool:
        """Whether tenants have shares under the inner policy."""
        return self._inner.has_shares

    @property
    def takes_turns(self) -> bool:
        """Whether sequences get a step's tokens in turns under the inner policy."""
        return self._inner.takes_turns

    def added(self, seq: Sequence) -> None:
        """Note that a sequence is about to be queued."""
        self._inner.added(seq)

    def ended(self, seq: Sequence, num_output_tokens: int) -> None:
        """Note that a sequence ended by itself."""
        self._inner.ended(seq, num_output_tokens)

    def startable(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        """Return the waiting sequences that have a slot."""
        return self._with_slot(waiting)

    def offer(self, waiting: Iterable[Sequence], start: Callable[[Sequence], bool]) -> None:
        """Offer, in the inner policy's order, the sequences that have a slot."""

        def start_in_slot(seq: Sequence) -> bool:
            if seq.adapter is None:
                return start(seq)
            slot = self._slots.slot_for(seq.adapter)
            if slot is None:
                return False
            starting = [seq, *seq.forks]
            for one in starting:
                one.adapter_slot = slot
            if not start(seq):
                return False
            self._slots.use(slot, seq.adapter, starting)
            return True

        self._inner.offer(self._with_slot(waiting), start_in_slot)

    def preemption_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], num_tokens: NumTokens
    ) -> tuple[Sequence, list[Sequence]] | None:
        """Return the inner policy's request among sequences that have a slot. None is preempted to free a slot."""
        return self._inner.preemption_request(self._with_slot(waiting), running, num_tokens)

    def share_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], device: SharedDevice
    ) -> tuple[Sequence, list[Sequence]] | None:
        """Return the inner policy's request among sequences that have a slot."""
        return self._inner.share_request(self._with_slot(waiting), running, device)

    def victim(self, running: list[Sequence], num_tokens: NumTokens) -> Sequence:
        """Return the inner policy's victim."""
        return self._inner.victim(running, num_tokens)

    def _with_slot(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        self._slots.release_stopped()
        queued = list(waiting)
        closed = self._slots.closed_slot(queued)
        for seq in queued:
            slot = None if seq.adapter is None else self._slots.slot_for(seq.adapter)
            if seq.adapter is None or (slot is not None and slot != closed):
                yield seq
