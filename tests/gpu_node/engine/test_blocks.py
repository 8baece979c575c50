"""The block pool under any order of use, and the order in which it forgets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.blocks import ROOT_HASH, BlockPool, block_hash

NUM_BLOCKS = 12


def _hash(*token_ids: int, parent: bytes = ROOT_HASH) -> bytes:
    return block_hash(parent, np.array(token_ids, dtype=np.int32))


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, name and free blocks; a model keeps count of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @rule(count=st.integers(1, 4))
    def alloc(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(InvariantError):
                self.pool.alloc(count)
            return
        blocks = self.pool.alloc(count)
        held = {block for holder in self.holders for block in holder}
        assert 0 not in blocks and not held & set(blocks)
        for block in blocks:
            self.content.pop(block, None)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), name=st.integers(0, 9))
    def commit(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.holders))))
        digest = _hash(name)
        if digest not in self.content.values() and block not in self.content:
            self.content[block] = digest
        self.pool.commit(block, digest)

    @rule(name=st.integers(0, 9))
    def share(self, name: int) -> None:
        blocks = self.pool.match([_hash(name)])
        assert blocks == [block for block, digest in self.content.items() if digest == _hash(name)]
        if blocks:
            self.pool.touch(blocks)
            self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        self.pool.forget(blocks)
        for block in blocks:
            self.content.pop(block, None)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_integrity()
        held = [block for holder in self.holders for block in holder]
        assert self.pool.num_free == NUM_BLOCKS - 1 - len(set(held))
        assert all(self.pool.ref_count(block) == held.count(block) for block in range(1, NUM_BLOCKS))
        assert self.pool.num_cached == len(set(self.content) - set(held))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_blocks_without_a_prefix_go_first_then_the_tail_of_the_oldest_prefix() -> None:
    pool = BlockPool(7)
    first, second, plain = pool.alloc(2), pool.alloc(2), pool.alloc(2)
    names = [_hash(i) for i in range(4)]
    for block, name in zip(first + second, names, strict=True):
        pool.commit(block, name)
    for blocks in (first, second, plain):
        pool.free(blocks)
    assert pool.num_free == 6 and pool.num_cached == 4
    assert set(pool.alloc(2)) == set(plain)
    assert pool.alloc(2) == [first[1], first[0]]
    assert pool.match(names[:2]) == [] and pool.match(names[2:]) == second


def test_a_prefix_matches_up_to_its_first_unknown_block() -> None:
    pool = BlockPool(5)
    blocks = pool.alloc(3)
    names = [_hash(1)]
    names += [_hash(2, parent=names[0])]
    names += [_hash(2, parent=names[1])]
    for block, name in zip(blocks, names, strict=True):
        pool.commit(block, name)
    assert pool.match(names) == blocks
    assert pool.match([names[0], _hash(9), names[2]]) == blocks[:1]


def test_without_caching_nothing_matches() -> None:
    pool = BlockPool(3, enable_prefix_caching=False)
    pool.commit(pool.alloc(1)[0], _hash(1))
    assert pool.match([_hash(1)]) == []


def test_hashes_are_the_same_in_every_process() -> None:
    assert _hash(1, 2, 3).hex() == "b30a3c159d7e8193559a42a84f1fcae1"


def test_freeing_twice_is_refused() -> None:
    pool = BlockPool(3)
    blocks = pool.alloc(1)
    pool.free(blocks)
    with pytest.raises(InvariantError):
        pool.free(blocks)
