"""Which jobs of a stream are still open, and what they used."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.contract.errors import error_of
from penstock.contract.job import Chunk, Usage


def total_of(usages: Iterable[Usage | None]) -> Usage:
    """The sum over the jobs of one request."""
    used = [u for u in usages if u is not None]
    return Usage(
        prompt_tokens=sum(u.prompt_tokens for u in used),
        completion_tokens=sum(u.completion_tokens for u in used),
        cached_tokens=sum(u.cached_tokens for u in used),
    )


class Tally:
    """Sees every chunk of every job of one stream."""

    def __init__(self, *, num_jobs: int) -> None:
        self._num_open = num_jobs
        self._usages: dict[int, Usage] = {}

    @property
    def done(self) -> bool:
        """Whether all jobs have ended."""
        return self._num_open == 0

    @property
    def usage(self) -> Usage:
        """What all jobs have used."""
        return total_of(self._usages.values())

    def add(self, job_index: int, item: Chunk | Exception) -> Chunk:
        """Counts a chunk; raises what it stands for when its job did not end well."""
        if isinstance(item, Exception):
            raise item
        if item.usage is not None:
            self._usages[job_index] = item.usage
        if item.outcome is not None:
            self._num_open -= 1
            if item.outcome.state != "done":
                raise error_of(item.outcome)
        return item
