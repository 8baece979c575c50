"""How long the event loops of running processes were held, according to their own `/metrics`.

Tests assert `cpu`: the longest CPU time of the loop's thread in one callback. On a shared machine the two other clocks
also contain what other processes did: `wall` whatever delayed the thread's timer, `runnable` the same without the wait
for a core. Waits for Python's lock are in `runnable` only, so every failure prints it.
"""

from __future__ import annotations

import re

import httpx

MAX_HOLD_S = 0.05
LINE = re.compile(r'^penstock_(?:gateway|node)_loop_hold_seconds\{clock="(\w+)"\} (\S+)$', re.MULTILINE)


def loop_holds(metrics_url: str, key: str = "") -> dict[str, float]:
    """Return the longest holds of the last 30 to 60 seconds, in seconds, by clock."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    text = httpx.get(metrics_url, headers=headers, timeout=60).raise_for_status().text
    holds = {clock: float(value) for clock, value in LINE.findall(text)}
    assert holds.keys() == {"wall", "runnable", "cpu"}
    return holds


def assert_loop_was_free(metrics_url: str, key: str = "", *, max_s: float = MAX_HOLD_S) -> None:
    """Fail if any callback held the loop for longer."""
    holds = loop_holds(metrics_url, key)
    assert holds["cpu"] <= max_s, f"{metrics_url}: the loop was held: {holds}"
