"""Cooperative work on the event loop."""

from __future__ import annotations

import asyncio

from penstock.runtime.event_loop import ITEMS_PER_ROUND, in_rounds


async def test_other_tasks_run_between_the_rounds_of_many_items() -> None:
    num_seen, seen_by_other = 0, list[int]()

    async def other() -> None:
        while num_seen < 3 * ITEMS_PER_ROUND:
            seen_by_other.append(num_seen)
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    async for _ in in_rounds(range(3 * ITEMS_PER_ROUND)):
        num_seen += 1
    await running
    assert seen_by_other == [ITEMS_PER_ROUND, 2 * ITEMS_PER_ROUND]


async def test_items_that_are_removed_meanwhile_are_still_yielded() -> None:
    items = dict.fromkeys(range(2 * ITEMS_PER_ROUND))
    seen = []
    async for item in in_rounds(items):
        seen.append(item)
        items.pop(item)
    assert seen == list(range(2 * ITEMS_PER_ROUND))
