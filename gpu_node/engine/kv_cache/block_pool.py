"""One tier of KV blocks: reference counts, cached prefixes, and the order in which free blocks are taken."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.protocol import NULL_BLOCK

if TYPE_CHECKING:
    from penstock.gpu_node.engine.config import EvictionName


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
        self._next: list[int] = [*range(1, num_slots + 1), 0]
        self._prev: list[int] = [num_slots, *range(num_slots)]
        # Keyed by tenant; no text of a request.
        self._rings: dict[str, _Rings] = {}
        """The rings of owners with free cached slots."""
        self._unused: list[int] = []
        """First heads of rings that no owner has."""
        self._owners: list[_Rings | None] = [None] * num_slots

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
        following, preceding = self._next, self._prev
        heads = [self._head(rings, rings.age + i) for rings in self._rings.values() for i in range(self._num_rings)]
        for head in (self._blank, *heads):
            at = head
            # It ends: a slot that is met again follows another one than it did first, which breaks a link.
            while (after := following[at]) != head:
                if preceding[after] != at:
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
        # Keyed by tenant; no text of a request.
        self._num_cached: dict[str, int] = {}
        # Keyed by tenant; no text of a request.
        self._weights: dict[str, float] = {}
        # Keyed by tenant; no text of a request.
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


class CachedBlock(NamedTuple):
    """The hash under which a block is cached, its eviction value, and the tenant that cached it."""

    block_hash: bytes
    worth: int
    tenant: str
    weight: float


class BlockPool:
    """Reference-counted blocks with ids first, first + 1, …; blocks without references are free, cached ones included.

    `index` maps hashes to cached blocks; pools with other ids may share it.
    """

    def __init__(
        self, num_blocks: int, index: dict[bytes, int], *, first: int = NULL_BLOCK + 1, eviction: EvictionName = "lru"
    ) -> None:
        self.num_total = self.num_free = num_blocks
        self.num_cached = 0
        self.num_evictions = 0
        self.first = first
        self._index = index
        self._worth_by = EvictionValue(eviction)
        self._free = FreeList(num_blocks, self._worth_by.num_classes)
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._worths = [0] * num_blocks
        self._tenants: list[tuple[str, float]] = [("", 1.0)] * num_blocks
        """Of each cached block: the tenant that cached it, and its weight."""
        self._shares = CacheShares(num_blocks)

    def touch(self, block: int) -> None:
        """Add a reference to a block of a matched prefix."""
        at = block - self.first
        if self._ref_counts[at] == 0:
            self._free.remove(at)
            self.num_free -= 1
            self.num_cached -= self._hashes[at] is not None
        self._ref_counts[at] += 1
        if self._hashes[at] is not None:
            self._shares.use(self._tenants[at][0], self.num_evictions)
        self._worths[at] = self._worth_by.after_use(self._worths[at])

    def take(self) -> tuple[int, CachedBlock | None]:
        """Take a free block: one without content, or the least valuable one of the tenant above its share.

        Return it with its former cache entry.
        """
        if self.num_free == 0:
            raise InvariantError("no block is free")
        at = self._free.pop_blank()
        self.num_free -= 1
        if at is not None:
            self._ref_counts[at] = 1
            return at + self.first, None
        at = self._free.pop_cached(self._shares.loser(self._free.owners, self.num_evictions))
        self._ref_counts[at] = 1
        self.num_cached -= 1
        self.num_evictions += 1
        return at + self.first, self.uncache(at + self.first)

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block of a sequence, given in the sequence's order.

        Later blocks of a prefix are evicted first, because they are useless without the earlier ones.
        """
        least_worth = self._worth_by.of_prefix(len(blocks))
        for block in reversed(blocks):
            at = block - self.first
            self._ref_counts[at] -= 1
            if self._ref_counts[at] > 0:
                continue
            if self._ref_counts[at] < 0:
                raise InvariantError(f"block {block} was freed more often than taken")
            self.num_free += 1
            if self._hashes[at] is None:
                self._free.add_blank(at)
            else:
                self.num_cached += 1
                self._worths[at] = max(self._worths[at], least_worth)
                self._free.add_cached(at, self._worths[at], self._tenants[at][0])

    def cache(self, block: int, block_hash: bytes, worth: int = 0, tenant: str = "", weight: float = 1.0) -> None:
        """Cache a held block of a tenant under its hash, unless the hash or the block is cached already."""
        at = block - self.first
        if block_hash not in self._index and self._hashes[at] is None:
            self._index[block_hash] = block
            self._hashes[at], self._worths[at] = block_hash, worth
            self._tenants[at] = (tenant, weight)
            self._shares.add(tenant, weight, self.num_evictions)

    def uncache(self, block: int) -> CachedBlock | None:
        """Remove a block from the cache and return its entry. If free, it is the next block to be taken."""
        at = block - self.first
        known = self._hashes[at]
        if known is None:
            return None
        del self._index[known]
        self._hashes[at] = None
        if self._ref_counts[at] == 0:
            self.num_cached -= 1
            self._free.remove(at)
            self._free.add_blank(at)
        worth, self._worths[at] = self._worths[at], 0
        tenant, weight = self._tenants[at]
        self._shares.remove(tenant)
        return CachedBlock(known, worth, tenant, weight)

    def is_cached(self, block: int) -> bool:
        """Return whether a block is cached."""
        return self._hashes[block - self.first] is not None

    def ref_count(self, block: int) -> int:
        """Return the number of references on a block."""
        return self._ref_counts[block - self.first]

    def wrong_counts(self, held: Mapping[int, int]) -> list[int]:
        """Return the blocks that do not have as many references as `held` says. O(blocks)."""
        return [block for block, count in enumerate(self._ref_counts, self.first) if count != held.get(block, 0)]

    def check_integrity(self) -> None:
        """Raise InvariantError unless free list, counts and hashes agree. O(blocks), for tests and idle times."""
        free = self._free.slots()
        unheld = [at for at, count in enumerate(self._ref_counts) if count == 0]
        cached = sum(1 for at in unheld if self._hashes[at] is not None)
        if sorted(free) != unheld or len(free) != self.num_free or cached != self.num_cached:
            raise InvariantError(f"free list holds {len(free)} blocks, {self.num_free} counted, {len(unheld)} unheld")
        cached_at = {known: at + self.first for at, known in enumerate(self._hashes) if known is not None}
        blocks = range(self.first, self.first + self.num_total)
        if cached_at != {known: block for known, block in self._index.items() if block in blocks}:
            raise InvariantError("prefix index and block hashes disagree")
