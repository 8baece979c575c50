"""Batches over stored files: their records, states and ids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import uuid_utils

from penstock.contract.errors import RequestError

OPEN_STATES = frozenset(("validating", "in_progress", "finalizing", "cancelling"))
TIMES = (
    *("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"),
    *("created", "expires"),
)
"""The times of a batch. Each but the last two is when it reached the state of that name."""
CANCELLED_ROW, EXPIRED_ROW = "batch_cancelled", "batch_expired"
"""Codes of the rows in an error file that were not answered before their batch was canceled or expired."""
ENDED_STATES = frozenset(("completed", "failed", "expired", "cancelled"))
MAX_WINDOW_S = 30 * 86_400
_MAX_LIFE_S = 1 << 33
MESSAGES_ENDPOINT = "/v1/messages"
"""The endpoint of message batches."""
FLOW_ENDPOINT = "flow"
"""The endpoint of flows: batches whose rows have endpoints of their own, and wait for other rows."""
_MESSAGE_PREFIX = "msgbatch_"
_BATCH_ID = re.compile(r"(?:msg)?batch_[0-9a-f]{32}")
_WINDOW = re.compile(r"(\d{1,4})([hd])")
_UNITS = {"h": 3600, "d": 86_400}


def new_batch_id() -> str:
    """Return the id of a new batch."""
    return f"batch_{uuid_utils.uuid7().hex}"


def new_message_batch_id() -> str:
    """Return the id of a new message batch."""
    return f"{_MESSAGE_PREFIX}{uuid_utils.uuid7().hex}"


def is_batch_id(text: str) -> bool:
    """Return whether `text` has the form of a batch's id."""
    return _BATCH_ID.fullmatch(text) is not None


def is_of_messages(batch_id: str) -> bool:
    """Return whether an id is that of a message batch."""
    return batch_id.startswith(_MESSAGE_PREFIX)


def window_s(text: str) -> int:
    """Return the seconds of a completion window such as `24h` or `7d`. Raises RequestError."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise RequestError(
            "completion_window must be a number of hours or days, such as 24h or 7d, up to 30d",
            param="completion_window",
        )
    return seconds


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """What the caller asked for."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Mapping[str, str] | None = None
    output_life_s: int | None = None
    """Seconds for which the output and the error file are kept; None: as long as other files."""
    key_id: str = ""
    """The API key on whose terms the rows run; empty without one."""
    ignores_unknown: bool = False
    """Whether unknown fields of a row of a message batch have no effect. Otherwise they fail it."""
    max_attempts: int | None = None
    retry_backoff_s: float | None = None
    """Those of its rows that say nothing of their own; None: as the pool says."""

    def encoded(self) -> str:
        """Return it as JSON."""
        # A batch without them has the same digest as before there were any.
        left_out = ("max_attempts", "retry_backoff_s")
        fields = {name: value for name, value in asdict(self).items() if value is not None or name not in left_out}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def decoded(cls, text: str) -> BatchSpec:
        """Return what `encoded` gave. Raises ValueError or TypeError for anything else."""
        spec = cls(**json.loads(text))
        texts, life_s = (spec.input_file_id, spec.endpoint, spec.completion_window, spec.key_id), spec.output_life_s
        is_right = all(isinstance(one, str) for one in texts) and isinstance(spec.metadata, dict | None)
        if not is_right or not (life_s is None or (type(life_s) is int and 0 <= life_s <= _MAX_LIFE_S)):
            raise ValueError("not what `encoded` gave")
        if not all(isinstance(one, int | float | None) for one in (spec.max_attempts, spec.retry_backoff_s)):
            raise ValueError("not what `encoded` gave")
        return spec


@dataclass(frozen=True, slots=True)
class RowProblem:
    """Why an input is refused. `line` is None if it is not a single line's fault."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch as Redis knows it. Times are milliseconds."""

    batch_id: str
    tenant: str
    spec: BatchSpec
    status: str
    times: Mapping[str, int]
    ending: str = ""
    """The state in which a batch that is finalizing will end."""
    num_rows: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_stopped: int = 0
    """The failed rows that were not answered because the batch was canceled or its window ended."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    problems: Sequence[RowProblem] = ()
    is_paused: bool = False
    waiting: str = ""
    """Why its rows wait. Empty: they do not."""
    rows_per_s: float = 0.0
    made: Sequence[tuple[int, int]] = ()
    """Of a flow: the rows whose `for_each` has made rows, and how many. The made rows follow those of the input."""

    @property
    def is_flow(self) -> bool:
        """Whether its rows may wait for each other."""
        return self.spec.endpoint == FLOW_ENDPOINT

    @property
    def is_open(self) -> bool:
        """Whether it may still change."""
        return self.status in OPEN_STATES


@dataclass(frozen=True, slots=True)
class Part:
    """A committed part: an object of the storage with lines of the output (`output`) or of the error file (`error`)."""

    name: str
    kind: str
    num_bytes: int


@dataclass(slots=True)
class PartCounts:
    """What the rows of a part add to the counts of their batch."""

    completed: int = 0
    failed: int = 0
    stopped: int = 0
    """Those of the failed rows that were not answered because the batch ended early."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, usage: Mapping[str, Any]) -> None:
        """Count the usage of an answer, in the shape of chats, of responses or of messages."""
        # Messages count cached tokens apart from the others.
        cached = usage.get("cache_read_input_tokens") or 0
        self.input_tokens += cached + (usage.get("prompt_tokens") or usage.get("input_tokens") or 0)
        self.output_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.cached_tokens += cached + (details.get("cached_tokens") or 0)
        output = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        self.reasoning_tokens += output.get("reasoning_tokens") or output.get("thinking_tokens") or 0


@dataclass(slots=True)
class BatchLease:
    """A lease of a batch, which its holder renews. Only this token's holder can change the batch."""

    batch_id: str
    token: int
    valid_until_s: float
    """Time of the event loop until which no other process can have taken it."""
    status: str = ""
    is_paused: bool = False
    is_lost: bool = False
    is_released: bool = False
    """Whether its holder gives it back. It is not renewed then: the next holder would wait for its end."""
    waiting: str = ""
    rows_per_s: float = 0.0
