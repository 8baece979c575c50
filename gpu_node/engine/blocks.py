"""The pool of KV blocks: who holds which, which hold a known prefix, and which goes next."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.protocol import NULL_BLOCK

ROOT_HASH = b""


def block_hash(parent: bytes, token_ids: NDArray[np.int32]) -> bytes:
    """Name of a full block: its tokens and, through `parent`, all tokens before it. Equal in every process."""
    return hashlib.blake2b(parent + token_ids.tobytes(), digest_size=16).digest()


class BlockPool:
    """Reference-counted blocks over one free list that is the LRU of the prefix cache as well.

    The free list is a ring through the null block: `next[0]` is evicted first, `prev[0]` last. A block is in the ring
    exactly when its reference count is 0; a hashed block in the ring is a cached prefix and still counts as free.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        """`num_blocks` includes the null block, which is never handed out."""
        self.num_total = num_blocks - 1
        self.num_free = self.num_total
        self.num_cached = 0
        self._caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix of a chain of hashes; takes no reference."""
        blocks: list[int] = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_without(self, blocks: Sequence[int]) -> int:
        """Blocks that would be left free once `blocks` are touched."""
        return self.num_free - sum(1 for block in blocks if self._ref_counts[block] == 0)

    def touch(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each block of a matched prefix."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                self._unlink(block)
                self.num_free -= 1
                self.num_cached -= 1
            self._ref_counts[block] += 1

    def alloc(self, count: int) -> list[int]:
        """Take `count` blocks, evicting the prefixes that were used longest ago."""
        if count > self.num_free:
            raise InvariantError(f"{count} blocks asked for, {self.num_free} free")
        blocks = []
        for _ in range(count):
            block = self._next[NULL_BLOCK]
            self._unlink(block)
            self._drop_hash(block)
            self._ref_counts[block] = 1
            blocks.append(block)
            self.num_free -= 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give back one reference on each block of a sequence, in the sequence's order.

        The last blocks of a prefix become the first to go: without its head a tail is worth nothing.
        """
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            if self._ref_counts[block] < 0 or block == NULL_BLOCK:
                raise InvariantError(f"block {block} was freed more often than taken")
            self.num_free += 1
            if self._hashes[block] is None:
                self._link_after(block, NULL_BLOCK)
            else:
                self.num_cached += 1
                self._link_after(block, self._prev[NULL_BLOCK])

    def commit(self, block: int, name: bytes) -> None:
        """Make a held, full block known by its hash; of two blocks with one hash the first stays known."""
        if self._caching and name not in self._block_of and self._hashes[block] is None:
            self._block_of[name] = block
            self._hashes[block] = name

    def forget(self, blocks: Iterable[int]) -> None:
        """Take back what `commit` said about blocks whose content turned out not to be there, held or not."""
        for block in blocks:
            self._drop_hash(block)

    def ref_count(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._ref_counts[block]

    def check_integrity(self) -> None:
        """Raise InvariantError unless ring, counts and hashes agree; O(blocks), for tests and idle times."""
        ring: list[int] = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK and len(ring) <= self.num_total:
            ring.append(block)
            if self._prev[self._next[block]] != block:
                raise InvariantError(f"free list is torn at block {block}")
            block = self._next[block]
        unheld = {b for b in range(1, self.num_total + 1) if self._ref_counts[b] == 0}
        cached = sum(1 for b in ring if self._hashes[b] is not None)
        if set(ring) != unheld or len(ring) != self.num_free or cached != self.num_cached:
            raise InvariantError(f"free list holds {len(ring)} blocks, {self.num_free} counted, {len(unheld)} unheld")
        named = {name: b for b, name in enumerate(self._hashes) if name is not None}
        if named != self._block_of:
            raise InvariantError("prefix index and block names disagree")

    def _drop_hash(self, block: int) -> None:
        name = self._hashes[block]
        if name is not None:
            del self._block_of[name]
            self._hashes[block] = None
            if self._ref_counts[block] == 0:
                self.num_cached -= 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before

    def _link_after(self, block: int, before: int) -> None:
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
