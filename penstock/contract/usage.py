"""Usage of a tenant, reported to its owner and to operators."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

MAX_DAYS = 92
"""Days for which usage is kept; equals USAGE_DAYS of prelude.lua."""


@dataclass(frozen=True, slots=True, order=True)
class DayUsage:
    """Usage of one account in one pool on one UTC day. A job counts on the day on which it ends.

    `account` is an API key's id, or empty. `cached_tokens` is the part of `prompt_tokens` that the prefix cache
    supplied.
    """

    day: date
    pool: str
    tenant: str
    account: str
    jobs: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
