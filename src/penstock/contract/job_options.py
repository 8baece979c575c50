"""The options of a job as callers give them: fields of HTTP bodies, flags, and keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Annotated, Any, Final, TypedDict

from pydantic import BaseModel, Field

from penstock.contract.channel import ChannelOfJob, ChannelOption, GivenChannel
from penstock.contract.durability import Durability
from penstock.contract.durations import GivenSpan, Span
from penstock.contract.fields import (
    BATCH_ROWS,
    COMPACT,
    COUNT_TOKENS,
    EMBEDDINGS,
    JOBS,
    MESSAGES,
    OPENAI,
    RESPONSES,
    Option,
    option_of,
)
from penstock.contract.job_terms import (
    MAX_DEADLINE_S,
    MAX_KEY_CONCURRENCY,
    MAX_KEY_RATE,
    MAX_METADATA,
    MAX_READER_GRACE_S,
    MAX_TAGS,
    MIN_KEY_RATE,
    Metadata,
    ResponseRecord,
    Tag,
)
from penstock.contract.priority import ClassName, Priority
from penstock.contract.retries import (
    MAX_ATTEMPTS,
    MAX_RETRY_BACKOFF_S,
    GivenCheck,
    OutputCheckOfJob,
    OutputCheckOption,
    RetryCause,
)
from penstock.contract.sampling import SamplingOptions, SamplingParams
from penstock.contract.tasks import Task
from penstock.contract.tenant import Terms
from penstock.contract.tools import ToolChoice
from penstock.contract.webhook import MAX_WEBHOOKS, EndpointId

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

    max_attempts: Annotated[
        int | None,
        Field(ge=1, le=MAX_ATTEMPTS),
        Option(
            {RESPONSES: None, **_NOT_DELAYED},
            flag="How often the job is tried before it fails, up to 8. Default: the pool's setting.",
            help="how often the job is tried before it fails, 1 to 8; by default the pool's `max_attempts`. After an "
            "error of the node or its engine it goes on after its last token. After an output that `check_output` "
            "refuses, a new job with a new seed takes its place.",
        ),
    ] = None
    retry_backoff_s: Annotated[
        float | None,
        Field(ge=0, le=MAX_RETRY_BACKOFF_S),
        Option(
            {RESPONSES: None, **_NOT_DELAYED},
            flag="Mean seconds before the second attempt; doubles with each. Default: the pool's setting.",
            help="mean seconds before the second attempt, which double with each further one, up to an hour; each "
            "pause is chosen between half and one and a half of it. By default the pool's `retry_backoff_ms`.",
        ),
    ] = None
    retry_on: Annotated[
        tuple[RetryCause, ...] | None,
        Field(min_length=1, max_length=3),
        Option(
            {RESPONSES: None, **_NOT_DELAYED},
            flag="An error after which it is tried again. Repeat it for several. Default: all.",
            help="the errors after which it is tried again: `model_error`, `internal_error`, `output_rejected`; by "
            "default all of them.",
        ),
    ] = None
    check_output: Annotated[
        OutputCheckOfJob,
        Option(
            {OPENAI: None, RESPONSES: None, **_NOT_DELAYED, BATCH_ROWS: "check_output"},
            in_json=GivenCheck,
            flag="What the text of each choice must match.",
            help='what the text of each choice must match: `{"json_schema": …}` or `{"regex": …}`, which must match '
            "the whole text. The node checks the finished output in a process of its own; another output fails the "
            "job (`output_rejected`) and counts as an attempt.",
        ),
    ] = None
    concurrency_key: Annotated[
        Tag | None,
        Option(
            {RESPONSES: None, **_NOT_DELAYED},
            flag="Key whose jobs share max_concurrency and max_per_second.",
            help="a name of your own, such as a user or a document: jobs with the same key share `max_concurrency` and "
            "`max_per_second`. Those beyond them wait outside the queue.",
        ),
    ] = None
    max_concurrency: Annotated[
        int | None,
        Field(ge=1, le=MAX_KEY_CONCURRENCY),
        Option(
            {RESPONSES: None, **_NOT_DELAYED},
            flag="Most jobs of the key that are queued or running.",
            help="the most jobs of its `concurrency_key` with which this one may be queued or running.",
        ),
    ] = None
    max_per_second: Annotated[
        float | None,
        Field(ge=MIN_KEY_RATE, le=MAX_KEY_RATE),
        Option(
            {RESPONSES: None, **_NOT_DELAYED},
            flag="Most jobs of the key that join the queue in a second.",
            help="the most jobs of its `concurrency_key` that join the queue in a second, at equal distances.",
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
    max_attempts: int | None
    retry_backoff_s: Span | None
    retry_on: Sequence[RetryCause] | None
    check_output: OutputCheckOption
    concurrency_key: str | None
    max_concurrency: int | None
    max_per_second: float | None


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
