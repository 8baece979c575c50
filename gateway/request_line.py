"""What the parts of the gateway note of one request for its line in the access log.

A context variable holds the line, so that each task of a request finds it: a stream has tasks of its own, and one
WebSocket has many streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from penstock.contract.errors import PenstockError
from penstock.contract.job import pool_of
from penstock.contract.output import Usage

COMPLETE, FAILED, CALLER_LEFT = "complete", "failed", "caller_left"
"""How a stream ended. One that the end of the gateway's drain cut off has failed, too."""


MAX_JOBS_SHOWN = 64
"""Most job ids in JOB_HEADER and in a line of the log. A longer header is too long for common HTTP clients."""


class RequestLine:
    """The facts of one request. Those that its answer does not have are empty, and left out of the line."""

    def __init__(self) -> None:
        self.code = ""
        """The code of the error that the answer reported."""
        self.pool = ""
        self.job = ""
        """The ids of the jobs, as JOB_HEADER has them. An answer that a job's failure became has no such header."""
        self.outcome = ""
        """How the stream ended; empty if the answer was none."""
        self.first_token_s: float | None = None
        """Seconds from the body of the request to the first token."""
        self._usages: list[Usage] = []

    def note_error(self, error: PenstockError) -> None:
        """Note an error that the caller sees."""
        self.code, self.pool = error.code, error.pool or self.pool

    def note_jobs(self, job_ids: Sequence[str]) -> None:
        """Note the jobs of a request, of many the first."""
        self.job = ", ".join(job_ids[:MAX_JOBS_SHOWN])

    def note_usage(self, usage: Usage | None) -> None:
        """Add the tokens of one job, if they are known."""
        if usage is not None:
            self._usages.append(usage)

    def facts(self) -> dict[str, Any]:
        """Return the fields of the line."""
        pool = self.pool or (pool_of(self.job.partition(", ")[0]) if self.job else "")
        found: dict[str, Any] = {"code": self.code, "pool": pool, "job": self.job, "outcome": self.outcome}
        if self.first_token_s is not None:
            found["ttft_s"] = round(self.first_token_s, 4)
        if self._usages:
            found["prompt_tokens"] = sum(usage.prompt_tokens for usage in self._usages)
            found["output_tokens"] = sum(usage.completion_tokens for usage in self._usages)
        return {name: fact for name, fact in found.items() if fact != ""}


LINE: ContextVar[RequestLine | None] = ContextVar("penstock_request_line", default=None)


@contextmanager
def new_line() -> Iterator[RequestLine]:
    """Yield the line that is noted in the block, and in the tasks that it starts."""
    line = RequestLine()
    token = LINE.set(line)
    try:
        yield line
    finally:
        LINE.reset(token)


def line_of_request() -> RequestLine:
    """Return the line of the request that runs here; outside of requests, one that is not written."""
    return LINE.get() or RequestLine()
