"""How tests wait: they look again and again until what they expect is there.

The patience counts only time in which this process ran: of the time between two looks at most MOST_COUNTED_S. A machine
that stands still, for a snapshot or because it does other work, ends no wait.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, TypeVar

Seen = TypeVar("Seen")
Told = Callable[[], object] | str
"""What the error says beside what was seen last, or a function that returns it."""
Errors = type[Exception] | tuple[type[Exception], ...]

WAIT_S = 60.0
"""The machine may have other work."""
MOST_COUNTED_S = 2.0
"""Seconds. What goes beyond them is a pause of the machine, or a look that takes long."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.05


class Deadline:
    """The patience of a loop that is more than a condition: the loop asks at each look what is left."""

    def __init__(self, within_s: float = WAIT_S) -> None:
        self._within_s = self._left_s = within_s
        self._looked_s = time.monotonic()

    def left_s(self) -> float:
        """Return the seconds that are left, 0 at the end."""
        before_s, self._looked_s = self._looked_s, time.monotonic()
        self._left_s = max(0.0, self._left_s - min(self._looked_s - before_s, MOST_COUNTED_S))
        return self._left_s

    def check(self, what: Told = "", seen: object = None) -> None:
        """Raise AssertionError at the end. It says `what`, and what was seen last."""
        if not self.left_s():
            raise AssertionError(f"not within {self._within_s:g} s: {_told(what, seen)}")


def _told(what: Told, seen: object) -> str:
    return f"{what() if callable(what) else what} (seen last: {seen!r:.2000})"


class _Pauses:
    """The pauses between the looks of one wait."""

    def __init__(self, within_s: float, what: Told, meanwhile: Callable[[], object]) -> None:
        self._deadline, self._what, self._meanwhile = Deadline(within_s), what, meanwhile
        self._next_s = FIRST_PAUSE_S

    def after(self, seen: object) -> float:
        """Return the seconds until the next look. Raises AssertionError if there is none."""
        if not self._meanwhile():
            raise AssertionError(f"what must hold meanwhile does not: {_told(self._what, seen)}")
        self._deadline.check(self._what, seen)
        pause_s, self._next_s = self._next_s, min(1.2 * self._next_s, LONGEST_PAUSE_S)
        return pause_s


def wait_until(
    look: Callable[[], Seen],
    is_so: Callable[[Seen], object] = bool,
    *,
    within_s: float = WAIT_S,
    what: Told = "",
    but: Errors = (),
    meanwhile: Callable[[], object] = lambda: True,
) -> Seen:
    """Return what `look` returns as soon as `is_so` accepts it. At the end, AssertionError says what was seen last.

    A look that raises an error of `but` is repeated, too. The wait ends early once `meanwhile` does not hold, such as
    that a process runs.
    """
    pauses, seen = _Pauses(within_s, what, meanwhile), None
    while True:
        try:
            seen = look()
            if is_so(seen):
                return seen
        except but as error:
            seen = error
        time.sleep(pauses.after(seen))


async def until(
    look: Callable[[], Any],
    is_so: Callable[[Any], object] = bool,
    *,
    within_s: float = WAIT_S,
    what: Told = "",
    but: Errors = (),
    meanwhile: Callable[[], object] = lambda: True,
) -> Any:
    """Wait as `wait_until` does, and let other tasks run meanwhile. What `look` returns may be awaitable."""
    pauses, seen = _Pauses(within_s, what, meanwhile), None
    while True:
        try:
            seen = look()
            seen = await seen if inspect.isawaitable(seen) else seen
            if is_so(seen):
                return seen
        except but as error:
            seen = error
        await asyncio.sleep(pauses.after(seen))
