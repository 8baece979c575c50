"""Two tiers of blocks: moves between them, and each prefix cached in one tier only."""

from __future__ import annotations

from collections import Counter

import numpy as np

from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.sequence import ROOT_HASH, block_hash


def _chain(name: int, length: int) -> list[bytes]:
    names = []
    for _ in range(length):
        names.append(block_hash(names[-1] if names else ROOT_HASH, np.array([name], np.int32)))
    return names


def _cached(memory: KvCacheManager, names: list[bytes]) -> list[int]:
    blocks = memory.alloc(len(names))
    for block, name in zip(blocks, names, strict=True):
        memory.cache(block, name)
    memory.free(blocks)
    return blocks


def test_a_prefix_matches_up_to_its_first_unknown_block() -> None:
    memory, names = KvCacheManager(4), _chain(1, 3)
    blocks = _cached(memory, names)
    assert memory.match(names) == blocks
    assert memory.match([names[0], *_chain(9, 1), names[2]]) == blocks[:1]


def test_without_caching_nothing_matches() -> None:
    memory = KvCacheManager(3, enable_prefix_caching=False)
    _cached(memory, _chain(1, 1))
    assert memory.match(_chain(1, 1)) == []


def test_evicted_prefix_moves_to_the_host_and_back_when_it_is_used() -> None:
    memory, names = KvCacheManager(4, 6), _chain(1, 3)
    old = _cached(memory, names)
    held = memory.alloc(4)
    on_host = memory.match(names)
    assert memory.take_copies().tolist() == [[old[i], on_host[i]] for i in (2, 1, 0)]
    assert not any(map(memory.is_on_device, on_host)) and memory.device.num_free == 0
    memory.free(held)
    memory.hold(on_host)
    back = memory.bring_in(on_host)
    assert memory.match(names) == back and all(map(memory.is_on_device, back))
    assert memory.take_copies().tolist() == [list(pair) for pair in zip(on_host, back, strict=True)]
    assert memory.host.num_free == 6 and memory.host.num_cached == 0
    memory.check_integrity(Counter(back))


def test_full_host_evicts_its_oldest_prefix() -> None:
    memory = KvCacheManager(2, 3)
    for name in range(3):
        _cached(memory, _chain(name, 2))
    known = [len(memory.match(_chain(name, 2))) for name in range(3)]
    assert known == [1, 2, 2] and memory.host.num_cached == 3


def test_swapping_copies_only_blocks_that_no_other_sequence_holds() -> None:
    memory, names = KvCacheManager(6, 6), _chain(1, 3)
    blocks = memory.alloc(3)
    for block, name in zip(blocks, names, strict=True):
        memory.cache(block, name)
    shared = blocks[:1]
    memory.hold(shared)
    assert memory.num_to_swap(blocks) == 2
    swapped = memory.swap_out(blocks)
    assert swapped[0] == blocks[0] and not any(map(memory.is_on_device, swapped[1:]))
    assert memory.take_copies().tolist() == [[blocks[1], swapped[1]], [blocks[2], swapped[2]]]
    assert memory.match(names) == swapped
    back = memory.bring_in(swapped, names)
    assert memory.match(names) == back and memory.host.num_free == 6
    memory.check_integrity(Counter([*shared, *back]))


def test_resumed_sequence_uses_blocks_that_others_cached_meanwhile() -> None:
    memory, names = KvCacheManager(6, 6), _chain(1, 2)
    swapped = memory.swap_out(memory.alloc(2))
    memory.take_copies()
    others = memory.alloc(2)
    memory.cache(others[0], names[0])
    back = memory.bring_in(swapped, names)
    assert back[0] == others[0] and back[1] != others[1]
    assert memory.take_copies().tolist() == [[swapped[1], back[1]]]


def test_all_but_the_last_holder_of_a_shared_block_copy_it() -> None:
    memory = KvCacheManager(6)
    (block,) = memory.alloc(1)
    memory.hold([block, block])
    spares = memory.alloc(3)
    owned = [memory.own(block, spare) for spare in spares]
    assert owned == [*spares[:2], block]
    assert memory.take_copies().tolist() == [[block, spares[0]], [block, spares[1]]]
    memory.check_integrity(Counter(owned))


def test_last_holder_of_a_cached_block_copies_it_before_writing() -> None:
    memory, names = KvCacheManager(6), _chain(1, 1)
    (block,), (spare,) = memory.alloc(1), memory.alloc(1)
    memory.cache(block, names[0])
    assert memory.own(block, spare) == spare and memory.match(names) == [block]


def test_sequence_that_does_not_fit_on_the_device_gets_host_blocks_too() -> None:
    memory = KvCacheManager(2, 3)
    blocks = memory.alloc_anywhere(4)
    assert [memory.is_on_device(block) for block in blocks] == [True, True, False, False]
    memory.cache(blocks[3], _chain(1, 1)[0])
    assert memory.match(_chain(1, 1)) == []
