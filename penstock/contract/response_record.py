"""The record of a stored response, as the queue keeps it beside the response's job."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """Bytes that are stored in the same step as a job, and for how long they and the job's result are kept."""

    data: bytes = field(repr=False)
    keep_ms: int
    """Milliseconds after the job's end. While the job is open, its record does not expire."""


NO_RESPONSE = ResponseRecord(b"", 0)
"""Stands for the absence of a record."""
