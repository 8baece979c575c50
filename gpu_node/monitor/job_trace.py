"""The part of a job's trace that a node keeps while it holds the job. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link


@dataclass(slots=True)
class JobTrace:
    """The trace of one job. Times are of this process's monotonic clock."""

    parent: Context
    """The context of the span that submitted the job."""
    trace_id: str
    """The trace id in hexadecimal, as logs show it."""
    operation: str
    """GenAI's name of what the job asks for."""
    queued_s: float
    """When it began to wait: at its submission, or when its last lease ended."""
    links: tuple[Link, ...] = ()
    """A link to the last lease's span, if the job had one."""
    has_begun: bool = False
    """Whether the spans before the first output are recorded."""
