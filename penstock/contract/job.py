"""Records that travel between processes: jobs, token chunks and results.

pydantic checks `Job` where it enters: client, HTTP or batch file. `Chunk`, `Usage`, `Choice` and
`Result` are plain frozen dataclasses, because the hot path creates thousands of them per second.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from penstock.contract.adapters import AdapterRef
from penstock.contract.logprobs import TokenLogprobs
from penstock.contract.packed_prompt import PackedPrompt
from penstock.contract.priority import Priority as Priority
from penstock.contract.sampling_params import CheckedInput, SamplingParams, TokenId
from penstock.contract.tasks import GENERATE, Detokenize, Task, TaskOutput
from penstock.contract.template_kwargs import TemplateKwargs
from penstock.contract.tools import MAX_CALLS, MAX_CALLS_OF_CHAT, CallId, ToolCall, Tools, few_calls

MAX_MESSAGES = 4096
MAX_PARTICIPANT_NAME_CHARS = 256
"""Characters of the `name` of a message."""
MAX_DEADLINE_S = 7 * 24 * 3600
NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
"""A pool's or tenant's name. A shard of a pool is written `<pool>~<n>`, so `~` is not allowed here."""
_UUID7_PATTERN = r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
JOB_ID_PATTERN = rf"^[A-Za-z0-9_-]{{1,64}}(~[0-9]{{1,4}})?\.{_UUID7_PATTERN}$"

FinishReason = Literal["stop", "length", "cancelled", "error"]
TerminalState = Literal["done", "failed", "cancelled", "expired"]
TERMINAL_STATES = frozenset(("done", "failed", "cancelled", "expired"))


def _encodable(text: str) -> str:
    try:
        # Fifteen times as fast as checking each character, which would block the event loop.
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text must be valid Unicode, without lone surrogates") from None
    return text


Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Text = Annotated[str, AfterValidator(_encodable)]
ParticipantName = Annotated[Text, StringConstraints(min_length=1, max_length=MAX_PARTICIPANT_NAME_CHARS)]


class Message(CheckedInput):
    """One message of a chat. With role `tool`, it holds the result of the call `tool_call_id`.

    `name` is the participant's name, for chat templates that use it.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text
    tool_calls: tuple[ToolCall, ...] = Field(default=(), max_length=MAX_CALLS)
    tool_call_id: CallId | None = None
    name: ParticipantName | None = None


class Job(CheckedInput):
    """One request as submitted: a prompt in exactly one of three forms, sampling parameters, and queueing options.

    `id` is `<pool>.<uuidv7>`. The caller creates it, so that a retried submit is the same job. `deadline_ms` and
    `not_before_ms` are durations from the moment of submission. Until `not_before_ms` has passed, no node takes the job
    and its priority does not age. A job with `background` false is canceled when it loses all its readers.
    """

    id: Annotated[str, StringConstraints(pattern=JOB_ID_PATTERN)]
    prompt: Text | None = None
    prompt_token_ids: tuple[TokenId, ...] | None = Field(default=None, min_length=1)
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    packed_prompt: PackedPrompt | None = Field(default=None, repr=False)
    """A prompt in any of the three forms, already checked and packed by another process."""
    tools: Tools | None = None
    """The functions that the chat's assistant may call."""
    chat_template_kwargs: TemplateKwargs | None = None
    """Variables for the model's chat template."""
    adapter: AdapterRef | None = None
    """The LoRA adapter that the model runs with."""
    task: Task | None = None
    """What to do with the prompt instead of generating text from it."""
    params: SamplingParams = SamplingParams()
    tenant: Name = "default"
    priority: Priority = Priority.STANDARD
    deadline_ms: int | None = Field(default=None, ge=1, le=1000 * MAX_DEADLINE_S)
    not_before_ms: int | None = Field(default=None, ge=0, le=1000 * MAX_DEADLINE_S)
    background: bool = True
    idempotency_key: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None

    @field_validator("messages")
    @classmethod
    def _few_calls(cls, value: Any) -> Any:
        # HTTP bodies, batch files and nodes call few_calls themselves, before they validate messages of others.
        num_calls = sum(len(message.tool_calls) for message in value or ())
        return value if num_calls <= MAX_CALLS_OF_CHAT else few_calls(value)

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        names, packed = ("prompt", "prompt_token_ids", "messages"), self.packed_prompt
        given = [name for name in (*names, "packed_prompt") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(names)} must be given, not {given or 'none'}")
        is_chat = self.messages is not None or (packed is not None and packed.form == "messages")
        for name in ("tools", "chat_template_kwargs"):
            if getattr(self, name) is not None and not is_chat:
                raise ValueError(f"{name} may be given only together with messages")
        return self

    @model_validator(mode="after")
    def _task_fits(self) -> Self:
        if self.task is None:
            return self
        if self.params != SamplingParams() or self.adapter is not None:
            raise ValueError(f"a job of kind {self.kind} has no sampling parameters and no adapter")
        packed = self.packed_prompt
        has_ids = self.prompt_token_ids is not None or (packed is not None and packed.form == "tokens")
        if has_ids != isinstance(self.task, Detokenize):
            wanted = "token ids" if isinstance(self.task, Detokenize) else "a text or a chat"
            raise ValueError(f"the prompt of a job of kind {self.kind} must be {wanted}")
        return self

    @model_validator(mode="after")
    def _begins_before_deadline(self) -> Self:
        if self.deadline_ms is not None and (self.not_before_ms or 0) >= self.deadline_ms:
            raise ValueError(f"not_before_ms ({self.not_before_ms}) must be less than deadline_ms ({self.deadline_ms})")
        return self

    @property
    def kind(self) -> str:
        """The kind of job, which names its task."""
        return GENERATE if self.task is None else self.task.kind

    @property
    def num_sequences(self) -> int:
        """The sequences that the job occupies in an engine; 0 for a task that needs no engine."""
        return self.params.n if self.task is None else self.task.num_sequences

    @property
    def pool(self) -> str:
        """The pool (a served model and its nodes) that the id names."""
        return pool_of(self.id)


def pool_of(job_id: str) -> str:
    """Return the pool that a job id names."""
    return job_id.partition(".")[0]


def is_job_id(text: str) -> bool:
    """Return whether `text` has the form of a job id."""
    return re.fullmatch(JOB_ID_PATTERN, text) is not None


def seed_of(job_id: str, params: SamplingParams) -> int:
    """Return the job's 64-bit seed: the caller's, else one derived from the job id."""
    if params.seed is not None:
        return params.seed & 0xFFFF_FFFF_FFFF_FFFF
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "little")


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


@dataclass(frozen=True, slots=True)
class Result:
    """A job's terminal record. Times are milliseconds since the epoch by Redis's clock; 0 for a stage never reached."""

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
    """What the job's task returned. A job that generates text has choices instead."""
