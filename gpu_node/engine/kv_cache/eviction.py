"""In which order free blocks are handed out: those that hold nothing first, then cached ones, the least worth first."""

from __future__ import annotations

from typing import Literal

EvictionName = Literal["lru", "lfu", "length"]

_NUM_CLASSES: dict[EvictionName, int] = {"lru": 1, "lfu": 16, "length": 24}


class FreeList:
    """Free slots as rings of one doubly linked list: O(1) to add and to take out any, amortised O(1) to pop.

    A cached slot lies in the ring of `age + 1 + worth`, in the order in which it came. `age` is where the last evicted
    one lay, so that what is never asked for again does not stay for what it once was worth. All rings that are in use
    lie in [age, age + num_classes], hence one more than there are classes is enough.
    """

    def __init__(self, num_slots: int, num_classes: int) -> None:
        self._num_rings = num_classes + 1
        self._age = 0
        # Behind the slots: the heads of the rings, the last one that of the slots that hold nothing.
        self._blank = num_slots + self._num_rings
        self._next = list(range(self._blank + 1))
        self._prev = self._next.copy()
        for slot in reversed(range(num_slots)):
            self.add_blank(slot)

    def add_blank(self, slot: int) -> None:
        """A slot that holds nothing; the next one to be handed out."""
        self._link(slot, self._blank, self._next[self._blank])

    def add_cached(self, slot: int, worth: int) -> None:
        """A slot whose content may be asked for; 0 <= worth < num_classes."""
        head = self._head(self._age + 1 + worth)
        self._link(slot, self._prev[head], head)

    def remove(self, slot: int) -> None:
        """Take out a slot, wherever it lies."""
        before, after = self._prev[slot], self._next[slot]
        self._next[before], self._prev[after] = after, before

    def pop(self) -> int:
        """Take out the slot whose loss costs least. There must be one."""
        slot = self._next[self._blank]
        if slot == self._blank:
            while self._next[self._head(self._age)] == self._head(self._age):
                self._age += 1
            slot = self._next[self._head(self._age)]
        self.remove(slot)
        return slot

    def slots(self) -> list[int]:
        """All of them, each ring in its order; -1 behind a link that is torn."""
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
    """What a cached block is worth, as `eviction` counts it: nothing (lru), its uses (lfu), its prefix (length).

    A prefix counts by the length of the longest sequence that it was part of, in powers of two: computing it again
    costs that much. A head is worth at least as much as its tails, because whoever uses a tail uses the head.
    """

    def __init__(self, eviction: EvictionName) -> None:
        self.num_classes = _NUM_CLASSES[eviction]
        self.counts_uses = eviction == "lfu"
        self._counts_length = eviction == "length"

    def after_use(self, worth: int) -> int:
        """Of a block that was found in the cache once more."""
        return min(worth + self.counts_uses, self.num_classes - 1)

    def of_prefix(self, num_blocks: int) -> int:
        """Least worth of the blocks of a sequence of so many."""
        return min(num_blocks.bit_length(), self.num_classes - 1) if self._counts_length else 0
