"""Stop strings in a growing text."""

from __future__ import annotations


class StopStrings:
    """Releases text up to the first stop string, and holds back text that may be the start of one.

    `included`: the stop string itself is released too. Without stop strings all text is released at once.
    """

    def __init__(self, stops: tuple[str, ...], *, included: bool = False) -> None:
        self._stops = stops
        self._included = included
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that can be released, and whether a stop string follows it."""
        if not self._held and self._first_chars.isdisjoint(text):
            return text, False  # No stop string begins here.
        held = self._held + text
        found = [(at, len(stop)) for at, stop in ((held.find(stop), stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            at, length = min(found)
            return held[: at + length if self._included else at], True
        keep = self._num_to_hold(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """Return the text held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _num_to_hold(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
