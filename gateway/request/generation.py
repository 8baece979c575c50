"""A request for generation, from its checked body to what is submitted for it, as pure data."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self, TypedDict, Unpack, cast, runtime_checkable

from pydantic import ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json, to_json

from penstock.contract.errors import PenstockError, RequestError
from penstock.contract.fields import UNKNOWN_FIELD, WRONG_MEMBER, Endpoint, IgnoredFields, Wire, given_options, names_at
from penstock.contract.job import (
    RETURN_PROGRESS,
    JobKey,
    Priority,
    QueueFields,
    QueueOptions,
    ResponseRecord,
    SamplingParams,
)
from penstock.contract.json_text import json_refusal
from penstock.contract.priority import ClassName
from penstock.contract.problems import MAX_NAME_CHARS, joined, put_under, rename, request_error
from penstock.contract.tasks import Task
from penstock.contract.tenant import UNLIMITED, Terms
from penstock.contract.tools import NO_TOOLS, ToolUse
from penstock.producer.client.request import Prompt, pack_prompt_of

MAX_CHOICES_OF_REQUEST = 256
"""Most choices of one HTTP request for text, over all its prompts."""
MAX_IGNORED_SHOWN = 32
"""Most ignored fields of a body that its answer lists."""
FIRST_OF_TWO = ".1"
"""The end of the id of a chunk's first event, if the chunk has two."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The position in a stream after the last chunk that the caller received."""

    job_id: str
    index: int
    """Index of that chunk in the job's log."""
    num_tokens: int
    """Tokens of the stream up to the end of that chunk."""
    lacks_end: bool = False
    """Whether the caller received only the first of that chunk's two events."""


@dataclass(frozen=True, slots=True)
class RequestContent:
    """What the body of a request asks for, without the caller and the headers."""

    model: str
    """The model's name. Empty if the request names none, which is allowed while only one model is served."""
    prompts: Sequence[Prompt]
    """Each prompt becomes one job."""
    params: SamplingParams
    names: Mapping[str, str] = field(default_factory=dict)
    """Maps penstock's field names to the names in the body where they differ. Errors use the latter."""
    tool_use: ToolUse = NO_TOOLS
    """The tools that the assistant of a chat may or must call."""
    echoes: bool = False
    """Whether the answer begins with the prompt."""
    template_kwargs: str | None = None
    """Variables for the model's chat template, as JSON text."""
    task: Task | None = None
    """What the jobs do instead of generating text."""

    @property
    def needs_token_details(self) -> bool:
        """Whether the answer needs more than text of the tokens: an echo of the prompt, or log-probabilities."""
        return self.echoes or self.params.needs_token_details


