"""What a tenant used, as it is told to its owner and to operators."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

MAX_DAYS = 92
"""Of prelude.lua: so many days of usage are kept."""


@dataclass(frozen=True, slots=True, order=True)
class DayUsage:
    """What one account used of one pool on one day, in UTC, by the end of each job.

    `account` is an API key's id, or empty.
    `cached_tokens` are the part of `prompt_tokens` that came from the prefix cache.
    """

    day: date
    pool: str
    tenant: str
    account: str
    jobs: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
