"""The order in which free blocks are taken: blank ones first, then cached ones by rising eviction value."""

from __future__ import annotations

from typing import Literal

EvictionName = Literal["lru", "lfu", "length"]

_NUM_CLASSES: dict[EvictionName, int] = {"lru": 1, "lfu": 16, "length": 24}


class FreeList:
    """Free slots as rings of one doubly linked list: add and remove in O(1), pop in amortized O(1).

    A cached slot is in the ring `age + 1 + worth`, in order of arrival. `age` is the ring of the last evicted slot, so
    a slot that is never used again loses its rank with time. All rings in use are in [age, age + num_classes], so one
    more ring than there are classes is enough.
    """

    def __init__(self, num_slots: int, num_classes: int) -> None:
        self._num_rings = num_classes + 1
        self._age = 0
        # After the slots: the heads of the rings. The last ring holds the blank slots.
        self._blank = num_slots + self._num_rings
        self._next = list(range(self._blank + 1))
        self._prev = self._next.copy()
        for slot in reversed(range(num_slots)):
            self.add_blank(slot)

    def add_blank(self, slot: int) -> None:
        """Add a slot without content; it is the next one to be popped."""
        self._link(slot, self._blank, self._next[self._blank])

    def add_cached(self, slot: int, worth: int) -> None:
        """Add a slot with cached content; 0 <= worth < num_classes."""
        head = self._head(self._age + 1 + worth)
        self._link(slot, self._prev[head], head)

    def remove(self, slot: int) -> None:
        """Remove any slot."""
        before, after = self._prev[slot], self._next[slot]
        self._next[before], self._prev[after] = after, before

    def pop(self) -> int:
        """Remove and return the slot of the lowest value. The list must not be empty."""
        slot = self._next[self._blank]
        if slot == self._blank:
            while self._next[self._head(self._age)] == self._head(self._age):
                self._age += 1
            slot = self._next[self._head(self._age)]
        self.remove(slot)
        return slot

    def slots(self) -> list[int]:
        """Return all slots, each ring in its order; -1 marks a broken link."""
        found: list[int] = []
        for head in (self._blank, *(self._head(self._age + i) for i in range(self._num_rings))):
            at = head
            while (after := self._next[at]) != head:
                if self._prev[after] != at or len(found) > len(self._next):
                    return [*found, -1]
                found.append(after)
                at = after
        return found

    def _head(self, rank: int) -> int:
        return self._blank - self._num_rings + rank % self._num_rings

    def _link(self, slot: int, before: int, after: int) -> None:
        self._next[before] = self._prev[after] = slot
        self._prev[slot], self._next[slot] = before, after


class EvictionValue:
    """The value of a cached block: zero (lru), its number of uses (lfu), or the length of its prefix (length).

    Length is that of the longest sequence with this prefix, in powers of two, because recomputing the prefix costs that
    much. An earlier block is worth at least as much as a later one, because a sequence that uses the later one uses
    both.
    """

    def __init__(self, eviction: EvictionName) -> None:
        self.num_classes = _NUM_CLASSES[eviction]
        self.counts_uses = eviction == "lfu"
        self._counts_length = eviction == "length"

    def after_use(self, worth: int) -> int:
        """Return the value of a block after one more cache hit."""
        return min(worth + self.counts_uses, self.num_classes - 1)

    def of_prefix(self, num_blocks: int) -> int:
        """Return the least value of the blocks of a sequence of `num_blocks` blocks."""
        return min(num_blocks.bit_length(), self.num_classes - 1) if self._counts_length else 0
