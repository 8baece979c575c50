"""The blocks of layers that see only a window of the tokens before each one, in a pool of their own.

A block here has the size and the hash of the block with the same tokens in the other layers. A sequence holds those of
its last window; earlier ones are free, and stay cached until they are evicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.kv_cache.block_pool import BlockPool
from penstock.gpu_node.model.protocol import NO_COPIES, NO_WINDOWS, WindowSizes

_SWAPPED = b"window of swapped sequence "
"""What the keys of swapped sequences' blocks begin with. No hash is that long."""


class WindowCounts(TypedDict):
    """The fields of `EngineStats` that describe windows."""

    window_blocks_total: int
    window_blocks_free: int
    window_blocks_cached: int
    window_evictions: int
    window_missed_tokens: int
    window_block_bytes: int


class WindowCache:
    """Reference-counted blocks of windows, their index by hash, and copies between them.

    What a swapped sequence leaves is kept like a cached prefix, unless its block is needed.
    """

    def __init__(self, sizes: WindowSizes, block_size: int) -> None:
        # Keyed by tenant: hashes that chain from salted_root(tenant, cache_salt, adapter). Beside them, numbered keys.
        self._index: dict[bytes, int] = {}
        # A long prompt passes many blocks that no other one needs. They must not displace windows that were used again.
        self.pool = BlockPool(sizes.num_blocks, self._index, eviction="lfu")
        self.block_bytes = sizes.block_bytes
        self.missed_tokens = 0
        """Tokens of sequences that started which had cached blocks in the other layers, but no window at their end."""
        self.blocks_of_window = sizes.most_held(block_size)
        """The most blocks that a sequence holds while it computes one token a step."""
        self._window, self._block_size = sizes.window, block_size
        self._alignment = max(sizes.alignment, block_size)
        self._copies: list[tuple[int, int]] = []
        self._numbers = itertools.count()

    def first_block(self, num_tokens: int) -> int:
        """Return the index of the first block that any token after `num_tokens` others reads."""
        return max(0, num_tokens + 1 - self._window) // self._alignment * self._alignment // self._block_size

    def first_blocks(self, num_tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return `first_block` of each number."""
        firsts: NDArray[np.int32] = np.maximum(num_tokens + 1 - self._window, 0)
        return firsts // self._alignment * self._alignment // self._block_size

    def find(self, key: bytes) -> int | None:
        """Return the block under a hash or a key. Adds no reference."""
        return self._index.get(key)

    def take(self, count: int) -> list[int]:
        """Return blocks with one reference each: those without content, then the least valuable cached ones."""
        return [self.pool.take()[0] for _ in range(count)]

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            self.pool.touch(block)

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """Return how many of some blocks no sequence holds."""
        return sum(self.pool.ref_count(block) == 0 for block in blocks)

    def own(self, block: int, spare: int) -> int:
        """Return a writable block with the content of `block`: as `KvCacheManager.own` does."""
        if self.pool.ref_count(block) == 1 and not self.pool.is_cached(block):
            self.pool.free([spare])
            return block
        self._copies.append((block, spare))
        self.pool.free([block])
        return spare

    def enter(self, block: int, block_hash: bytes, tenant: str, weight: float) -> None:
        """Cache a held, full block; the first block of a hash stays cached."""
        self.pool.cache(block, block_hash, 0, tenant, weight)

    def leave(self, block: int, block_hash: bytes | None, tenant: str, weight: float) -> bytes:
        """Drop a swapped sequence's reference to a block. Return the key under which its content is kept.

        `block_hash`: that of the block, if it is full.
        """
        key = block_hash
        if key is None or key not in self._index:
            # If another swapped sequence left the same block, that one starts over.
            self.pool.uncache(block)
            key = _SWAPPED + b"%d" % next(self._numbers)
            self.pool.cache(block, key, 0, tenant, weight)
        self.pool.free([block])
        return key

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove what `leave` keeps for one sequence. Blocks under hashes stay cached."""
        self.uncache(self._index[key] for key in keys if key.startswith(_SWAPPED) and key in self._index)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove blocks from the cache that no sequence holds."""
        for key in keys:
            block = self._index.get(key)
            if block is not None and self.pool.ref_count(block) == 0:
                self.pool.uncache(block)

    def uncache(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the cache, held or not, because their content was not computed."""
        for block in blocks:
            self.pool.uncache(block)

    def drop_all(self) -> None:
        """Remove all blocks from the cache, and all copies that were noted."""
        self.uncache(list(self._index.values()))
        self._copies.clear()

    def take_copies(self) -> NDArray[np.int32]:
        """Return the copies noted since the last call: [num_copies, 2], source and target."""
        if not self._copies:
            return NO_COPIES
        copies = np.array(self._copies, dtype=np.int32)
        self._copies.clear()
        return copies

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Raise InvariantError unless the pool is consistent and reference counts match `held`. O(blocks)."""
        self.pool.check_integrity()
        for block in self.pool.wrong_counts(held):
            counted = self.pool.ref_count(block)
            raise InvariantError(f"window block {block} counts {counted} holders of {held.get(block, 0)}")


_NONE = WindowCache(NO_WINDOWS, 1)


def window_counts(windows: WindowCache | None) -> WindowCounts:
    """Return the counts of the blocks of windows, and zeros without any."""
    one = windows or _NONE
    return WindowCounts(
        window_blocks_total=one.pool.num_total,
        window_blocks_free=one.pool.num_free,
        window_blocks_cached=one.pool.num_cached,
        window_evictions=one.pool.num_evictions,
        window_missed_tokens=one.missed_tokens,
        window_block_bytes=one.block_bytes,
    )
