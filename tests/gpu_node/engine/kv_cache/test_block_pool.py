"""The block pool under any order of calls, and its order of eviction."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.cover import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.config import EvictionName
from penstock.gpu_node.engine.kv_cache.block_pool import MAX_IDLE_TURNOVERS, BlockPool
from penstock.gpu_node.engine.sequence import ROOT_HASH, block_hash, salted_root

NUM_BLOCKS = 11
FIRST = 5
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.5}
"""Of tenants."""


def _hash(*token_ids: int, parent: bytes = ROOT_HASH) -> bytes:
    return block_hash(parent, np.array(token_ids, dtype=np.int32))


def _pool(num_blocks: int, eviction: EvictionName = "lru", first: int = 1) -> tuple[BlockPool, dict[bytes, int]]:
    index: dict[bytes, int] = {}
    return BlockPool(num_blocks, index, first=first, eviction=eviction), index


def _take(pool: BlockPool, count: int) -> list[int]:
    return [pool.take()[0] for _ in range(count)]


class PoolMachine(RuleBasedStateMachine):
    """Holders allocate, share, name and free blocks. A model of the pool predicts the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.tenants: dict[int, str] = {}
        """The tenant of each cached block."""

    @initialize(eviction=st.sampled_from(("lru", "lfu", "length")))
    def start(self, eviction: EvictionName) -> None:
        self.pool, self.index = _pool(NUM_BLOCKS, eviction, FIRST)

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        blocks = []
        for _ in range(count):
            held = {block for holder in self.holders for block in holder} | set(blocks)
            if not self.pool.num_free:
                with pytest.raises(InvariantError):
                    self.pool.take()
                break
            blank = {*range(FIRST, FIRST + NUM_BLOCKS)} - set(self.content) - held
            block, entry = self.pool.take()
            assert block in range(FIRST, FIRST + NUM_BLOCKS) and block not in held
            assert (entry is None and block in blank) if blank else entry is not None
            if entry is not None:
                unheld = {self.tenants[one] for one in self.content if one not in held}
                assert entry.tenant == self.tenants[block] and entry.weight == WEIGHTS[entry.tenant]
                assert self.parts()[entry.tenant] == max(self.parts()[one] for one in unheld)
            assert (entry and entry.block_hash) == self.content.pop(block, None)
            blocks.append(block)
        if blocks:
            self.holders.append(blocks)

    def parts(self) -> dict[str, float]:
        """Return how many blocks each tenant has cached, for its weight."""
        named = [self.tenants[block] for block in self.content]
        return {tenant: named.count(tenant) / weight for tenant, weight in WEIGHTS.items()}

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), name=st.integers(0, 9), tenant=st.sampled_from(("a", "b", "c")))
    def cache(self, data: st.DataObject, name: int, tenant: str) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.holders))))
        digest = _hash(name)
        if digest not in self.content.values() and block not in self.content:
            self.content[block], self.tenants[block] = digest, tenant
        self.pool.cache(block, digest, 0, tenant, WEIGHTS[tenant])

    @rule(name=st.integers(0, 9))
    def share(self, name: int) -> None:
        block = self.index.get(_hash(name))
        assert block == next((b for b, digest in self.content.items() if digest == _hash(name)), None)
        if block is not None:
            self.pool.touch(block)
            self.holders.append([block])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule(block=st.integers(FIRST, FIRST + NUM_BLOCKS - 1))
    def uncache(self, block: int) -> None:
        entry = self.pool.uncache(block)
        assert (entry and entry.block_hash) == self.content.pop(block, None)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_integrity()
        held = [block for holder in self.holders for block in holder]
        blocks = range(FIRST, FIRST + NUM_BLOCKS)
        assert self.pool.num_free == NUM_BLOCKS - len(set(held))
        assert all(self.pool.ref_count(block) == held.count(block) for block in blocks)
        assert all(self.pool.is_cached(block) == (block in self.content) for block in blocks)
        assert self.pool.num_cached == len(set(self.content) - set(held))


PoolMachine.TestCase.settings = settings(max_examples=examples(125), stateful_step_count=40)
TestPool = PoolMachine.TestCase


