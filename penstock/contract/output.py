"""The output of jobs: token chunks, outcomes and results.

They are plain frozen dataclasses, because the hot path creates thousands of them per second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.contract.logprobs import TokenLogprobs
from penstock.contract.tasks import TaskOutput

FinishReason = Literal["stop", "length", "cancelled", "error"]
TerminalState = Literal["done", "failed", "cancelled", "expired"]
TERMINAL_STATES = frozenset(("done", "failed", "cancelled", "expired"))


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a job. `cached_tokens` counts the prompt tokens that the prefix cache supplied."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended. `code` is an error code from `errors.py`, empty if done; `param` names the invalid field."""

    state: TerminalState
    code: str = ""
    message: str = ""
    param: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One entry of a job's token log. The same record travels from the engine to the HTTP stream.

    `index` counts the job's chunks. `position` is the index of `token_ids[0]` within its choice. `text` holds the
    characters completed by this chunk and may lag behind the tokens. Only the job's first chunk has
    `num_prompt_tokens`. Only its last chunk has an `outcome`; it carries no tokens. `logprobs` has one entry per token
    of `token_ids`, if requested. Log-probabilities of the prompt come in separate chunks before all output tokens;
    there `position` is an index into the prompt.
    """

    job_id: str
    index: int
    choice: int = 0
    position: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    outcome: Outcome | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished completion of a job."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token of `token_ids`, if requested."""


class FirstChoice:
    """Short forms for the first of several `choices`, which is the only one unless the request has `n`."""

    __slots__ = ()
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        """The text of the first choice; empty if there is none."""
        return self.choices[0].text if self.choices else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the first choice."""
        return self.choices[0].token_ids if self.choices else ()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first choice ended."""
        return self.choices[0].finish_reason if self.choices else None


@dataclass(frozen=True, slots=True)
class Result(FirstChoice):
    """A job's terminal record. Times are milliseconds since the epoch by Redis's clock; 0 for a stage never reached.

    `text`, `token_ids` and `finish_reason` are those of the first choice.
    """

    job_id: str
    outcome: Outcome
    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    submitted_ms: int = 0
    taken_ms: int = 0
    first_ms: int = 0
    finished_ms: int = 0
    cuts: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)
    """(choice, number of tokens, number of characters) of each chunk, so that a reader can resume at any chunk."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per prompt token, if requested."""
    output: TaskOutput | None = None
    """The output of the job's task. A job that generates text has choices instead."""
