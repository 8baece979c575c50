"""What a job puts out: chunks with log-probabilities, results, waiting updates and the ledger of its events."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self, get_args

from penstock.contract.tasks import TaskOutput

MAX_LOGPROBS = 20
"""Most alternatives that are reported for a token."""
MAX_LOGPROBS_OF_JOB = 1 << 18
"""Log-probabilities of a whole job, at most: the result is a single Redis value."""
PROMPT_TOKENS_PER_CHUNK = 128
"""Prompt tokens per chunk of prompt log-probabilities; the last chunk may have fewer."""


class Logprob(NamedTuple):
    """One candidate token of a position and its log-probability."""

    token_id: int
    logprob: float
    token: bytes
    """The UTF-8 bytes that the token adds to the text, possibly a partial character; a special token's name."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the actual token first, then the most likely tokens, best first.

    The first token of a prompt has no value, because no logits precede it. In `tokens`, a str is the name of a special
    token, which adds nothing to the text; bytes are an ordinary token's contribution to the text.
    """

    token_ids: tuple[int, ...]
    values: tuple[float, ...]
    tokens: tuple[bytes | str, ...]

    @property
    def logprob(self) -> float | None:
        """The log-probability of the actual token; None for the first token of a prompt."""
        return self.values[0] if self.values else None

    @property
    def token(self) -> bytes:
        """The bytes of the actual token, or the name of a special token."""
        return _bytes_of(self.tokens[0])

    @property
    def shown(self) -> bytes:
        """The bytes that the actual token adds to the text; empty for a special token."""
        token = self.tokens[0]
        return b"" if isinstance(token, str) else token

    @property
    def top(self) -> list[Logprob]:
        """The most likely tokens, best first, as many as were requested."""
        named = zip(self.token_ids[1:], self.values[1:], self.tokens[1:], strict=True)
        return [Logprob(token_id, value, _bytes_of(token)) for token_id, value, token in named]


def _bytes_of(token: bytes | str) -> bytes:
    return token.encode() if isinstance(token, str) else token


# Updates about a job before its first token: its position in the queue, then the progress of its prompt.


_P90 = 1.2816
"""The 90th percentile of the standard normal distribution."""


class WaitEstimate(NamedTuple):
    """How long a job will probably wait until a node takes it: a value, and an interval that is to hold 4 of 5 waits.

    A member None is unknown. All three are while no node knows its pace.
    """

    estimated_wait_ms: int | None = None
    estimated_wait_p10_ms: int | None = None
    """One of ten jobs waits less."""
    estimated_wait_p90_ms: int | None = None
    """One of ten jobs waits longer."""

    @classmethod
    def of(cls, wait_ms: float, spread: float) -> Self:
        """Return an estimate whose logarithm has the standard error `spread`."""
        factor = math.exp(_P90 * spread)
        return cls(math.ceil(wait_ms), math.floor(wait_ms / factor), math.ceil(wait_ms * factor))


UNKNOWN_WAIT, NO_WAIT = WaitEstimate(), WaitEstimate(0, 0, 0)

PausedKind = Literal["pool", "class", "tenant"]
"""What an operator may pause, the widest first."""


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """The estimated position of a job in its pool's queue.

    `position` is 1 for the job that would be next if the queue went by class and age, and 0 once a node has the job.
    The pool's policy may take jobs in another order.
    """

    position: int
    wait: WaitEstimate = UNKNOWN_WAIT
    paused: PausedKind | None = None
    """What is paused, so that no node takes the job. The wait is unknown then."""

    @property
    def estimated_wait_ms(self) -> int | None:
        """The value of `wait`."""
        return self.wait.estimated_wait_ms


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How many tokens of a job's prompt a node has computed. If a prompt is computed again, its count restarts."""

    total: int
    """Tokens of the prompt."""
    cached: int
    """Tokens that the prefix cache supplied."""
    processed: int
    """Tokens computed so far, the cached ones included."""
    time_ms: int
    """Milliseconds since the computation began."""


WaitUpdate = QueuePosition | PrefillProgress


def members_of(update: WaitUpdate) -> dict[str, dict[str, int | str | None]]:
    """Return an update as a member of a JSON object. `prompt_progress` has the names that llama.cpp's server uses."""
    if isinstance(update, QueuePosition):
        place: dict[str, int | str | None] = {"position": update.position, **update.wait._asdict()}
        return {"queue_progress": place if update.paused is None else place | {"paused": update.paused}}
    tokens = {"total": update.total, "cache": update.cached, "processed": update.processed}
    return {"prompt_progress": {**tokens, "time_ms": update.time_ms}}


# The output of jobs: token chunks, outcomes and results. They are plain frozen dataclasses, because the hot path
# creates thousands of them per second.

FinishReason = Literal["stop", "length", "cancelled", "error"]
OpenState = Literal["scheduled", "queued", "running", "cancelling"]
"""`scheduled`: its time has not come. `cancelling`: it runs, was canceled, and ends within a step."""
TerminalState = Literal["succeeded", "failed", "cancelled", "expired", "dead"]
"""`dead`: it lost its nodes too often without progress, and is a dead letter."""
STATES: tuple[str, ...] = (*get_args(OpenState), *get_args(TerminalState))
TERMINAL_STATES = frozenset(get_args(TerminalState))


