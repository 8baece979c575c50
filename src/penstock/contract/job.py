"""Jobs, and the options with which callers submit them. pydantic checks both where they enter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from penstock.contract.adapters import AdapterRef
from penstock.contract.channel import ChannelOfJob
from penstock.contract.durability import MEMORY as MEMORY
from penstock.contract.durability import Durability as Durability
from penstock.contract.durability import checked_durability as checked_durability
from penstock.contract.fields import CheckedInput
from penstock.contract.job_id import JOB_ID_PATTERN
from penstock.contract.job_id import JobKey as JobKey
from penstock.contract.job_id import created_at as created_at
from penstock.contract.job_id import is_job_id as is_job_id
from penstock.contract.job_id import pool_of as pool_of
from penstock.contract.job_id import seed_of as seed_of
from penstock.contract.job_options import DURATIONS as DURATIONS
from penstock.contract.job_options import LATER_THAN_START as LATER_THAN_START
from penstock.contract.job_options import OPTIONS_OF_QUEUE as OPTIONS_OF_QUEUE
from penstock.contract.job_options import RETURN_PROGRESS as RETURN_PROGRESS
from penstock.contract.job_options import JobOptions as JobOptions
from penstock.contract.job_options import QueueFields as QueueFields
from penstock.contract.job_options import QueueOptions as QueueOptions
from penstock.contract.job_options import SubmitOptions as SubmitOptions
from penstock.contract.job_options import TaskQueueOptions as TaskQueueOptions
from penstock.contract.job_terms import MAX_CUSTOM_ID_CHARS as MAX_CUSTOM_ID_CHARS
from penstock.contract.job_terms import MAX_DEADLINE_S as MAX_DEADLINE_S
from penstock.contract.job_terms import MAX_KEY_CONCURRENCY as MAX_KEY_CONCURRENCY
from penstock.contract.job_terms import MAX_KEY_RATE as MAX_KEY_RATE
from penstock.contract.job_terms import MAX_METADATA as MAX_METADATA
from penstock.contract.job_terms import MAX_METADATA_KEY_CHARS as MAX_METADATA_KEY_CHARS
from penstock.contract.job_terms import MAX_METADATA_VALUE_CHARS as MAX_METADATA_VALUE_CHARS
from penstock.contract.job_terms import MAX_READER_GRACE_S as MAX_READER_GRACE_S
from penstock.contract.job_terms import MAX_TAG_CHARS as MAX_TAG_CHARS
from penstock.contract.job_terms import MAX_TAGS as MAX_TAGS
from penstock.contract.job_terms import MIN_KEY_RATE as MIN_KEY_RATE
from penstock.contract.job_terms import NO_RESPONSE as NO_RESPONSE
from penstock.contract.job_terms import TAG_PATTERN as TAG_PATTERN
from penstock.contract.job_terms import Metadata as Metadata
from penstock.contract.job_terms import Name as Name
from penstock.contract.job_terms import ResponseRecord as ResponseRecord
from penstock.contract.job_terms import Tag as Tag
from penstock.contract.priority import Priority as Priority
from penstock.contract.priority import level_of
from penstock.contract.prompt import MAX_MESSAGES as MAX_MESSAGES
from penstock.contract.prompt import Message as Message
from penstock.contract.prompt import PackedPrompt as PackedPrompt
from penstock.contract.retries import MAX_ATTEMPTS, MAX_RETRY_BACKOFF_S, OutputCheck, OutputCheckOfJob, RetryCause
from penstock.contract.sampling import MAX_TOKENS_LIMIT as MAX_TOKENS_LIMIT
from penstock.contract.sampling import SamplingParams as SamplingParams
from penstock.contract.sampling import Text, encodable
from penstock.contract.sampling import TokenId as TokenId
from penstock.contract.sampling import lowered_max_tokens as lowered_max_tokens
from penstock.contract.tasks import GENERATE, Detokenize, Embed, Task, TextTask
from penstock.contract.tools import MAX_CALLS_OF_CHAT, TemplateKwargs, Tools, few_calls
from penstock.contract.webhook import MAX_WEBHOOKS, EndpointId

PREDICTED_OUTPUT_TOKENS = 256
"""Predicted output tokens per choice, or max_tokens if less, until nodes report measured lengths."""
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
    max_attempts: Annotated[int, Field(ge=1, le=MAX_ATTEMPTS)] | None = None
    """How often it is tried; None: the pool's setting."""
    retry_on: Annotated[tuple[RetryCause, ...], Field(min_length=1)] | None = None
    """The errors after which it is tried again; None: all that may be named."""
    check_output: OutputCheckOfJob = None
    """What the text of each choice must match."""
    spent: tuple[int, int, int, int] | None = None
    """The tokens of the jobs whose outputs were refused before this one: prompt, completion, cached, reasoning."""
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
    retry_backoff_ms: int | None = Field(default=None, ge=0, le=1000 * MAX_RETRY_BACKOFF_S)
    """The mean pause before the second attempt; None: the pool's setting."""
    concurrency_key: Tag | None = None
    """Jobs of the tenant with the same key share the two limits below, each as its job states it."""
    max_concurrency: Annotated[int, Field(ge=1, le=MAX_KEY_CONCURRENCY)] | None = None
    max_per_second: Annotated[float, Field(ge=MIN_KEY_RATE, le=MAX_KEY_RATE)] | None = None
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

    @model_validator(mode="after")
    def _key_has_limit(self) -> Self:
        has_limit = self.max_concurrency is not None or self.max_per_second is not None
        if has_limit and self.concurrency_key is None:
            raise ValueError("max_concurrency and max_per_second need a concurrency_key")
        if self.concurrency_key is not None and not has_limit:
            raise ValueError("concurrency_key needs max_concurrency or max_per_second")
        if self.check_output is not None and self.task is not None:
            raise ValueError(f"check_output: a job of kind {self.kind} has no text to check")
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
    max_attempts: int | None = None
    retry_on: tuple[RetryCause, ...] | None = None
    check_output: OutputCheck | None = None
    spent: tuple[int, int, int, int] | None = None
    trace: tuple[str, ...] = ()
