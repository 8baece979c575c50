"""Waiting until something is true."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 60
"""The machine may have other work."""


def wait_until(holds: Callable[[], bool]) -> None:
    """Look again and again until the condition holds. Raises AssertionError after a minute."""
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, "timed out"
        time.sleep(0.01)
