"""The table of `penstock jobs list`."""

from __future__ import annotations

import shutil
import unicodedata
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING

from penstock.cli.output import duration_in_words, write_line

if TYPE_CHECKING:
    from penstock.queue.broker.jobs import JobStatus


class JobTable:
    """The table of `penstock jobs list`, as wide as the terminal, at least 79 columns. Its ids are without the pool."""

    _ROW = "{:10} {:16} {:>5} {:>5} {:>6} {:>4} {:>4} "
    _MODEL_CHARS = 16
    _WIDE = "{:11} {:9} {:36} "
    _TENANT_CHARS = 9

    def __init__(self, *, is_wide: bool = False) -> None:
        self._now_ms, self._is_wide = 0, is_wide
        self._num_columns = max(79, shutil.get_terminal_size().columns)
        self.is_empty = True

    def begin(self, now_ms: int) -> Callable[[JobStatus], None]:
        """Count ages from `now_ms` by the clock of Redis, which records have. Return `add`."""
        self._now_ms = now_ms
        return self.add

    def add(self, status: JobStatus) -> None:
        """Print the row of a job, and before the first one the heads of the columns."""
        if self.is_empty:
            heads = ("STATE", "MODEL", "IN", "OUT", "WAITED", "TOOK", "AGE")
            self._print(heads, ("CLASS", "TENANT", "ID"), "FIRST WORDS")
        self.is_empty = False
        ledger, usage = status.ledger, status.ledger.usage
        pool, _, uuid = status.job_id.rpartition(".")
        self._print(
            (
                status.state,
                _cut(status.model or pool, self._MODEL_CHARS),
                *(("", "") if usage is None else (usage.prompt_tokens, usage.completion_tokens)),
                _span(ledger.queued_ms, ledger.taken_ms),
                _span(ledger.queued_ms, ledger.finished_ms),
                duration_in_words(max(0, self._now_ms - status.accepted_ms)),
            ),
            (status.priority.label, _cut(status.tenant, self._TENANT_CHARS), uuid),
            status.first_words,
        )

    def _print(self, cells: tuple[object, ...], wide_cells: tuple[str, ...], words: str) -> None:
        row = self._ROW.format(*cells) + (self._WIDE.format(*wide_cells) if self._is_wide else "")
        room = 2 * len(words) if self._is_wide else self._num_columns - len(row)
        write_line((row + _cut(words, room)).rstrip())


def _cut(text: str, columns: int) -> str:
    """Return what fits of a text into so many columns of a terminal. A character of East Asia may take two."""
    ends = list(accumulate(1 + (unicodedata.east_asian_width(char) in "WF") for char in text))
    if not ends or ends[-1] <= columns:
        return text
    return f"{text[: sum(end < columns for end in ends)]}…"


def _span(begun_ms: int, ended_ms: int) -> str:
    """Return the time between two moments in 4 characters; nothing for a moment that has not come."""
    if not ended_ms:
        return ""
    span_ms = max(0, ended_ms - begun_ms)
    return f"{span_ms / 1000:.1f}s" if span_ms < 9_950 else duration_in_words(span_ms)
