"""What a batch is, and how far it is."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Self

from penstock.contract.errors import RequestError
from penstock.contract.job import MAX_DEADLINE_S

DEFAULT_IN_FLIGHT = 64
MAX_IN_FLIGHT = 4096


@dataclass(frozen=True, slots=True)
class Batch:
    """What to run. `model` is for rows that name none; without `batch_id`, input and output make one.

    `not_before_s` is Unix time: rows are submitted at once and are not taken before then.
    """

    input: str
    output: str
    model: str | None = None
    max_in_flight: int = DEFAULT_IN_FLIGHT
    batch_id: str | None = None
    not_before_s: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.max_in_flight <= MAX_IN_FLIGHT:
            raise RequestError(f"max_in_flight must be 1 to {MAX_IN_FLIGHT}", param="max_in_flight")
        if self.not_before_s is not None and not self.not_before_s <= time.time() + MAX_DEADLINE_S:
            raise RequestError(f"not_before_s must lie at most {MAX_DEADLINE_S} s ahead", param="not_before_s")

    @property
    def delay_s(self) -> float | None:
        """How long its rows have to wait from now on; None where they need not."""
        delay_s = (self.not_before_s or 0.0) - time.time()
        return min(delay_s, MAX_DEADLINE_S) if delay_s > 0 else None


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a batch is, in rows that are safely written. `waiting` says why rows wait for the queue."""

    num_rows: int
    num_answered: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    waiting: str = ""

    @property
    def num_done(self) -> int:
        """Rows with an answer or an error."""
        return self.num_answered + self.num_failed

    def after(self, row: dict[str, Any]) -> Self:
        """The progress with one more row written."""
        if row["error"] is not None:
            return replace(self, num_failed=self.num_failed + 1)
        usage = row["response"]["body"]["usage"]
        return replace(
            self,
            num_answered=self.num_answered + 1,
            prompt_tokens=self.prompt_tokens + usage["prompt_tokens"],
            completion_tokens=self.completion_tokens + usage["completion_tokens"],
        )