FIRST_PROMPT = "first prompt"
"""The entry of `RequestContent.names` for a first prompt that has a field of its own, such as a query."""
PAIRED_PROMPT = "paired prompt"
"""The entry for every other prompt, beginning with the first, where prompts come in pairs of two fields."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A generation request: one job for each prompt, all with the same options."""

    content: RequestContent
    priority: Priority = Priority.STANDARD
    tenant: str = "default"
    terms: Terms = UNLIMITED
    idempotency_key: str | None = None
    queueing: QueueOptions = field(default_factory=QueueOptions)
    """What the body says about the queue."""
    lowers_max_tokens: bool = False
    """Whether `max_tokens` is lowered to what the model's context leaves after the prompt, instead of refused."""
    cut_at: StreamPosition | None = None
    """The position after which to resume an earlier stream. If set, no job is submitted."""
    event_ids: bool = False
    """Whether the events of a stream have ids, or numbers of a stored response. Only such a stream can be resumed."""
    replay_from_start: bool = False
    """Whether a resumed stream is read from its start, because its later chunks depend on earlier ones."""
    job_id: str | None = None
    """The id of the job, for a request with one prompt. The client makes one by default."""
    background: bool = False
    """Whether no caller waits for the jobs."""
    needs_reader: bool | None = None
    """Whether the jobs are canceled when they lose all their readers; None: unless they are background jobs."""
    hides_models: bool = False
    """Whether the caller may use only some models. Then an error must not list what else is served."""
    response: ResponseRecord | None = None
    """The record that is stored with the job of a stored response."""

    @property
    def read_after(self) -> int:
        """The index of the chunk after which to read a log; the chunk at `cut_at` is read again for comparison."""
        return -1 if self.cut_at is None or self.replay_from_start else self.cut_at.index - 1

    @property
    def requires_reader(self) -> bool:
        """Whether the jobs are canceled when they lose all their readers."""
        return not self.background if self.needs_reader is None else self.needs_reader

    @property
    def shows_waiting(self) -> bool:
        """Whether a stream reports queue position and prompt progress of its jobs before their first chunks."""
        return bool(self.queueing.get(RETURN_PROGRESS))

    @property
    def key(self) -> JobKey | None:
        """The idempotency key of a request with one prompt."""
        return None if self.idempotency_key is None else JobKey(self.tenant, self.idempotency_key)

    def key_of(self, index: int) -> str | None:
        """Return the idempotency key for the job of the prompt at `index`, or None."""
        if self.idempotency_key is None or len(self.content.prompts) == 1:
            return self.idempotency_key
        return f"{self.idempotency_key}:{index}"


@contextlib.contextmanager
def naming_prompt(content: RequestContent, index: int) -> Iterator[None]:
    """Let an error of the block name the prompt that it is about, if there are several."""
    try:
        yield
    except PenstockError as error:
        if error.param == "prompt" and len(content.prompts) > 1:
            error.param = _prompt_name(content.names, index)
        raise


def _prompt_name(names: Mapping[str, str], index: int) -> str:
    """Return the name of a prompt among several; `rename` then replaces `prompt` by the caller's name."""
    if (first := names.get(FIRST_PROMPT)) is not None:
        return first if index == 0 else f"prompt[{index - 1}]"
    if (paired := names.get(PAIRED_PROMPT)) is not None:
        return f"prompt[{index // 2}]" if index % 2 else f"{paired}[{index // 2}]"
    return f"prompt[{index}]"


# From the bytes of a body to its checked content.


class RequestBody(Protocol):
    """What the gateway needs of a checked body, in any dialect. Its class is a Wire, the schema."""

    @property
    def model(self) -> str | None:
        """The model's name, if the body has it."""

    @property
    def stream(self) -> bool | None:
        """Whether the answer is streamed."""

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""

    @property
    def asked_class(self) -> ClassName | None:
        """The class that the body asks for."""

    @property
    def template_kwargs(self) -> str | None:
        """Variables for the model's chat template, as JSON text."""

    @property
    def dropped(self) -> Sequence[str]:
        """Names of the parts that have no effect, if the answer must list them."""

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""

    def prompts(self) -> list[Any]:
        """Return the prompts. Each becomes one job."""

    def params(self) -> SamplingParams:
        """Return the sampling options. Raises pydantic's ValidationError."""

    def tool_use(self) -> ToolUse:
        """Return the tools that the assistant may or must call."""

    def queueing(self) -> QueueOptions:
        """Return how to queue the jobs, as far as the body says it."""

    def options(self) -> dict[str, Any]:
        """Return how to answer the request: plain values."""


@runtime_checkable
class HasTask(Protocol):
    """A body whose jobs do something else than generate text."""

    def task(self) -> Task:
        """Return what the jobs do with the prompts."""


