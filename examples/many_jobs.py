"""Run many jobs with a bounded number under way at once; wait as long as a full pool asks for.

The queue itself has no such limit: bound the jobs where each answer costs memory or a place in your own program.
"""

import asyncio

from penstock import AsyncClient, BusyError

NUM_JOBS = 24
MAX_AT_ONCE = 8


async def answer(client: AsyncClient, slots: asyncio.Semaphore, number: int) -> str:
    """Return the text for one prompt."""
    async with slots:
        while True:
            try:
                job = await client.submit(f"{number} plus one is", max_tokens=8, temperature=0)
                break
            except BusyError as busy:
                await asyncio.sleep(busy.retry_after_ms / 1000)
        return (await job.result()).choices[0].text


async def main() -> None:
    """Print the answers in the order of their prompts."""
    slots = asyncio.Semaphore(MAX_AT_ONCE)
    async with AsyncClient() as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(client, slots, number)) for number in range(NUM_JOBS)]
    for number, task in enumerate(tasks):
        print(f"{number} plus one is{task.result()!r}")


asyncio.run(main())
