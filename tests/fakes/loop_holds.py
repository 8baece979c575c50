"""How long the event loops of running processes were held, as their own `/metrics` tell it.

What is asserted is `cpu`: what the loop's thread computed in one go. On a shared machine the two other clocks also show
what others did: `wall` whatever kept the thread from its timer, `runnable` that without the wait for a core. Waits for
Python's lock are in `runnable` only, so it is told with every failure.
"""

from __future__ import annotations

import re

import httpx

MAX_HOLD_S = 0.05
LINE = re.compile(r'^penstock_(?:gateway|node)_loop_hold_seconds\{clock="(\w+)"\} (\S+)$', re.MULTILINE)


def loop_holds(metrics_url: str, key: str = "") -> dict[str, float]:
    """The longest holds of the last half minute to minute, in seconds, by clock."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    text = httpx.get(metrics_url, headers=headers, timeout=30).raise_for_status().text
    holds = {clock: float(value) for clock, value in LINE.findall(text)}
    assert holds.keys() == {"wall", "runnable", "cpu"}
    return holds


def assert_loop_was_free(metrics_url: str, key: str = "", *, max_s: float = MAX_HOLD_S) -> None:
    """Fails where any callback held the loop for longer."""
    holds = loop_holds(metrics_url, key)
    assert holds["cpu"] <= max_s, f"{metrics_url}: the loop was held: {holds}"
