"""An engine's KV memory: device blocks, host blocks, one index of cached prefixes, and copies between blocks.

Data moves only in copies of whole blocks. A copy is noted while a step is scheduled. The runner does the copies of a
step in order, before that step stores or reads anything. So a copy sees what earlier steps stored and earlier copies
wrote, but nothing of its own step. This is safe, because a copy only reads a block that no sequence holds, or that a
sequence outside the step gives up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.kv_cache.block_pool import BlockPool, CachedBlock
from penstock.gpu_node.engine.kv_cache.states import StateCache
from penstock.gpu_node.engine.kv_cache.windows import WindowCache
from penstock.gpu_node.model.protocol import NO_COPIES

if TYPE_CHECKING:
    from penstock.gpu_node.engine.config import EngineConfig, EvictionName
    from penstock.gpu_node.model.protocol import StepRunner


class KvCacheManager:
    """Blocks 1 to num_device_blocks are on the device, higher ones on the host; a sequence may hold both kinds.

    A prefix that is evicted from the device moves to the host, and back when it is used. Sequences run in device
    blocks. Only a sequence that the device cannot hold alone also runs in host blocks.
    """

    def __init__(
        self,
        num_device_blocks: int,
        num_host_blocks: int = 0,
        *,
        enable_prefix_caching: bool = True,
        eviction: EvictionName = "lru",
        states: StateCache | None = None,
        windows: WindowCache | None = None,
    ) -> None:
        """`states`: of a model with recurrent layers. `windows`: of one whose layers with windows have own blocks.

        Snapshots, and blocks of windows that no sequence holds, go with the blocks under the same hashes.
        """
        # Keyed by tenant: hashes that chain from salted_root(tenant, cache_salt, adapter).
        self._index: dict[bytes, int] = {}
        self.device = BlockPool(num_device_blocks, self._index, eviction=eviction)
        self.host = BlockPool(num_host_blocks, self._index, first=num_device_blocks + 1, eviction=eviction)
        self.num_out = self.num_in = 0
        """Blocks copied from the device to the host, and back."""
        self.states, self.windows = states, windows
        self.caches_prefixes = enable_prefix_caching
        self._copies: list[tuple[int, int]] = []

    @classmethod
    def of(cls, runner: StepRunner, config: EngineConfig) -> Self:
        """Return the memory of a runner."""
        sizes, states = runner.cache_sizes, runner.state_sizes
        windows = sizes.windows
        return cls(
            sizes.num_device_blocks,
            sizes.num_host_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            eviction=config.prefix_eviction,
            states=StateCache(states.num_slots, states.slot_bytes) if states.num_slots else None,
            windows=WindowCache(windows, config.block_size) if windows.num_blocks else None,
        )

    @property
    def num_held(self) -> int:
        """Blocks of both tiers that sequences hold."""
        return sum(pool.num_total - pool.num_free for pool in (self.device, self.host))

    def window_tokens(self, block_size: int) -> tuple[int, int] | None:
        """Return the tokens of all blocks of windows, and those of one sequence's window; None without such blocks."""
        if (windows := self.windows) is None:
            return None
        return windows.pool.num_total * block_size, windows.blocks_of_window * block_size

    def match(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks, on either tier, of the longest cached prefix of a hash chain. Adds no reference."""
        blocks: list[int] = []
        for block_hash in block_hashes:
            block = self._index.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def has(self, block_hash: bytes) -> bool:
        """Return whether a block is cached under a hash, on either tier."""
        return block_hash in self._index

    def num_free_without(self, held: Sequence[int], *, on_host: bool = False) -> int:
        """Return how many blocks of one tier stay free after `held` blocks are referenced."""
        pool = self.host if on_host else self.device
        return pool.num_free - sum(
            1 for block in held if self.is_on_device(block) != on_host and pool.ref_count(block) == 0
        )

    def is_on_device(self, block: int) -> bool:
        """Return whether a block is on the device."""
        return block < self.host.first

    def hold(self, hits: Sequence[int]) -> None:
        """Add a reference to each matched block."""
        for block in hits:
            self._pool_of(block).touch(block)

    def alloc(self, count: int) -> list[int]:
        """Take device blocks. Cached prefixes that they held move to the host while it has free blocks."""
        if count > self.device.num_free:
            raise InvariantError(f"{count} blocks requested, but only {self.device.num_free} are free")
        blocks = []
        for _ in range(count):
            block, evicted = self.device.take()
            if evicted is not None and self.host.num_free:
                self._keep_on_host(block, evicted)
            elif evicted is not None:
                self._forget(evicted)
            blocks.append(block)
        return blocks

    def alloc_anywhere(self, count: int) -> list[int]:
        """Take device blocks, then host blocks when no device block is free."""
        blocks = self.alloc(min(count, self.device.num_free))
        return blocks + [self._take_on_host() for _ in range(count - len(blocks))]

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block of a sequence, given in the sequence's order."""
        if not self.host.num_total:
            self.device.free(blocks)
            return
        self.device.free([block for block in blocks if self.is_on_device(block)])
        self.host.free([block for block in blocks if not self.is_on_device(block)])

    def bring_in(self, blocks: Sequence[int], block_hashes: Sequence[bytes] = ()) -> list[int]:
        """Replace held host blocks by held device blocks: the cached block of the same hash, or else a copy."""
        brought = []
        for i, block in enumerate(blocks):
            if self.is_on_device(block):
                brought.append(block)
                continue
            known = self._index.get(block_hashes[i]) if i < len(block_hashes) else None
            if known is not None and self.is_on_device(known):
                self.device.touch(known)
                brought.append(known)
            else:
                self.num_in += 1
                brought.append(self._moved(block, *self.alloc(1)))
            self.host.free([block])
        return brought

    def num_to_swap(self, blocks: Sequence[int]) -> int:
        """Return how many host blocks `swap_out` would take; blocks with other references stay on the device."""
        return sum(1 for block in blocks if self.is_on_device(block) and self.device.ref_count(block) == 1)

    def swap_out(self, blocks: Sequence[int]) -> list[int]:
        """Replace held device blocks by held host blocks, except those with other references."""
        swapped = []
        for block in blocks:
            if not self.is_on_device(block) or self.device.ref_count(block) > 1:
                swapped.append(block)
                continue
            self.num_out += 1
            swapped.append(self._moved(block, self._take_on_host()))
            self.device.free([block])
        return swapped

    def own(self, block: int, spare: int) -> int:
        """Return a writable block with the content of `block`: the block itself if it is private, else its copy in
        `spare`.

        A block is private if it has one reference and is not cached. Takes over the references on both blocks, and
        leaves one on the returned block.
        """
        unneeded = spare
        if self.ref_count(block) > 1 or self._pool_of(block).is_cached(block):
            self._copies.append((block, spare))
            unneeded = block
        self.free([unneeded])
        return spare if unneeded == block else block

    def cache(self, block: int, block_hash: bytes, tenant: str = "", weight: float = 1.0) -> None:
        """Cache a held, full device block of a tenant; the first block of a hash stays cached."""
        if self.caches_prefixes and self.is_on_device(block):
            self.device.cache(block, block_hash, 0, tenant, weight)

    def uncache(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the cache, held or not, because their content was not computed."""
        for block in blocks:
            if (entry := self._pool_of(block).uncache(block)) is not None:
                self._forget(entry)

    def uncache_all(self) -> None:
        """Remove all blocks of both tiers from the cache. O(blocks)."""
        for pool in (self.device, self.host):
            self.uncache(range(pool.first, pool.first + pool.num_total))

    def uncache_unheld(self, blocks: Iterable[int]) -> None:
        """Remove from the cache those blocks that no sequence holds."""
        self.uncache(block for block in blocks if self.ref_count(block) == 0)

    def ref_count(self, block: int) -> int:
        """Return the number of references on a block."""
        return self._pool_of(block).ref_count(block)

    def take_copies(self) -> NDArray[np.int32]:
        """Return the copies noted since the last call: [num_copies, 2], source and target."""
        if not self._copies:
            return NO_COPIES
        copies = np.array(self._copies, dtype=np.int32)
        self._copies.clear()
        return copies

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Raise InvariantError unless both tiers are consistent and reference counts match `held`. O(blocks)."""
        for pool in (self.device, self.host):
            pool.check_integrity()
            for block in pool.wrong_counts(held):
                raise InvariantError(f"block {block} counts {pool.ref_count(block)} holders of {held.get(block, 0)}")

    def _pool_of(self, block: int) -> BlockPool:
        return self.device if self.is_on_device(block) else self.host

    def _take_on_host(self) -> int:
        block, evicted = self.host.take()
        if evicted is not None:
            self._forget(evicted)
        return block

    def _forget(self, entry: CachedBlock) -> None:
        """Drop what is of use only with a block that is no longer cached: its snapshot, and that of a window."""
        if self.states is not None:
            self.states.drop(entry.block_hash)
        if self.windows is not None:
            self.windows.drop((entry.block_hash,))

    def _keep_on_host(self, block: int, evicted: CachedBlock) -> None:
        """Copy an evicted prefix block to a host block, which no sequence holds."""
        self.num_out += 1
        target = self._take_on_host()
        self._copies.append((block, target))
        self.host.cache(target, *evicted)
        self.host.free([target])

    def _moved(self, block: int, target: int) -> int:
        """Copy a held block to the other tier, and move its cache entry there."""
        self._copies.append((block, target))
        cached = self._pool_of(block).uncache(block)
        if cached is not None:
            self._pool_of(target).cache(target, *cached)
        return target
