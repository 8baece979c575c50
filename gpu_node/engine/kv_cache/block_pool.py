"""One tier of KV blocks: reference counts, cached prefixes and the order of eviction."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.kv_cache.eviction import CacheShares, EvictionName, EvictionValue, FreeList
from penstock.gpu_node.model.protocol import NULL_BLOCK

ROOT_HASH = b""


def block_hash(parent: bytes, token_ids: NDArray[np.int32]) -> bytes:
    """Return the hash of a full block and, through `parent`, of all tokens before it. Equal in all processes."""
    return hashlib.blake2b(parent + token_ids.tobytes(), digest_size=16).digest()


def salted_root(*salts: str | None) -> bytes:
    """Return the parent hash of first blocks; prompts with different lists of salts never share one."""
    if not any(salt is not None for salt in salts):
        return ROOT_HASH
    # repr quotes and separates: ("a", "bc") and ("ab", "c") differ, and so do None and "None".
    return hashlib.blake2b(repr(salts).encode(), digest_size=16, person=b"salt").digest()


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
