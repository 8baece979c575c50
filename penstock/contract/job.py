"""Records that travel between processes: what is asked for, what comes back.

`SamplingParams` and `Job` are checked by pydantic where they enter (client, HTTP, batch file); `Chunk`, `Usage`,
`Choice` and `Result` are plain frozen dataclasses because the hot path makes thousands of them a second.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from penstock.contract.adapters import AdapterRef
from penstock.contract.logprobs import MAX_LOGPROBS, TokenLogprobs
from penstock.contract.packed_prompt import PackedPrompt
from penstock.contract.priority import Priority as Priority
from penstock.contract.structured import StructuredOutputs
from penstock.contract.tools import MAX_CALLS, CallId, ToolCall, Tools, few_calls

if TYPE_CHECKING:
    from typing import Unpack

    from penstock.contract.sampling_options import SamplingOptions

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_MESSAGES = 4096
MAX_TOKENS_LIMIT = 1 << 20
MAX_DEADLINE_S = 7 * 24 * 3600
NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
"""A pool's or tenant's name; shards of a pool are written `<pool>~<n>` and carry no other character."""
_UUID7_PATTERN = r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
JOB_ID_PATTERN = rf"^[A-Za-z0-9_-]{{1,64}}(~[0-9]{{1,4}})?\.{_UUID7_PATTERN}$"

FinishReason = Literal["stop", "length", "cancelled", "error"]
TerminalState = Literal["done", "failed", "cancelled", "expired"]
TERMINAL_STATES = frozenset(("done", "failed", "cancelled", "expired"))


def _encodable(text: str) -> str:
    try:
        # Fifteen times as fast as a look at each character, which would hold up an event loop.
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text must be valid Unicode, without lone surrogates") from None
    return text


Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Text = Annotated[str, AfterValidator(_encodable)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_STRING_CHARS)]


class _Door(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SamplingParams(_Door):
    """How tokens are chosen and when a choice ends. Names and meanings follow vLLM's.

    `temperature == 0` is greedy. `top_k` of 0 or -1 means no limit. `min_p` drops tokens less likely than that share of
    the likeliest one. The repetition penalty counts prompt and output, the other two the output only; a negative one
    favours what was said. `logit_bias` is added to the logits of the tokens that it names, before all else. `bad_words`
    are texts whose tokens never follow each other so. `include_stop_str_in_output` leaves what ended a choice in its
    text. `max_tokens` of None runs to the model's limit. `logprobs` is how many of the likeliest tokens stand beside
    each token of the output, with how likely they and it were before all of the above; `prompt_logprobs` of the prompt.
    With no `seed` the job's id gives it, so that a job submitted twice is the same job.
    """

    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, lt=1 << 31)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS_LIMIT)
    min_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS_LIMIT)
    ignore_eos: bool = False
    stop: tuple[StopString, ...] = Field(default=(), max_length=MAX_STOP_STRINGS)
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool = False
    logit_bias: dict[TokenId, Bias] = Field(default={}, max_length=MAX_LOGIT_BIASES)
    bad_words: tuple[StopString, ...] = Field(default=(), max_length=MAX_BAD_WORDS)
    structured_outputs: StructuredOutputs | None = None
    """The form that the text must have."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    if TYPE_CHECKING:
        # A type checker would otherwise want what the fields hold, so a tuple for `stop`, where callers give a list.
        def __init__(self, **given: Unpack[SamplingOptions]) -> None: ...

    @field_validator("logit_bias")
    @classmethod
    def _by_id(cls, value: dict[int, float]) -> dict[int, float]:
        return dict(sorted(value.items()))

    @model_validator(mode="before")
    @classmethod
    def _one_stop_string(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("stop"), str):
            return {**data, "stop": (data["stop"],)}
        return data

    @field_validator("min_tokens")
    @classmethod
    def _min_below_max(cls, value: int, info: ValidationInfo) -> int:
        max_tokens = info.data.get("max_tokens")
        if max_tokens is not None and value > max_tokens:
            raise ValueError(f"{value} must not exceed max_tokens ({max_tokens})")
        return value

    @field_validator("structured_outputs")
    @classmethod
    def _ends_by_itself(cls, value: StructuredOutputs | None, info: ValidationInfo) -> StructuredOutputs | None:
        if value is not None and (info.data.get("min_tokens") or info.data.get("ignore_eos")):
            raise ValueError("says what ends a text: neither min_tokens nor ignore_eos goes with it")
        return value


