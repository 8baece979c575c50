"""Jobs, and the options with which callers submit them. pydantic checks both where they enter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import Annotated, Any, Final, Self, TypedDict

from pydantic import AfterValidator, BaseModel, Field, StringConstraints, field_validator, model_validator

from penstock.contract.adapters import AdapterRef
from penstock.contract.channel import ChannelOfJob, ChannelOption, GivenChannel
from penstock.contract.durability import MEMORY as MEMORY
from penstock.contract.durability import Durability as Durability
from penstock.contract.durations import GivenSpan, Span
from penstock.contract.fields import (
    BATCH_ROWS,
    COMPACT,
    COUNT_TOKENS,
    EMBEDDINGS,
    JOBS,
    MESSAGES,
    NAME_PATTERN,
    OPENAI,
    RESPONSES,
    CheckedInput,
    Option,
    option_of,
)
from penstock.contract.job_id import JOB_ID_PATTERN
from penstock.contract.job_id import JobKey as JobKey
from penstock.contract.job_id import created_at as created_at
from penstock.contract.job_id import is_job_id as is_job_id
from penstock.contract.job_id import pool_of as pool_of
from penstock.contract.job_id import seed_of as seed_of
from penstock.contract.priority import ClassName, level_of
from penstock.contract.priority import Priority as Priority
from penstock.contract.prompt import MAX_MESSAGES as MAX_MESSAGES
from penstock.contract.prompt import Message as Message
from penstock.contract.prompt import PackedPrompt as PackedPrompt
from penstock.contract.sampling import MAX_TOKENS_LIMIT as MAX_TOKENS_LIMIT
from penstock.contract.sampling import SamplingOptions, Text, encodable
from penstock.contract.sampling import SamplingParams as SamplingParams
from penstock.contract.sampling import TokenId as TokenId
from penstock.contract.sampling import lowered_max_tokens as lowered_max_tokens
from penstock.contract.tasks import GENERATE, Detokenize, Embed, Task, TextTask
from penstock.contract.tenant import Terms
from penstock.contract.tools import MAX_CALLS_OF_CHAT, TemplateKwargs, ToolChoice, Tools, few_calls
from penstock.contract.webhook import MAX_WEBHOOKS, EndpointId


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """Bytes that are stored in the same step as a job, and for how long they and the job's result are kept."""

    data: bytes = field(repr=False)
    keep_ms: int
    """Milliseconds after the job's end. While the job is open, its record does not expire."""


NO_RESPONSE = ResponseRecord(b"", 0)
"""Stands for the absence of a record."""


PREDICTED_OUTPUT_TOKENS = 256
"""Predicted output tokens per choice, or max_tokens if less, until nodes report measured lengths."""
MAX_DEADLINE_S = 366 * 24 * 3600
"""Longest time for which a job may wait for its start, or live: a year."""
MAX_READER_GRACE_S = 600
"""Longest time for which a job that needs a reader may be without one. sweep.lua forgets readers after that time."""
MAX_TAGS = 4
MAX_TAG_CHARS = 64
TAG_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.:=/@+-]*$"
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Tag = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TAG_CHARS, pattern=TAG_PATTERN)]
"""A name by which its tenant's jobs can be listed."""
MAX_CUSTOM_ID_CHARS = 256
Metadata = dict[
    Annotated[str, StringConstraints(min_length=1, max_length=MAX_METADATA_KEY_CHARS), AfterValidator(encodable)],
    Annotated[str, StringConstraints(max_length=MAX_METADATA_VALUE_CHARS), AfterValidator(encodable)],
]
NO_SAMPLING = SamplingParams()
"""The options of a job that names none."""


