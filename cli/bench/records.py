"""Records of one request: its plan, and its measurements."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Prompt = str | list[dict[str, Any]]
"""A text, or the messages of a chat."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of the load: when it is due, in seconds after the start, and what it asks for."""

    due_s: float
    prompt: Prompt
    max_tokens: int


@dataclass(slots=True)
class RequestRecord:
    """The measurements of one request. Times are seconds after the start of the load; 0 until they are known."""

    due_s: float
    ready_s: float = 0.0
    """When the load generator turned to the request; the difference to `due_s` is its own lateness."""
    sent_s: float = 0.0
    """When the request was sent. It is later than `ready_s` by the wait for one of `--max-concurrency` slots."""
    token_events_s: array[float] = field(default_factory=lambda: array("d"))
    """When each event with text arrived."""
    end_s: float = 0.0
    """When the last event of the answer's choices arrived."""
    prompt_tokens: int | None = None
    usage_tokens: int | None = None
    """Tokens of the answer by the server's usage; None if it reported none."""
    is_over: bool = False
    """Whether it was answered or failed; not while it runs, and not if it never started."""
    finish_reason: str = ""
    error: str = ""
    """Why the request failed, in words that are the same for all failures of a kind."""
    detail: str = ""
    """The server's message beside `error`."""

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer: as the server counted them, else its events with text."""
        return len(self.token_events_s) if self.usage_tokens is None else self.usage_tokens

    @property
    def ttft_s(self) -> float:
        """Time to first token, from sending the request."""
        return self.token_events_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Time from sending the request to the end of the answer."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first one; None if there is only one."""
        num_more = self.output_tokens - 1
        return (self.end_s - self.token_events_s[0]) / num_more if num_more > 0 else None

    @property
    def itl_s(self) -> list[float]:
        """Times between consecutive events with text."""
        events = self.token_events_s
        return [after - before for before, after in pairwise(events)]
