"""The slots of recurrent states: reference counts, and snapshots, the states that later sequences may start from.

A state has a fixed size, however many tokens it has seen. A snapshot stands under the hash of a block: it is the state
after the last token of that block, and goes when the block leaves the prefix cache.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TypedDict

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.kv_cache.block_pool import BlockPool
from penstock.gpu_node.model.protocol import NO_STATE

_SWAPPED = b"state of swapped sequence "
"""What the keys of swapped sequences begin with. No hash is that long."""


class StateCounts(TypedDict):
    """The fields of `EngineStats` that describe states."""

    state_slots_total: int
    state_slots_free: int
    state_snapshots: int
    state_hits: int
    state_evictions: int
    state_missed_tokens: int
    state_slot_bytes: int


class StateCache:
    """Slots 0, 1, …, as a pool of their own with least recently used snapshots and shares of tenants.

    What a swapped sequence left in its slot is kept like a snapshot, under a key of its own.
    """

    def __init__(self, num_slots: int, slot_bytes: int = 0) -> None:
        # Keyed by tenant: hashes that chain from salted_root(tenant, cache_salt, adapter). Beside them, numbered keys.
        self._index: dict[bytes, int] = {}
        self._pool = BlockPool(num_slots, self._index, first=0)
        self._numbers = itertools.count()
        self.slot_bytes = slot_bytes
        self.num_starts = self.num_hits = self.missed_tokens = 0
        """Sequences that started, those that started from a snapshot, and their tokens with blocks but no snapshot."""

    @property
    def num_slots(self) -> int:
        """All slots."""
        return self._pool.num_total

    @property
    def num_free(self) -> int:
        """Slots that no sequence holds, snapshots included."""
        return self._pool.num_free

    @property
    def num_snapshots(self) -> int:
        """Slots with a snapshot, and those that swapped sequences left."""
        return len(self._index)

    @property
    def num_evictions(self) -> int:
        """Snapshots that were lost because a slot was needed."""
        return self._pool.num_evictions

    def note_start(self, num_stored: int, num_matched: int) -> None:
        """Count a sequence that starts behind `num_stored` of the `num_matched` tokens that have cached blocks."""
        self.num_starts += 1
        self.num_hits += num_stored > 0
        self.missed_tokens += num_matched - num_stored

    def find(self, key: bytes) -> int | None:
        """Return the slot of a snapshot. Adds no reference."""
        return self._index.get(key)

    def take(self) -> int | None:
        """Return a slot with one reference: one without content, or that of a snapshot; None if all are held."""
        return self._pool.take()[0] if self._pool.num_free else None

    def hold(self, key: bytes) -> int:
        """Add a reference to the slot of a snapshot that there is. Return the slot."""
        return self.share(self._index[key])

    def share(self, slot: int) -> int:
        """Add a reference to a slot, unless it is NO_STATE. Return it."""
        if slot != NO_STATE:
            self._pool.touch(slot)
        return slot

    def free(self, slot: int) -> None:
        """Drop a reference to a slot, unless it is NO_STATE."""
        if slot != NO_STATE:
            self._pool.free((slot,))

    def has_one_holder(self, slot: int) -> bool:
        """Return whether a slot has one reference. NO_STATE has none."""
        return slot != NO_STATE and self._pool.ref_count(slot) == 1

    def is_private(self, slot: int) -> bool:
        """Return whether a slot has one reference and no snapshot, so that its holder may overwrite it."""
        return self.has_one_holder(slot) and not self._pool.is_cached(slot)

    def is_unheld(self, key: bytes) -> bool:
        """Return whether there is a snapshot that no sequence holds."""
        slot = self._index.get(key)
        return slot is not None and self._pool.ref_count(slot) == 0

    def enter(self, slot: int, block_hash: bytes, tenant: str, weight: float) -> bool:
        """Enter a held slot as the snapshot after a block, unless there is one. Return whether it was entered."""
        if block_hash in self._index or self._pool.is_cached(slot):
            return False
        self._pool.cache(slot, block_hash, 0, tenant, weight)
        return True

    def leave(self, slot: int, block_hash: bytes | None, tenant: str, weight: float) -> bytes:
        """Drop the reference of a sequence that is swapped. Return the key under which its state is kept.

        `block_hash`: that of the block whose end its state has reached, if it has reached one.
        """
        key = block_hash
        if key is None or self._index.get(key) != slot:
            # If another swapped sequence left the same state there, that one starts over.
            self._pool.uncache(slot)
            key = _SWAPPED + b"%d" % next(self._numbers)
            self._pool.cache(slot, key, 0, tenant, weight)
        self.free(slot)
        return key

    def forget(self, key: bytes) -> None:
        """Remove what `leave` keeps for one sequence. Snapshots stay."""
        if key.startswith(_SWAPPED):
            self.drop(key)

    def drop(self, key: bytes) -> None:
        """Remove a snapshot, if there is one."""
        slot = self._index.get(key)
        if slot is not None:
            self._pool.uncache(slot)

    def uncache(self, slot: int) -> None:
        """Remove the snapshot of a slot, if there is one."""
        self._pool.uncache(slot)

    def drop_all(self) -> None:
        """Remove all snapshots."""
        for slot in list(self._index.values()):
            self._pool.uncache(slot)

    def check_integrity(self, held: Counter[int]) -> None:
        """Raise InvariantError unless the pool is consistent and reference counts match `held`. O(slots)."""
        self._pool.check_integrity()
        for slot in self._pool.wrong_counts(held):
            raise InvariantError(f"state slot {slot} counts {self._pool.ref_count(slot)} holders, not {held[slot]}")


_NO_STATES = StateCache(0)


def state_counts(states: StateCache | None) -> StateCounts:
    """Return the counts of a state cache, and zeros without one."""
    one = states or _NO_STATES
    return StateCounts(
        state_slots_total=one.num_slots,
        state_slots_free=one.num_free,
        state_snapshots=one.num_snapshots,
        state_hits=one.num_hits,
        state_evictions=one.num_evictions,
        state_missed_tokens=one.missed_tokens,
        state_slot_bytes=one.slot_bytes,
    )
