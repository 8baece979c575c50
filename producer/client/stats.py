"""The counters of a client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ClientStats:
    """Counters of one client since its creation. A run without faults has no log reads, gaps or resubscribes."""

    messages: int = 0
    chunks: int = 0
    bad_messages: int = 0
    log_reads: int = 0
    gaps: int = 0
    resubscribes: int = 0
    resubmits: int = 0
