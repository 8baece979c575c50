"""`python -m hostile.first_token`: a tenant's first token, alone and behind 900 requests of another one, by turns."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from hostile.floods import PROMPT, drained, flood, measure
from hostile.stack import Stack, running_stack

from penstock.cli.demo_model import demo_model

NUM_REQUESTS = 900
SHAPE: dict[str, Any] = {"jobs": NUM_REQUESTS, "n": 1, "prompt": PROMPT, "max_tokens": 200}
"""The flooding tenant keeps so many requests open at once."""
FULL_S = 10.0
"""Until then all of them are queued."""


async def first_tokens(stack: Stack) -> tuple[float, float]:
    """Return the seconds to the victim's first token, alone and behind the flood."""
    alone = await measure(stack, 1)
    async with flood(stack, ["flood-0"], SHAPE):
        await asyncio.sleep(FULL_S)
        behind = await measure(stack, 1)
    await drained(stack)
    return alone.worst_first_token, behind.worst_first_token


def main() -> None:
    """Print a row for each turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    with running_stack(model=demo_model(), tenants=1) as stack:
        for turn in range(turns):
            began_s = time.monotonic()
            alone_s, behind_s = asyncio.run(first_tokens(stack))
            took_s = time.monotonic() - began_s
            print(f"turn {turn}: alone {alone_s:.3f} s, behind {behind_s:.3f} s ({took_s:.0f} s in all)", flush=True)


if __name__ == "__main__":
    main()
