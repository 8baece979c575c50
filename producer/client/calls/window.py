"""The number of jobs that one call may have open at once, learned from the pool's refusals."""

from __future__ import annotations

SHRINK = 0.8
"""After a refusal, the share of the jobs then open that may be open at once."""


class Window:
    """How many jobs may be open: fewer after a refusal, slowly more as jobs are accepted. 1 <= size <= max_size."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._size = float(max_size)

    @property
    def size(self) -> int:
        """How many jobs may be open now."""
        return int(self._size)

    def note_accepted(self) -> None:
        """The pool accepted a job. So the window widens by one whenever it has been filled once."""
        self._size = min(float(self._max_size), self._size + 1 / self._size)

    def note_refused(self, num_open: int) -> None:
        """The pool refused a job, while it held `num_open` jobs of this call."""
        self._size = max(1.0, SHRINK * min(self._size, num_open))