class Message(_Door):
    """One turn of a chat. Of role `tool`: what the call `tool_call_id` gave."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text
    tool_calls: tuple[ToolCall, ...] = Field(default=(), max_length=MAX_CALLS)
    tool_call_id: CallId | None = None


class Job(_Door):
    """One request as it is submitted: a prompt in exactly one of three forms, and what the queue must know.

    `id` is `<pool>.<uuidv7>`, minted by the caller, so that a retry is the same job. `deadline_ms` and `not_before_ms`
    are durations from the moment of submission; before the latter it is not taken, nor does it age.
    """

    id: Annotated[str, StringConstraints(pattern=JOB_ID_PATTERN)]
    prompt: Text | None = None
    prompt_token_ids: tuple[TokenId, ...] | None = Field(default=None, min_length=1)
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    packed_prompt: PackedPrompt | None = Field(default=None, repr=False)
    """A prompt in any of the three forms that was checked and packed elsewhere."""
    tools: Tools | None = None
    """What a chat's assistant may call."""
    adapter: AdapterRef | None = None
    """The adapter that the model runs with."""
    params: SamplingParams = SamplingParams()
    tenant: Name = "default"
    priority: Priority = Priority.STANDARD
    deadline_ms: int | None = Field(default=None, ge=1, le=1000 * MAX_DEADLINE_S)
    not_before_ms: int | None = Field(default=None, ge=0, le=1000 * MAX_DEADLINE_S)
    background: bool = True
    idempotency_key: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _few_calls(cls, value: Any) -> Any:
        return few_calls(value)

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        names, packed = ("prompt", "prompt_token_ids", "messages"), self.packed_prompt
        given = [name for name in (*names, "packed_prompt") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(names)} must be given, not {given or 'none'}")
        if self.tools is not None and self.messages is None and (packed is None or packed.form != "messages"):
            raise ValueError("tools go with messages only")
        return self

    @model_validator(mode="after")
    def _begins_before_deadline(self) -> Self:
        if self.deadline_ms is not None and (self.not_before_ms or 0) >= self.deadline_ms:
            raise ValueError(f"not_before_ms ({self.not_before_ms}) must lie before deadline_ms ({self.deadline_ms})")
        return self

    @property
    def pool(self) -> str:
        """The pool (served model) that the id names."""
        return pool_of(self.id)


def pool_of(job_id: str) -> str:
    """The pool part of a public job id."""
    return job_id.partition(".")[0]


def is_job_id(text: str) -> bool:
    """Whether `text` has the form of a public job id."""
    return re.fullmatch(JOB_ID_PATTERN, text) is not None


def seed_of(job_id: str, params: SamplingParams) -> int:
    """The 64-bit seed of a job: the caller's, or one derived from the id."""
    if params.seed is not None:
        return params.seed & 0xFFFF_FFFF_FFFF_FFFF
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a job used; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended. `code` is an error code of `errors.py`, empty when done; `param` names the field at fault."""

    state: TerminalState
    code: str = ""
    message: str = ""
    param: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One entry of a job's token log, the same from engine to browser.

    `index` counts chunks of the job, `position` is the place of `token_ids[0]` in its choice. `text` is what became
    complete and may lag behind the tokens. `outcome` is set in the job's last chunk only, which carries no tokens.
    Where they were asked for, `logprobs` are those of `token_ids`; the prompt's come in chunks of their own, before all
    tokens, whose `position` counts in the prompt.
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


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished completion of a job."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, where they were asked for."""


@dataclass(frozen=True, slots=True)
class Result:
    """A job's terminal record. Times are Redis milliseconds since the epoch; 0 where the job never got that far."""

    job_id: str
    outcome: Outcome
    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    submitted_ms: int = 0
    taken_ms: int = 0
    first_ms: int = 0
    finished_ms: int = 0
    cuts: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)
    """(choice, tokens, characters of text) of each chunk, so that a reader at any index gets exactly the rest."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token of the prompt, where they were asked for."""
