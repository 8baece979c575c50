"""The order in which free blocks are taken: first blank ones, then the cached ones of the largest tenant by value."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

EvictionName = Literal["lru", "lfu", "length"]

MAX_IDLE_TURNOVERS = 32
"""A tenant that used no block while the pool was evicted so often in whole loses its blocks before all others."""

_NUM_CLASSES: dict[EvictionName, int] = {"lru": 1, "lfu": 16, "length": 24}


class FreeList:
    """Free slots as rings of doubly linked lists: add and remove in O(1), pop in amortized O(1) for one owner.

    A cached slot is in its owner's ring `age + 1 + worth`, in order of arrival. `age` is the ring of the owner's last
    evicted slot, so a slot that is never used again loses its rank with time. All rings in use are in
    [age, age + num_classes], so one more ring than there are classes is enough.
    """

    def __init__(self, num_slots: int, num_classes: int) -> None:
        self._num_rings = num_classes + 1
        # After the slots: the head of the blank slots, then those of the owners' rings.
        self._blank = num_slots
        self._next = list(range(num_slots + 1))
        self._prev = self._next.copy()
        self._rings: dict[str, _Rings] = {}
        """The rings of owners with free cached slots."""
        self._unused: list[int] = []
        """First heads of rings that no owner has."""
        self._owners: list[_Rings | None] = [None] * num_slots
        for slot in reversed(range(num_slots)):
            self.add_blank(slot)

    @property
    def owners(self) -> Collection[str]:
        """Owners with free cached slots."""
        return self._rings.keys()

    def add_blank(self, slot: int) -> None:
        """Add a slot without content; it is the next one to be popped."""
        self._link(slot, self._blank, self._next[self._blank])

    def add_cached(self, slot: int, worth: int, owner: str = "") -> None:
        """Add a slot with cached content; 0 <= worth < num_classes."""
        rings = self._rings.get(owner)
        if rings is None:
            rings = self._rings[owner] = _Rings(owner, self._new_heads())
        rings.num_slots += 1
        self._owners[slot] = rings
        head = self._head(rings, rings.age + 1 + worth)
        self._link(slot, self._prev[head], head)

    def remove(self, slot: int) -> None:
        """Remove any slot."""
        before, after = self._prev[slot], self._next[slot]
        self._next[before], self._prev[after] = after, before
        rings = self._owners[slot]
        if rings is not None:
            self._owners[slot] = None
            rings.num_slots -= 1
            if not rings.num_slots:
                del self._rings[rings.owner]
                self._unused.append(rings.first)

    def pop_blank(self) -> int | None:
        """Remove and return a slot without content, or return None."""
        slot = self._next[self._blank]
        if slot == self._blank:
            return None
        self.remove(slot)
        return slot

    def pop_cached(self, owner: str) -> int:
        """Remove and return the slot of the lowest value among an owner's, of which there must be one."""
        rings = self._rings[owner]
        while self._next[self._head(rings, rings.age)] == self._head(rings, rings.age):
            rings.age += 1
        slot = self._next[self._head(rings, rings.age)]
        self.remove(slot)
        return slot

    def slots(self) -> list[int]:
        """Return all slots, each ring in its order; -1 marks a broken link."""
        found: list[int] = []
        heads = [self._head(rings, rings.age + i) for rings in self._rings.values() for i in range(self._num_rings)]
        for head in (self._blank, *heads):
            at = head
            while (after := self._next[at]) != head:
                if self._prev[after] != at or len(found) > len(self._next):
                    return [*found, -1]
                found.append(after)
                at = after
        return found

    def _head(self, rings: _Rings, rank: int) -> int:
        return rings.first + rank % self._num_rings

    def _new_heads(self) -> int:
        """Return the first of the heads of empty rings."""
        if self._unused:
            return self._unused.pop()
        first = len(self._next)
        heads = range(first, first + self._num_rings)
        self._next += heads
        self._prev += heads
        return first

    def _link(self, slot: int, before: int, after: int) -> None:
        self._next[before] = self._prev[after] = slot
        self._prev[slot], self._next[slot] = before, after


@dataclass(slots=True, eq=False)
class _Rings:
    """The rings of one owner's free cached slots."""

    owner: str
    first: int
    """The head of the first ring."""
    age: int = 0
    num_slots: int = 0


class CacheShares:
    """How many blocks of a pool each tenant has cached, and whose block is evicted next.

    The tenant with the most blocks for its weight loses one, so a tenant above its share does before any that is below
    its own. A tenant that has used none for a long time loses its blocks first; otherwise small, unused caches stay.
    """

    def __init__(self, num_blocks: int) -> None:
        self._max_idle = num_blocks * MAX_IDLE_TURNOVERS
        self._num_cached: dict[str, int] = {}
        self._weights: dict[str, float] = {}
        self._used_at: dict[str, int] = {}
        """The number of evictions at a tenant's last use."""

    def add(self, tenant: str, weight: float, num_evictions: int) -> None:
        """Count a block that a tenant has cached."""
        self._num_cached[tenant] = self._num_cached.get(tenant, 0) + 1
        self._weights[tenant] = weight
        self._used_at[tenant] = num_evictions

    def use(self, tenant: str, num_evictions: int) -> None:
        """Note a hit of a tenant's block."""
        self._used_at[tenant] = num_evictions

    def remove(self, tenant: str) -> None:
        """Count a block that is no longer cached."""
        self._num_cached[tenant] -= 1
        if not self._num_cached[tenant]:
            del self._num_cached[tenant], self._weights[tenant], self._used_at[tenant]

    def loser(self, tenants: Collection[str], num_evictions: int) -> str:
        """Return which of these tenants, one or more with cached blocks, loses one."""
        if len(tenants) == 1:
            return next(iter(tenants))
        idle_since = num_evictions - self._max_idle
        return max(
            tenants, key=lambda one: (self._used_at[one] < idle_since, self._num_cached[one] / self._weights[one])
        )


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
