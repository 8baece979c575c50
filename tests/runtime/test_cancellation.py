"""A cancellation that a library swallows still takes effect."""

from __future__ import annotations

import asyncio

from penstock.runtime.event_loop import preserve_cancellation


async def swallow() -> None:
    """As asyncio.wait_for does, where a cancellation meets the end of what it waits for."""
    try:
        await asyncio.sleep(10)
    except asyncio.CancelledError:
        return


async def test_a_swallowed_cancellation_is_raised() -> None:
    async def work() -> None:
        with preserve_cancellation():
            await swallow()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_cleaning_up_after_a_cancellation_goes_on() -> None:
    cleaned = False

    async def work() -> None:
        nonlocal cleaned
        try:
            await asyncio.sleep(10)
        finally:
            with preserve_cancellation():
                await asyncio.sleep(0)
            cleaned = True

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert cleaned
    assert task.cancelled()
