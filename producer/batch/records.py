"""Records of a batch and its progress."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from penstock.contract.durability import Durability, checked_durability
from penstock.contract.errors import RequestError
from penstock.contract.job import MAX_DEADLINE_S
from penstock.contract.priority import Priority

DEFAULT_IN_FLIGHT = 64
MAX_IN_FLIGHT = 4096


@dataclass(frozen=True, slots=True)
class RowTerms:
    """On what terms the rows of a batch are submitted, as far as the rows themselves do not say it."""

    model: str | None = None
    """The model for rows that name no model."""
    not_before_s: float | None = None
    """Unix time before which no node takes the rows. They are submitted at once."""
    durability: Durability | None = None
    """What the submission of each row waits for; None: the client's setting."""
    in_feed: bool = True
    """Whether the ends of the rows' jobs are among the tenant's completions."""
    priority: Priority = Priority.BATCH
    """The class of the jobs, which are background work in any class."""

    @property
    def delay_s(self) -> float:
        """Seconds from now until the rows may be taken."""
        return min(max(0.0, (self.not_before_s or 0.0) - time.time()), MAX_DEADLINE_S)


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one batch run."""

    input: str
    """A path or an fsspec URL."""
    output: str
    """A path or an fsspec URL."""
    model: str | None = None
    """The model for rows that name no model."""
    max_in_flight: int = DEFAULT_IN_FLIGHT
    """Rows that are submitted at the same time."""
    batch_id: str | None = None
    """The identity of the batch. By default it derives from the input's content, the output and the model."""
    not_before_s: float | None = None
    """Unix time before which no node takes the rows. They are submitted at once."""
    durability: Durability | None = None
    """What the submission of each row waits for; None: the client's setting."""
    in_feed: bool = False
    """Whether the ends of the rows' jobs are among the tenant's completions."""
    errors: str | None = None
    """A path or an fsspec URL for the list of failed rows; None: the output's, with `.errors.jsonl` at its end."""

    def __post_init__(self) -> None:
        checked_durability(self.durability)
        if not 1 <= self.max_in_flight <= MAX_IN_FLIGHT:
            raise RequestError(f"max_in_flight must be from 1 to {MAX_IN_FLIGHT}", param="max_in_flight")
        if self.not_before_s is not None and not self.not_before_s <= time.time() + MAX_DEADLINE_S:
            raise RequestError(f"not_before_s must be at most {MAX_DEADLINE_S} s in the future", param="not_before_s")

    def timed_by(self, offset_s: float) -> Batch:
        """Return the batch as by another clock, which is so many seconds ahead of the one of its times."""
        return self if self.not_before_s is None else replace(self, not_before_s=self.not_before_s + offset_s)

    @property
    def errors_name(self) -> str:
        """The path or fsspec URL of the list of failed rows."""
        return self.errors or self.output.removesuffix(".jsonl") + ".errors.jsonl"

    @property
    def terms(self) -> RowTerms:
        """On what terms its rows are submitted."""
        return RowTerms(self.model, self.not_before_s, self.durability, self.in_feed)


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """The progress of a batch, counted in rows that are safely on disk."""

    num_rows: int
    num_answered: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_failure: str = ""
    """The custom_id and the error of the first failed row; empty if no row failed."""
    waiting: str = ""
    """Why rows wait to be submitted. Empty: no row waits."""

    @property
    def num_done(self) -> int:
        """The rows with an answer or an error."""
        return self.num_answered + self.num_failed

    def after(self, custom_id: str, usage: Mapping[str, Any], error: Mapping[str, Any] | None) -> Self:
        """Return the progress with one more row written: one with a usage, or with an error."""
        if error is not None:
            first = self.first_failure or f"{custom_id}: {error.get('message') or error.get('code')}"
            return replace(self, num_failed=self.num_failed + 1, first_failure=first)
        # The names depend on the endpoint.
        return replace(
            self,
            num_answered=self.num_answered + 1,
            prompt_tokens=self.prompt_tokens + usage.get("prompt_tokens", usage.get("input_tokens", 0)),
            completion_tokens=self.completion_tokens + usage.get("completion_tokens", usage.get("output_tokens", 0)),
        )
