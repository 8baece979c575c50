"""The runner's places for adapters: who computes with which, and whose turn it is where there are more adapters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.policy.base import SchedulingPolicy
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.model.protocol import Adapter, ModelRunner


class AdapterSlots:
    """Which adapter each place has, and the running sequences that compute with it.

    A place that nobody computes with keeps its adapter until another one needs it, the least recently used first.
    """

    def __init__(self, count: int) -> None:
        self._users: list[set[Sequence]] = [set() for _ in range(count)]
        self._adapters: OrderedDict[int, Adapter | None] = OrderedDict.fromkeys(range(count))
        self._places: dict[str, int] = {}
        """By digest."""
        self._pending: set[int] = set()

    def settle(self) -> None:
        """Let go of sequences that run no more."""
        for place, users in enumerate(self._users):
            gone = [seq for seq in users if seq.row < 0]
            if gone:
                users.difference_update(gone)
                self._adapters.move_to_end(place)

    def place_for(self, adapter: Adapter) -> int | None:
        """Where an adapter is or could be; None while others compute in all places."""
        known = self._places.get(adapter.digest)
        return known if known is not None else next((at for at in self._adapters if not self._users[at]), None)

    def use(self, place: int, adapter: Adapter, seqs: Iterable[Sequence]) -> None:
        """Note that sequences which just started compute with an adapter, in the place that it was told."""
        before = self._adapters[place]
        if before is None or before.digest != adapter.digest:
            if self._users[place]:
                raise InvariantError(f"place {place} is to get another adapter while sequences compute with its own")
            if before is not None:
                del self._places[before.digest]
            self._adapters[place], self._places[adapter.digest] = adapter, place
            self._pending.add(place)
        self._adapters.move_to_end(place)
        self._users[place].update(seqs)

    def closed(self, waiting: Iterable[Sequence]) -> int | None:
        """The place that nobody more may join, so that the first one that waits for a place gets it in the end.

        It is the one that the fewest compute with.
        """
        if all(seq.adapter is None or self.place_for(seq.adapter) is not None for seq in waiting):
            return None
        return min(range(len(self._users)), key=lambda place: len(self._users[place]))

    def hand_over(self, runner: ModelRunner) -> None:
        """Give the runner the adapters that it lacks, before a step that computes with them."""
        for place in sorted(self._pending):
            adapter = self._adapters[place]
            if adapter is not None:
                runner.set_adapter(place, adapter)
            self._pending.discard(place)


class ByAdapter:
    """Another discipline, in which nobody starts without a place for its adapter; others pass who waits for one."""

    def __init__(self, inner: SchedulingPolicy, places: AdapterSlots) -> None:
        self._inner = inner
        self._places = places

    def added(self, seq: Sequence) -> None:
        """A sequence is about to be queued."""
        self._inner.added(seq)

    def ended(self, seq: Sequence, num_output_tokens: int) -> None:
        """A sequence came to its own end."""
        self._inner.ended(seq, num_output_tokens)

    def offer(self, waiting: Iterable[Sequence], start: Callable[[Sequence], bool]) -> None:
        """In the other's order, those for whom there is a place."""

        def start_in_place(seq: Sequence) -> bool:
            if seq.adapter is None:
                return start(seq)
            place = self._places.place_for(seq.adapter)
            if place is None:
                return False
            starting = [seq, *seq.forks]
            for one in starting:
                one.place = place
            if not start(seq):
                return False
            self._places.use(place, seq.adapter, starting)
            return True

        self._inner.offer(self._with_place(waiting), start_in_place)

    def pressing(self, waiting: Iterable[Sequence], running: list[Sequence]) -> tuple[Sequence, list[Sequence]] | None:
        """One for whom there is a place already: nobody gives way for that."""
        return self._inner.pressing(self._with_place(waiting), running)

    def victim(self, running: list[Sequence]) -> Sequence:
        """Who gives its blocks to another."""
        return self._inner.victim(running)

    def _with_place(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        self._places.settle()
        queued = list(waiting)
        closed = self._places.closed(queued)
        for seq in queued:
            place = None if seq.adapter is None else self._places.place_for(seq.adapter)
            if seq.adapter is None or (place is not None and place != closed):
                yield seq
