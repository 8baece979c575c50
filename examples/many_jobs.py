"""Run many prompts: `map` reads them one by one, waits while the pool is busy, and cancels its jobs on Ctrl-C.

`generate` takes a list and returns one. Both clients have both.
"""

import asyncio
from collections.abc import Iterator

from penstock import AsyncClient

NUM_PROMPTS = 24


def prompts() -> Iterator[str]:
    """Yield prompts, as a file or a database would."""
    for number in range(NUM_PROMPTS):
        yield f"{number} plus one is"


async def main() -> None:
    """Print the answers in the order of their prompts."""
    async with AsyncClient() as client:
        number = 0
        async for result in client.map(prompts(), max_in_flight=8, max_tokens=8, temperature=0):
            print(f"{number} plus one is{result.text!r}")
            number += 1


asyncio.run(main())
