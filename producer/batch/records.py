"""What a batch is, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from penstock.contract.errors import RequestError

DEFAULT_IN_FLIGHT = 64
MAX_IN_FLIGHT = 4096


@dataclass(frozen=True, slots=True)
class Batch:
    """What to run. `model` is for rows that name none; without `batch_id`, input and output make one."""

    input: str
    output: str
    model: str | None = None
    max_in_flight: int = DEFAULT_IN_FLIGHT
    batch_id: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.max_in_flight <= MAX_IN_FLIGHT:
            raise RequestError(f"max_in_flight must be 1 to {MAX_IN_FLIGHT}", param="max_in_flight")


@dataclass(frozen=True, slots=True)
class Progress:
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