@pytest.mark.parametrize("eviction", ["lru", "lfu", "length"])
def test_blocks_without_a_prefix_go_first_then_the_tail_of_the_oldest_prefix(eviction: EvictionName) -> None:
    pool, index = _pool(6, eviction)
    first, second, plain = _take(pool, 2), _take(pool, 2), _take(pool, 2)
    names = [_hash(i) for i in range(4)]
    for block, name in zip(first + second, names, strict=True):
        pool.cache(block, name)
    for blocks in (first, second, plain):
        pool.free(blocks)
    assert pool.num_free == 6 and pool.num_cached == 4
    assert set(_take(pool, 2)) == set(plain)
    assert _take(pool, 2) == [first[1], first[0]]
    assert index == dict(zip(names[2:], second, strict=True))


def _cached(pool: BlockPool, name: int, length: int, num_uses: int = 0, tenant: str = "a") -> list[int]:
    """Cache a prefix of `length` blocks that was found so often and that no sequence holds."""
    blocks = _take(pool, length)
    for i, block in enumerate(blocks):
        pool.cache(block, _hash(name, i), 0, tenant)
    pool.free(blocks)
    for _ in range(num_uses):
        for block in blocks:
            pool.touch(block)
        pool.free(blocks)
    return blocks


def test_lfu_keeps_prefixes_that_were_used_often_over_recent_ones() -> None:
    pool, _ = _pool(6, "lfu")
    often, once = _cached(pool, 1, 2, num_uses=3), _cached(pool, 2, 2)
    last = _cached(pool, 3, 2)
    assert _take(pool, 6) == [*reversed(once), *reversed(last), *reversed(often)]


def test_unused_prefixes_lose_their_eviction_value_with_time() -> None:
    pool, index = _pool(4, "lfu")
    _cached(pool, 0, 2, num_uses=5)
    for name in range(1, 30):
        _cached(pool, name, 2)
        if _hash(0, 0) not in index:
            break
    assert 5 < name < 20


def test_long_prefixes_outlive_short_ones() -> None:
    pool, _ = _pool(14, "length")
    long, short = _cached(pool, 1, 9), _cached(pool, 2, 1)
    middle = _cached(pool, 3, 4)
    assert _take(pool, 14) == [*short, *reversed(middle), *reversed(long)]


def test_shared_prefix_has_the_value_of_its_longest_sequence() -> None:
    pool, index = _pool(20, "length")
    head = _cached(pool, 1, 8)[:2]
    for block in head:
        pool.touch(block)
    pool.free(head)
    _cached(pool, 2, 4)
    taken = _take(pool, 12)
    assert not set(taken) & set(head) and _hash(1, 0) in index and _hash(2, 0) not in index


@pytest.mark.parametrize("eviction", ["lru", "lfu", "length"])
def test_a_flood_of_one_tenant_evicts_no_prefix_of_a_tenant_below_its_share(eviction: EvictionName) -> None:
    pool, index = _pool(20, eviction)
    small = _cached(pool, 0, 8, tenant="small")
    for name in range(1, 100):
        _cached(pool, name, 3, num_uses=2, tenant="large")
    assert all(index[_hash(0, i)] == block for i, block in enumerate(small))


def test_a_tenant_that_grows_takes_blocks_of_larger_ones_until_all_have_as_many() -> None:
    pool, index = _pool(30)
    _cached(pool, 0, 20, tenant="large")
    _cached(pool, 1, 10, tenant="middle")
    _cached(pool, 2, 10, tenant="new")
    sizes = {name: sum(_hash(name, i) in index for i in range(20)) for name in range(3)}
    assert sizes == {0: 10, 1: 10, 2: 10}


def test_a_tenant_that_uses_nothing_for_long_loses_its_prefixes() -> None:
    pool, index = _pool(20)
    _cached(pool, 0, 5, tenant="gone")
    for name in range(1, MAX_IDLE_TURNOVERS * 20 // 4 + 10):
        _cached(pool, name, 4, tenant="busy")
    assert _hash(0, 0) not in index


def test_taking_a_block_of_an_empty_pool_is_an_error() -> None:
    pool, _ = _pool(0)
    pool.check_integrity()
    with pytest.raises(InvariantError):
        pool.take()


def test_hashes_are_the_same_in_every_process_and_differ_by_salt() -> None:
    assert _hash(1, 2, 3).hex() == "b30a3c159d7e8193559a42a84f1fcae1"
    names = {_hash(1, 2, 3, parent=salted_root(salt)) for salt in (None, "", "a", "b")}
    assert len(names) == 4 and salted_root("a") == salted_root("a")


def test_freeing_twice_is_refused() -> None:
    pool, _ = _pool(3)
    blocks = _take(pool, 1)
    pool.free(blocks)
    with pytest.raises(InvariantError):
        pool.free(blocks)