class JobDef(CheckedInput):
    """One request as submitted: a prompt in exactly one of three forms, sampling parameters, and queueing options.

    `id` is `<pool>.<uuidv7>`. The caller creates it, so that a retried submit is the same job. `deadline_ms`, `ttl_ms`
    and `not_before_ms` are durations from the moment of submission. Until `not_before_ms` has passed, no node takes the
    job and its priority does not age. A job that no node has taken when `ttl_ms` has passed expires. No caller waits
    for a `background` job, so foreground work goes first.

    The fields that `Request` has too travel to the node, in this order.
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
    max_total_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_LIMIT)] | None = None
    """The most tokens of prompt and output together, to which the node lowers `params.max_tokens`. It is part of the
    job, so every node that runs it lowers the limit alike. None: a larger `max_tokens` is refused."""
    return_progress: bool = False
    """Whether the node reports to the readers how far it has computed the prompt."""
    adapter: AdapterRef | None = None
    """The LoRA adapter that the model runs with."""
    task: Task | None = None
    """What to do with the prompt instead of generating text from it."""
    # By a factory, because pydantic copies a default deeply.
    params: SamplingParams = Field(default_factory=lambda: NO_SAMPLING)
    tenant: Name = "default"
    priority: Priority = Priority.STANDARD
    deadline_ms: int | None = Field(default=None, ge=1, le=1000 * MAX_DEADLINE_S)
    ttl_ms: int | None = Field(default=None, ge=1, le=1000 * MAX_DEADLINE_S)
    not_before_ms: int | None = Field(default=None, ge=0, le=1000 * MAX_DEADLINE_S)
    background: bool = True
    needs_reader: bool | None = None
    """Whether the job is canceled when it loses all its readers; None: a foreground job, or one with a reader grace."""
    reader_grace_ms: int | None = Field(default=None, ge=1_000, le=1000 * MAX_READER_GRACE_S)
    """How long a job that needs a reader may be without one; None: the pool's setting."""
    max_wait_ms: int | None = Field(default=None, ge=1, le=1000 * MAX_DEADLINE_S)
    """The longest expected wait in the queue with which a foreground job is accepted; None: the pool's limit."""
    in_feed: bool = True
    """Whether its end is among its tenant's completions."""
    durability: Durability | None = None
    """What its submission waits for; None: the client's setting. It is a property of each call, so the request's hash
    does not have it."""
    token_durability: Durability | None = None
    """What the readers of the submitting process wait for; None: the client's setting. The request's hash does not have
    it either."""
    idempotency_key: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    tags: Annotated[tuple[Tag, ...], Field(max_length=MAX_TAGS)] = ()
    metadata: Annotated[Metadata, Field(max_length=MAX_METADATA)] | None = None
    """The caller's own notes, shown with the job."""
    custom_id: (
        Annotated[str, StringConstraints(min_length=1, max_length=MAX_CUSTOM_ID_CHARS), AfterValidator(encodable)]
        | None
    ) = None
    """The caller's name of the job, shown with it."""
    retry_of: Annotated[str, StringConstraints(pattern=JOB_ID_PATTERN)] | None = None
    """The ended job of the same pool whose request this one repeats."""
    webhooks: Annotated[tuple[EndpointId, ...], Field(max_length=MAX_WEBHOOKS)] = ()
    """The endpoints that are told of its end."""
    channel: ChannelOfJob = None
    """The channel in Redis on which the queue also publishes its chunks. It is no part of the request."""

    @field_validator("tags", "webhooks", mode="before")
    @classmethod
    def _each_once(cls, value: Any) -> Any:
        if value is None:
            return ()
        # The number of given names is checked, not that of different ones.
        return tuple(dict.fromkeys(value)) if isinstance(value, list | tuple) and len(value) <= MAX_TAGS else value

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
        if self.params is not NO_SAMPLING and self.params != NO_SAMPLING:
            raise ValueError(f"a job of kind {self.kind} has no sampling parameters")
        if self.adapter is not None and not self.num_sequences:
            raise ValueError(f"a job of kind {self.kind} has no adapter")
        if isinstance(self.task, TextTask):
            if self.messages is not None and (self.task.texts or not isinstance(self.task, Embed)):
                raise ValueError(f"the prompt of a job of kind {self.kind} with several texts must be a text")
            return self
        packed = self.packed_prompt
        has_ids = self.prompt_token_ids is not None or (packed is not None and packed.form == "tokens")
        if has_ids != isinstance(self.task, Detokenize):
            wanted = "token ids" if isinstance(self.task, Detokenize) else "a text or a chat"
            raise ValueError(f"the prompt of a job of kind {self.kind} must be {wanted}")
        return self

    @model_validator(mode="after")
    def _begins_before_deadline(self) -> Self:
        for name in ("deadline_ms", "ttl_ms"):
            end_ms = getattr(self, name)
            if end_ms is not None and (self.not_before_ms or 0) >= end_ms:
                raise ValueError(f"not_before_ms ({self.not_before_ms}) must be less than {name} ({end_ms})")
        return self

    @property
    def kind(self) -> str:
        """The kind of job, which names its task."""
        return GENERATE if self.task is None else self.task.kind

    @property
    def num_sequences(self) -> int:
        """The sequences that the job occupies in an engine; 0 for a task that needs no engine."""
        return self.params.num_sequences if self.task is None else self.task.num_sequences

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of the job's sequences: the caller's, or those of its task."""
        return self.params if self.task is None else SamplingParams(**self.task.sampling())

    @property
    def level(self) -> int:
        """The level of the queue, which follows from its class and kind of work."""
        return level_of(self.priority, self.background)

    @property
    def requires_reader(self) -> bool:
        """Whether the job is canceled when it loses all its readers."""
        if self.needs_reader is None:
            return not self.background or self.reader_grace_ms is not None
        return self.needs_reader

    @property
    def pool(self) -> str:
        """The pool (a served model and its nodes) that the id names."""
        return pool_of(self.id)


@dataclass(frozen=True, slots=True)
class Request:
    """The part of a job that its node needs, and what it carries of a trace; stored in P:request:<id>."""

    params: SamplingParams
    prompt: str | None = None
    prompt_token_ids: tuple[TokenId, ...] | None = None
    messages: tuple[Message, ...] | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    max_total_tokens: int | None = None
    return_progress: bool = False
    adapter: AdapterRef | None = None
    task: Task | None = None
    trace: tuple[str, ...] = ()


# Options of a job as callers give them: fields of HTTP bodies, and keyword arguments.

RETURN_PROGRESS: Final = "return_progress"
"""Also the query parameter of a stream that is read later."""
_NOT_DELAYED = {COMPACT: None, MESSAGES: None, COUNT_TOKENS: None, EMBEDDINGS: None}
_ONLY_ANSWERS = {**_NOT_DELAYED, BATCH_ROWS: None}
_ONLY_JOBS = {OPENAI: None, RESPONSES: None, **_ONLY_ANSWERS}
_NOT_LISTED = {COMPACT: None, COUNT_TOKENS: None}


_Seconds = Annotated[float | None, Field(gt=0, le=MAX_DEADLINE_S)]


class QueueFields(BaseModel):
    """The options of the queue, each declared once: type, range, names in HTTP bodies, meaning, and flag of `submit`.

    HTTP bodies, rows of batches, tasks, flags, the job's durations and the help of `JobOptions` are made from it. An
    option whose name ends with `_s` is a duration in seconds, which becomes the field of JobDef that ends with `_ms`.
    """

    deadline_s: Annotated[
        _Seconds,
        Option(
            {MESSAGES: None, COUNT_TOKENS: None},
            flag="Seconds after which an unfinished job is ended. Default: no deadline.",
            help="seconds after which the job expires if it is not done.",
        ),
    ] = None
    ttl_s: Annotated[
        _Seconds,
        Option(
            {MESSAGES: None, COUNT_TOKENS: None},
            flag="Seconds after which a job that no node has started is ended. Default: none.",
            help="seconds after which the job expires if no node has started it. It never ends a job that a node has "
            "started.",
        ),
    ] = None
    not_before_s: Annotated[
        float | None,
        Field(ge=0, le=MAX_DEADLINE_S),
        Option(
            {RESPONSES: None, **_NOT_DELAYED},
            in_json=GivenSpan,
            flag="Seconds to wait before the job may run, or a time with its offset. Default: no wait.",
            help="seconds that the job waits before it enters the queue, or a time with its offset.",
        ),
    ] = None
    return_progress: Annotated[
        bool | None, Option(_ONLY_ANSWERS, help="let `AsyncJob.waiting` tell how far the prompt is computed.")
    ] = None
    max_wait_s: Annotated[
        _Seconds,
        Option(
            _ONLY_ANSWERS,
            help="refuse a foreground job that would wait longer than this in the queue; by default the pool's "
            "setting.",
        ),
    ] = None
    reader_grace_s: Annotated[
        float | None,
        Field(ge=1, le=MAX_READER_GRACE_S),
        Option(
            {OPENAI: None, **_ONLY_ANSWERS},
            help="cancel the job when it had no reader for so many seconds (1 to 600), also a background job; by "
            "default a job that needs a reader has the pool's `reattach_grace_ms`.",
        ),
    ] = None
    background: Annotated[
        bool | None,
        Option(
            {OPENAI: None, **_ONLY_ANSWERS},
            help="no caller waits for this job: it goes after all foreground work, may wait for as long as it takes, "
            "and goes on without a reader. A foreground job is canceled soon after its last reader has left.",
        ),
    ] = None
    queue_without_node: Annotated[
        bool | None,
        Option(_ONLY_JOBS, help="queue the job even while its pool has no live node; by default the client's setting."),
    ] = None
    durability: Annotated[
        Durability | None,
        Option(
            {OPENAI: None, **_ONLY_ANSWERS},
            flag="What the submission waits for: Redis, its disk, or a replica. Default: memory.",
            help="`memory` returns once Redis has the job, `fsync` once its disk has it, and `replicated` once a "
            "replica has it. The default is the client's setting for a job that goes on without a reader, and "
            "`memory` for others.",
        ),
    ] = None
    token_durability: Annotated[
        Durability | None,
        Option(
            {JOBS: None, EMBEDDINGS: None, BATCH_ROWS: None, **_NOT_LISTED},
            flag="What the answer's tokens wait for: Redis, its disk, or a replica. Default: the client's setting.",
            help="the answer shows a token once Redis has it (`memory`), once its disk has it (`fsync`), or once a "
            "replica has it (`replicated`). The default is the setting of the client or gateway.",
        ),
    ] = None
    idempotency_key: Annotated[
        str | None,
        Option(
            _ONLY_JOBS,
            help="a later submission with the same key and the same request returns the same job, also if several "
            "pools serve the model.",
        ),
    ] = None
    tags: Annotated[
        tuple[Tag, ...] | None,
        Field(max_length=MAX_TAGS),
        Option(
            _NOT_LISTED,
            flag="Tag of the job. Repeat it for several, up to 4.",
            help="up to 4 names by which `client.jobs` finds the job, such as `run:7`.",
        ),
    ] = None
    metadata: Annotated[
        Metadata | None,
        Field(max_length=MAX_METADATA),
        Option(
            _NOT_LISTED,
            flag="Text to keep with the job. Repeat it for several.",
            help="up to 16 texts by name, which are shown with the job.",
        ),
    ] = None
    webhooks: Annotated[
        tuple[EndpointId, ...] | None,
        Field(max_length=MAX_WEBHOOKS),
        Option(
            {OPENAI: None, **_ONLY_ANSWERS},
            help="up to 3 ids of webhook endpoints that are told when the job has ended; see `AsyncClient.webhooks`.",
        ),
    ] = None
    channel: Annotated[
        ChannelOfJob,
        Option(
            {**_NOT_LISTED, EMBEDDINGS: None},
            in_json=GivenChannel,
            flag="Also publish the answer on a channel of Redis: json or msgpack. Jobs may share a name.",
            help="also publish each chunk on a channel of Redis, for a client in any language: `True` as msgpack, "
            '`"json"` as an event of `/v1/jobs/ID/stream`. With `{"name": …, "format": …}`, several jobs of a tenant '
            "share a channel. The handle's `channel` is its whole name. Such a job goes on without a reader.",
        ),
    ] = None


DURATIONS: Final = {name: f"{name[:-2]}_ms" for name in QueueFields.model_fields if name.endswith("_s")}
"""Each duration → the field of JobDef with its milliseconds."""
LATER_THAN_START: Final = ("deadline_s", "ttl_s")
"""Durations that must be longer than `not_before_s`."""


class TaskQueueOptions(TypedDict, total=False):
    """The options of `QueueFields` that jobs of all kinds have, as keyword arguments."""

    deadline_s: Span | None
    ttl_s: Span | None


class QueueOptions(TaskQueueOptions, total=False):
    """The options of `QueueFields` as keyword arguments, for type checkers.

    A time in seconds may also be a timedelta, or an aware datetime until which it lasts.
    """

    not_before_s: Span | None
    return_progress: bool
    max_wait_s: Span | None
    reader_grace_s: Span | None
    background: bool
    queue_without_node: bool | None
    durability: Durability | None
    token_durability: Durability | None
    idempotency_key: str | None
    tags: Sequence[str] | None
    metadata: Mapping[str, str] | None
    webhooks: Sequence[str] | None
    channel: ChannelOption


class JobOptions(SamplingOptions, QueueOptions, total=False):
    """Keyword arguments of `submit`, `generate` and `map`: how jobs are queued, and every field of `SamplingParams`.

    model: a served model, pool, alias or adapter; optional if only one model is served.
    adapter: one of the model's LoRA adapters; naming it as the model has the same effect.
    params: all sampling options at once, instead of the single arguments.
    priority: the job's class or its name; by default `batch` for background work, and `standard` for other work.
    needs_reader: cancel the job soon after its last reader has left; by default only a foreground job.
    in_feed: list the job's end among the tenant's completions (the default), where `completions` finds it.
    lower_max_tokens: lower `max_tokens` to what the context leaves after the prompt, instead of refusing the job.
    tools: the functions that the assistant may call, in OpenAI's format; calls come back as the model writes them.
    tool_choice: `auto` (the default) lets the model decide; `required` and a named function allow only calls.
    parallel_tool_calls: whether a text that is constrained to calls may have several (the default).
    chat_template_kwargs: variables for the model's chat template, such as `enable_thinking`.
    tenant: the tenant that the job belongs to; by default the client's.
    terms: the tenant's limits and weight; by default no limits, and the client's weight.
    """

    model: str | None
    adapter: str | None
    params: SamplingParams | None
    priority: Priority | ClassName
    needs_reader: bool
    in_feed: bool
    lower_max_tokens: bool
    tools: Sequence[Mapping[str, Any]] | str | None
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any] | str | None
    tenant: str | None
    terms: Terms | None


class SubmitOptions(JobOptions, total=False):
    """Keyword arguments of `submit`: those of `JobOptions`, and what only a single job can have.

    job_id: `<pool>.<uuidv7>`; the client makes one by default.
    task: what to do with the prompt instead of generating text from it; see `AsyncClient.tokenize`.
    response: the record of a stored response, which is stored in the same step as the job.
    hides_models: errors do not list what is served; for a caller that may use only some models.
    retry_of: the ended job whose request this one repeats; see `AsyncClient.retry`.
    custom_id: your own name of the job, up to 256 characters, which is shown with it.
    """

    job_id: str | None
    task: Task | None
    response: ResponseRecord | None
    hides_models: bool
    retry_of: str | None
    custom_id: str | None


_QUEUE_HELP = [
    fill(f"{name}: {option_of(QueueFields, name).help}", 116, initial_indent="    ", subsequent_indent="        ")
    for name in QueueFields.model_fields
]
JobOptions.__doc__ = "\n".join([(JobOptions.__doc__ or "").rstrip(), *_QUEUE_HELP])
OPTIONS_OF_QUEUE = SubmitOptions.__annotations__.keys() - SamplingOptions.__annotations__.keys()
"""Options that say how a job is queued, not how its tokens are sampled."""