class QueuedBody(Wire):
    """A body with a priority class. `with_option_fields` adds those of `QueueFields` that its endpoint has."""

    endpoint: ClassVar[Endpoint]
    progress_needs: ClassVar[tuple[str, ...]] = ()
    """Of these fields one must be true if progress is asked for."""

    priority: ClassName | None = None

    @model_validator(mode="after")
    def _has_a_reader_of_progress(self) -> Self:
        needed = self.progress_needs
        if getattr(self, RETURN_PROGRESS, None) and needed and not any(getattr(self, name) for name in needed):
            message = f"allowed only when {' or '.join(needed)} is true"
            raise PydanticCustomError("unsupported_value", message, {WRONG_MEMBER: RETURN_PROGRESS})
        return self

    @property
    def asked_class(self) -> ClassName | None:
        """The class that the body asks for."""
        return self.priority

    def queueing(self) -> QueueOptions:
        """Return how to queue the jobs, as far as the body says it."""
        return cast(QueueOptions, given_options(self, QueueFields, self.endpoint))

    def held_body(self) -> HeldBody | None:
        """Return the body of another endpoint that this one holds, if it does."""
        return None


@dataclass(frozen=True, slots=True)
class HeldBody:
    """The body of another endpoint inside of a body: its jobs are those of that endpoint, queued as both bodies say."""

    member: str
    """The name of the member that holds it."""
    url: str
    """The path of that endpoint."""
    fields: Mapping[str, Any]
    """The body as plain values. It is not checked yet."""
    beside: Mapping[str, Any]
    """The options that the outer body gives beside it, also those that the inner body may have."""


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A checked request body: its content, and how to queue and answer it."""

    content: RequestContent
    priority: ClassName | None = None
    """The class that the body asks for. The caller's rights decide whether it is allowed."""
    stream: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """How to queue the jobs (`QueueOptions`), and the options of the answer that only this API has. Plain values."""
    ignored: Sequence[str] = ()
    """Names of ignored fields and parts of fields, at most MAX_IGNORED_SHOWN of them."""

    @property
    def in_background(self) -> bool:
        """Whether no caller waits for the answer: a caller that reads a stream from its start does."""
        return bool(self.options.get("background")) and not self.stream


class ParseRules(TypedDict, total=False):
    """How a gateway reads all bodies."""

    ignores_unknown: bool
    """Whether unknown fields of the body itself are dropped instead of refused."""
    held_bodies: Mapping[str, type[RequestBody]]
    """The schemas of the bodies that another body may hold, by the paths of their endpoints."""


def parse(schema: type[RequestBody], raw: bytes, **rules: Unpack[ParseRules]) -> ParsedBody:
    """Parse and check a body by its schema. Raises RequestError that names the invalid field."""
    record = cast("type[Wire]", schema)
    ignored = IgnoredFields(record)
    try:
        body = cast(
            "RequestBody", record.model_validate_json(raw, context=ignored if rules.get("ignores_unknown") else None)
        )
    except ValidationError as error:
        if error.errors(include_url=False, include_input=False)[0]["type"] == "json_invalid":
            raise json_refusal(raw, error.errors()[0]["ctx"]["error"]) from None
        refusal = _with_ranges(request_error(error), schema, raw)
        if refusal.code == UNKNOWN_FIELD and not re.search(r"[.\[]", refusal.param or ""):
            refusal.message += "; a gateway with --unknown-fields ignore accepts it without effect"
        raise refusal from None
    if isinstance(body, QueuedBody) and (held := body.held_body()) is not None:
        return _parsed_with(body, held, ignored.names, rules)
    try:
        params = body.params()
    except ValidationError as error:
        raise request_error(error, body.names()) from None
    prompts = body.prompts()
    task = body.task() if isinstance(body, HasTask) else None
    if task is None:
        _check_choices(params, len(prompts), stream=bool(body.stream))
    content = RequestContent(
        body.model or "", prompts, params, body.names(), body.tool_use(), body.echoes, body.template_kwargs, task
    )
    names = [name[:MAX_NAME_CHARS] for name in (*ignored.names, *body.dropped)[:MAX_IGNORED_SHOWN]]
    return ParsedBody(content, body.asked_class, bool(body.stream), {**body.queueing(), **body.options()}, names)


