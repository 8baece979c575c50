"""An engine's KV memory: blocks on the device, more on the host, one index of prefixes, and copies between blocks.

Every movement of data is a copy of a whole block, noted here while a step is decided and done by the runner, in order,
before that step stores or reads anything. So a copy may read what earlier steps stored and earlier copies brought, and
nothing that the step itself computes: blocks that a step fills are held by whom it serves, and only blocks that nobody
holds, or that a sequence which the step does not serve gives up, are ever read by a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.kv_cache.block_pool import BlockPool, CachedBlock
from penstock.gpu_node.engine.kv_cache.eviction import EvictionName
from penstock.gpu_node.model.protocol import NO_COPIES


class KvCacheManager:
    """Blocks 1 to num_device_blocks are the device's, those behind them the host's; sequences may hold both kinds.

    A prefix that is evicted on the device moves to the host, and back when it is asked for. Sequences run in device
    blocks; only one that the device cannot hold alone is given host blocks to run in.
    """

    def __init__(
        self,
        num_device_blocks: int,
        num_host_blocks: int = 0,
        *,
        enable_prefix_caching: bool = True,
        eviction: EvictionName = "lru",
    ) -> None:
        self._index: dict[bytes, int] = {}
        self.device = BlockPool(num_device_blocks, self._index, eviction=eviction)
        self.host = BlockPool(num_host_blocks, self._index, first=num_device_blocks + 1, eviction=eviction)
        self.num_out = self.num_in = 0
        """Blocks copied from the device to the host, and back."""
        self._caching = enable_prefix_caching
        self._copies: list[tuple[int, int]] = []

    @property
    def num_held(self) -> int:
        """Blocks of both tiers that somebody holds."""
        return sum(pool.num_total - pool.num_free for pool in (self.device, self.host))

    def match(self, names: Iterable[bytes]) -> list[int]:
        """The blocks, on either tier, that hold the longest known prefix of a chain; takes no reference."""
        blocks: list[int] = []
        for name in names:
            block = self._index.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_without(self, held: Sequence[int], *, on_host: bool = False) -> int:
        """Blocks of one tier that would be left free once some are held."""
        pool = self.host if on_host else self.device
        return pool.num_free - sum(
            1 for block in held if self.is_on_device(block) != on_host and pool.ref_count(block) == 0
        )

    def is_on_device(self, block: int) -> bool:
        """Whether a block is one of the device's."""
        return block < self.host.first

    def hold(self, hits: Sequence[int]) -> None:
        """Take one more reference on each block of a match."""
        for block in hits:
            self._pool_of(block).touch(block)

    def alloc(self, count: int) -> list[int]:
        """Take device blocks; prefixes that they held move to the host as far as that has room."""
        if count > self.device.num_free:
            raise InvariantError(f"{count} blocks asked for, {self.device.num_free} free")
        blocks = []
        for _ in range(count):
            block, label = self.device.take()
            if label is not None and self.host.num_free:
                self._keep_on_host(block, label)
            blocks.append(block)
        return blocks

    def alloc_anywhere(self, count: int) -> list[int]:
        """Take device blocks, and host blocks where those end."""
        blocks = self.alloc(min(count, self.device.num_free))
        return blocks + [self.host.take()[0] for _ in range(count - len(blocks))]

    def free(self, blocks: Sequence[int]) -> None:
        """Give back one reference on each block of a sequence, in the sequence's order."""
        if not self.host.num_total:
            self.device.free(blocks)
            return
        self.device.free([block for block in blocks if self.is_on_device(block)])
        self.host.free([block for block in blocks if not self.is_on_device(block)])

    def bring_in(self, blocks: Sequence[int], names: Sequence[bytes] = ()) -> list[int]:
        """Turn held blocks into held device blocks: host ones are copied, or left for one that is known by `names`."""
        brought = []
        for i, block in enumerate(blocks):
            if self.is_on_device(block):
                brought.append(block)
                continue
            known = self._index.get(names[i]) if i < len(names) else None
            if known is not None and self.is_on_device(known):
                self.device.touch(known)
                brought.append(known)
            else:
                self.num_in += 1
                brought.append(self._moved(block, *self.alloc(1)))
            self.host.free([block])
        return brought

    def num_to_swap(self, blocks: Sequence[int]) -> int:
        """Host blocks that `swap_out` would take: what others hold as well stays where it is."""
        return sum(1 for block in blocks if self.is_on_device(block) and self.device.ref_count(block) == 1)

    def swap_out(self, blocks: Sequence[int]) -> list[int]:
        """Turn held blocks into held host blocks, as far as nobody else holds them."""
        swapped = []
        for block in blocks:
            if not self.is_on_device(block) or self.device.ref_count(block) > 1:
                swapped.append(block)
                continue
            self.num_out += 1
            swapped.append(self._moved(block, self.host.take()[0]))
            self.device.free([block])
        return swapped

    def own(self, block: int, spare: int) -> int:
        """A block that may be written to and holds what `block` holds: `spare`, or itself when nobody else wants it.

        Takes the references on both, and gives back one on the answer.
        """
        unneeded = spare
        if self.ref_count(block) > 1 or self._pool_of(block).is_known(block):
            self._copies.append((block, spare))
            unneeded = block
        self.free([unneeded])
        return spare if unneeded == block else block

    def commit(self, block: int, name: bytes) -> None:
        """Make a held, full device block known; of two blocks with one name the first stays known."""
        if self._caching and self.is_on_device(block):
            self.device.label(block, name)

    def forget(self, blocks: Iterable[int]) -> None:
        """Make blocks unknown whose content turned out not to be there, held or not."""
        for block in blocks:
            self._pool_of(block).unlabel(block)

    def forget_unheld(self, blocks: Iterable[int]) -> list[int]:
        """Forget those of some blocks that nobody holds any more; which they are."""
        unheld = [block for block in blocks if self.ref_count(block) == 0]
        self.forget(unheld)
        return unheld

    def ref_count(self, block: int) -> int:
        """How many hold a block."""
        return self._pool_of(block).ref_count(block)

    def take_copies(self) -> NDArray[np.int32]:
        """The copies noted since the last call: [num_copies, 2], from and to."""
        if not self._copies:
            return NO_COPIES
        copies = np.array(self._copies, dtype=np.int32)
        self._copies.clear()
        return copies

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Raise InvariantError unless blocks are held so often and both tiers are consistent; O(blocks), for tests."""
        for pool in (self.device, self.host):
            pool.check_integrity()
            for block in range(pool.first, pool.first + pool.num_total):
                if pool.ref_count(block) != held.get(block, 0):
                    raise InvariantError(
                        f"block {block} counts {pool.ref_count(block)} holders of {held.get(block, 0)}"
                    )

    def _pool_of(self, block: int) -> BlockPool:
        return self.device if self.is_on_device(block) else self.host

    def _keep_on_host(self, block: int, label: CachedBlock) -> None:
        """Copy an evicted prefix block, which nobody holds there either."""
        self.num_out += 1
        target, _ = self.host.take()
        self._copies.append((block, target))
        self.host.label(target, *label)
        self.host.free([target])

    def _moved(self, block: int, target: int) -> int:
        """Copy a held block to one of the other tier, which takes its name over."""
        self._copies.append((block, target))
        label = self._pool_of(block).unlabel(block)
        if label is not None:
            self._pool_of(target).label(target, *label)
        return target