def shown_state(name: str, *, is_cancelled: bool, begins_ms: int, now_ms: int) -> str:
    """Return the state that callers see of an open job that Redis stores as `name`.

    `begins_ms`: when the job joins or joined the queue.
    """
    if name == "queued" and begins_ms > now_ms:
        return "scheduled"
    return "cancelling" if name == "running" and is_cancelled else name


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a job.

    `cached_tokens` counts the prompt tokens that the prefix cache supplied, `reasoning_tokens` the completion tokens up
    to the mark that ends the reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def all_counts(self) -> tuple[int, int, int, int]:
        """Return the four counts."""
        return self.prompt_tokens, self.completion_tokens, self.cached_tokens, self.reasoning_tokens

    def plus(self, spent: tuple[int, int, int, int]) -> Usage:
        """Return these counts with those of earlier attempts."""
        return Usage(*(one + other for one, other in zip(self.all_counts(), spent, strict=True)))

    def minus(self, spent: tuple[int, int, int, int]) -> Usage:
        """Return these counts without those of earlier attempts."""
        return Usage(*(max(0, one - other) for one, other in zip(self.all_counts(), spent, strict=True)))

    def counts(self) -> list[int]:
        """Return the counts as chunks and results have them: the last one only if it is not 0."""
        first = [self.prompt_tokens, self.completion_tokens, self.cached_tokens]
        return [*first, self.reasoning_tokens] if self.reasoning_tokens else first


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended. `code` is an error code from `errors.py`, empty if done; `param` names the invalid field."""

    state: TerminalState
    code: str = ""
    message: str = ""
    param: str = ""


SUCCEEDED = Outcome("succeeded")
"""That of nearly all jobs. As one object, it costs the garbage collector of a reader of many results nothing."""


@dataclass(slots=True)
class Chunk:
    """One entry of a job's token log. The same record travels from the engine to the HTTP stream.

    Nothing changes it. It is not frozen, because each token makes one in the node and one in each reading process, and
    a frozen one takes a microsecond more.

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

    @property
    def state(self) -> TerminalState:
        """The state in which the job ended, as its status and the entries of completions name it."""
        return self.outcome.state


# A job's ledger: when the job was queued, taken, moved and finished, by which nodes, and what it used.

LeaseEnd = Literal["drain", "pressure", "lacking", "lost", "unlisted", "repaired", "failed"]
"""Why a lease ended before its job did. `drain`: the node left. `pressure`: it lacked KV capacity. `lacking`: it lacked
the adapter, or did not know a field of the job. `lost`: it died. `unlisted`: it had no such job. `repaired`: an audit
queued the job again. `failed`: an error ended the attempt, and the job has another one."""
EventName = Literal[
    "queued", "taken", "moved", "first_token", "preempted", "given_back", "node_lost", "attempt_failed", "finished"
]
_EVENT_OF: dict[str, EventName] = {"pressure": "preempted", "lost": "node_lost", "failed": "attempt_failed"}


@dataclass(frozen=True, slots=True)
class PastLease:
    """A node's lease of a job that ended before the job did. Times are Redis ms."""

    node_id: str
    taken_ms: int
    ended_ms: int
    why: LeaseEnd
    code: str = ""
    """The code of the error that ended a `failed` one."""


@dataclass(frozen=True, slots=True)
class LedgerEvent:
    """One entry of a job's ledger. `at_ms` is Redis ms."""

    event: EventName
    at_ms: int
    node_id: str = ""
    from_node_id: str = ""
    """For `moved`: the node that had the job before."""
    reason: str = ""
    """For `given_back`: a `LeaseEnd`. For `attempt_failed`: the error's code. For `finished`: the terminal state."""


@dataclass(frozen=True, slots=True)
class JobLedger:
    """The events that the queue recorded of a job. Times are Redis ms, 0 for a stage not reached yet.

    `past_leases` are the newest ones; `num_past_leases` counts all of them. `preemptions` counts how often a
    node gave the job back to the queue. `engine_preemptions` counts how often engines took the KV blocks of its
    sequences, which stayed on their node; each lease adds its count when it ends, a lost one none. `losses` counts lost
    nodes since the job last made progress. `usage` and `kv_token_ms` are None before the end, and if the node did not
    report them.
    """

    state: str
    queued_ms: int
    taken_ms: int = 0
    first_token_ms: int = 0
    finished_ms: int = 0
    node_id: str = ""
    """The node that runs the job, or that ended it."""
    retaken_ms: int = 0
    """When that node took the job, if another node or an earlier lease had it before."""
    past_leases: tuple[PastLease, ...] = ()
    num_past_leases: int = 0
    preemptions: int = 0
    engine_preemptions: int = 0
    losses: int = 0
    usage: Usage | None = None
    kv_token_ms: int | None = None
    """KV tokens × milliseconds that the last node held them."""

    def events(self) -> list[LedgerEvent]:
        """Return the entries in order of time. Leases before the oldest listed one are missing."""
        events = [LedgerEvent("queued", self.queued_ms), *self._leases()]
        if self.first_token_ms:
            events.append(LedgerEvent("first_token", self.first_token_ms))
        if self.finished_ms:
            events.append(LedgerEvent("finished", self.finished_ms, self.node_id, reason=self.state))
        # The sort is stable, so a lease's end stays before the next lease of the same millisecond.
        return sorted(events, key=lambda event: event.at_ms)

    def _leases(self) -> Iterator[LedgerEvent]:
        before = ""
        for lease in self.past_leases:
            yield _taken(lease.node_id, lease.taken_ms, before)
            event = _EVENT_OF.get(lease.why, "given_back")
            reason = lease.why if event == "given_back" else lease.code
            yield LedgerEvent(event, lease.ended_ms, lease.node_id, reason=reason)
            before = lease.node_id
        if self.node_id:
            yield _taken(self.node_id, self.retaken_ms or self.taken_ms, before)


def _taken(node_id: str, at_ms: int, before: str) -> LedgerEvent:
    has_moved = before not in ("", node_id)
    return LedgerEvent("moved" if has_moved else "taken", at_ms, node_id, before if has_moved else "")
