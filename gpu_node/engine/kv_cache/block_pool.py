"""One tier of KV blocks: who holds which, which hold a known prefix, and which goes next."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.kv_cache.eviction import EvictionName, EvictionValue, FreeList
from penstock.gpu_node.model.protocol import NULL_BLOCK

ROOT_HASH = b""


def block_hash(parent: bytes, token_ids: NDArray[np.int32]) -> bytes:
    """Name of a full block: its tokens and, through `parent`, all tokens before it. Equal in every process."""
    return hashlib.blake2b(parent + token_ids.tobytes(), digest_size=16).digest()


def salted_root(*salts: str | None) -> bytes:
    """The parent of first blocks; prompts with different salts never share one."""
    if not any(salt is not None for salt in salts):
        return ROOT_HASH
    return hashlib.blake2b(repr(salts).encode(), digest_size=16, person=b"salt").digest()


class CachedBlock(NamedTuple):
    """What a block is known by, and what it is worth to keep."""

    name: bytes
    worth: int


class BlockPool:
    """Reference-counted blocks with ids first, first + 1, …; blocks that nobody holds are free, cached prefixes too.

    `index` says which block has a name; it may be shared with pools over other ids.
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
        self._names: list[bytes | None] = [None] * num_blocks
        self._worths = [0] * num_blocks

    def touch(self, block: int) -> None:
        """Take one more reference on a block of a matched prefix."""
        at = block - self.first
        if self._ref_counts[at] == 0:
            self._free.remove(at)
            self.num_free -= 1
            self.num_cached -= self._names[at] is not None
        self._ref_counts[at] += 1
        self._worths[at] = self._worth_by.after_use(self._worths[at])

    def take(self) -> tuple[int, CachedBlock | None]:
        """Take the free block whose loss costs least, and what it was known by until now."""
        if self.num_free == 0:
            raise InvariantError("a block was asked for and none is free")
        at = self._free.pop()
        self.num_free -= 1
        self._ref_counts[at] = 1
        if self._names[at] is None:
            return at + self.first, None
        self.num_cached -= 1
        self.num_evictions += 1
        return at + self.first, self.unlabel(at + self.first)

    def free(self, blocks: Sequence[int]) -> None:
        """Give back one reference on each block of a sequence, in the sequence's order.

        The last blocks of a prefix become the first to go: without its head a tail is worth nothing.
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
            if self._names[at] is None:
                self._free.add_blank(at)
            else:
                self.num_cached += 1
                self._worths[at] = max(self._worths[at], least_worth)
                self._free.add_cached(at, self._worths[at])

    def label(self, block: int, name: bytes, worth: int = 0) -> None:
        """Make a held block known; of two blocks with one name the first stays known, and a block keeps its name."""
        at = block - self.first
        if name not in self._index and self._names[at] is None:
            self._index[name] = block
            self._names[at], self._worths[at] = name, worth

    def unlabel(self, block: int) -> CachedBlock | None:
        """Make a block unknown; what it was known by. A free one goes to the head of the free list."""
        at = block - self.first
        name = self._names[at]
        if name is None:
            return None
        del self._index[name]
        self._names[at] = None
        if self._ref_counts[at] == 0:
            self.num_cached -= 1
            self._free.remove(at)
            self._free.add_blank(at)
        worth, self._worths[at] = self._worths[at], 0
        return CachedBlock(name, worth)

    def is_known(self, block: int) -> bool:
        """Whether a block has a name."""
        return self._names[block - self.first] is not None

    def ref_count(self, block: int) -> int:
        """How many hold a block."""
        return self._ref_counts[block - self.first]

    def check_integrity(self) -> None:
        """Raise InvariantError unless free list, counts and names agree; O(blocks), for tests and idle times."""
        free = self._free.slots()
        unheld = [at for at, count in enumerate(self._ref_counts) if count == 0]
        cached = sum(1 for at in unheld if self._names[at] is not None)
        if sorted(free) != unheld or len(free) != self.num_free or cached != self.num_cached:
            raise InvariantError(f"free list holds {len(free)} blocks, {self.num_free} counted, {len(unheld)} unheld")
        named = {name: at + self.first for at, name in enumerate(self._names) if name is not None}
        blocks = range(self.first, self.first + self.num_total)
        if named != {name: block for name, block in self._index.items() if block in blocks}:
            raise InvariantError("prefix index and block names disagree")