def _with_ranges(refusal: RequestError, schema: type[RequestBody], raw: bytes) -> RequestError:
    """Add the numbers that are out of range to the refusal of a body, so that one round says both."""
    endpoint, data = getattr(schema, "endpoint", None), from_json(raw)
    if endpoint is None or not isinstance(data, dict):
        return refusal
    there, named = names_at(endpoint, SamplingParams), {refusal.param, *refusal.also}
    numbers = {ours: data[name] for ours, name in there.items() if type(data.get(name)) in (int, float)}
    try:
        SamplingParams(**{ours: value for ours, value in numbers.items() if there[ours] not in named})
    except ValidationError as error:
        found = request_error(error, there)
        return joined([refusal, found]) if found.param in data else refusal
    return refusal


def _check_choices(params: SamplingParams, num_prompts: int, *, stream: bool) -> None:
    """Refuse more choices than one request may have, and a stream of choices that are ranked when all are complete."""
    name = "best_of" if params.num_sequences > params.n else "n"
    if params.use_beam_search:
        name = "use_beam_search"
    if num_prompts * params.num_sequences > MAX_CHOICES_OF_REQUEST:
        limit = f"exceed the limit of {MAX_CHOICES_OF_REQUEST} choices per request"
        raise RequestError(f"{name}: {num_prompts} prompts × {params.num_sequences} choices {limit}", param=name)
    if stream and params.withholds_output:
        message = f"stream: cannot be combined with {name}, whose choices are ranked when all of them are complete"
        raise RequestError(message, code="unsupported_value", param="stream")


def _parsed_with(body: RequestBody, held: HeldBody, ignored: Sequence[str], rules: ParseRules) -> ParsedBody:
    """Parse the body that another one holds. What both bodies say must be the same."""
    schema = rules.get("held_bodies", {}).get(held.url)
    if schema is None:
        raise RequestError(f"url: this gateway does not have {held.url}", code="unsupported_value", param="url")
    raw = to_json(held.fields, inf_nan_mode="constants")
    try:
        inner = parse(schema, raw, **rules)
        if len(inner.content.prompts) != 1:
            form = inner.content.names.get("prompt", "prompt")
            message = f"{form}: a job has exactly one prompt, not {len(inner.content.prompts)}; send a list of jobs"
            raise RequestError(message, param=form)
    except RequestError as error:
        put_under(error, held.member)
        raise
    content = inner.content
    said = {**inner.options, "priority": inner.priority, "model": content.model or None}
    for name, value in held.beside.items():
        if said.get(name) not in (None, value):
            message = f"{name}: conflicts with {held.member}.{name}; send one of them"
            raise RequestError(message, code="unsupported_value", param=name)
    known = cast("type[Wire]", schema).model_fields
    in_body = {name: name for name in held.fields if name in known and name not in held.beside}
    names = {ours: f"{held.member}.{there}" for ours, there in {**in_body, **content.names}.items()}
    return replace(
        inner,
        content=replace(content, model=content.model or body.model or "", names=names),
        priority=inner.priority or body.asked_class,
        options={**inner.options, **body.queueing(), **body.options()},
        ignored=[*ignored, *(f"{held.member}.{name}" for name in inner.ignored)][:MAX_IGNORED_SHOWN],
    )


def with_packed_prompts(body: ParsedBody) -> ParsedBody:
    """Return the body with its prompts checked and packed for the queue. Raises RequestError for an invalid prompt."""
    prompts: list[Prompt] = []
    try:
        for number, prompt in enumerate(body.content.prompts):
            with naming_prompt(body.content, number):
                prompts.append(pack_prompt_of(prompt))
    except RequestError as error:
        rename(error, body.content.names)
        raise
    return replace(body, content=replace(body.content, prompts=prompts))


def queueing_in(options: Mapping[str, Any]) -> QueueOptions:
    """Return the options of a body that say how its jobs are queued."""
    return cast(QueueOptions, {name: options[name] for name in QueueOptions.__annotations__ if name in options})
