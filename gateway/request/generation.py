"""A request for generation, from its checked body to what is submitted for it, as pure data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypedDict, Unpack, cast

from pydantic import ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json, to_json

from penstock.contract.durability import TOKEN_DURABILITY, Durability
from penstock.contract.errors import RequestError
from penstock.contract.fields import UNKNOWN_FIELD, WRONG_MEMBER, Endpoint, IgnoredFields, Wire, given_options, names_at
from penstock.contract.job import RETURN_PROGRESS, JobKey, QueueFields, QueueOptions, SamplingParams, SubmitOptions
from penstock.contract.json_text import json_refusal
from penstock.contract.priority import ClassName
from penstock.contract.problems import joined, put_under, rename, request_error
from penstock.producer.client.request import Prompt, pack_prompt_of
from penstock.producer.parsed_body import MAX_IGNORED_SHOWN, ParsedBody, RequestBody, parsed_body
from penstock.producer.text_bodies import naming_prompt

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
class GenerationRequest:
    """A body with its caller: one job for each prompt, all with the same options."""

    body: ParsedBody
    options: SubmitOptions = field(default_factory=SubmitOptions)
    """What the caller's key, the headers and the route say. It precedes what the body says of the same option."""
    cut_at: StreamPosition | None = None
    """The position after which to resume an earlier stream. If set, no job is submitted."""
    event_ids: bool = False
    """Whether the events of a stream have ids, or numbers of a stored response. Only such a stream can be resumed."""
    replay_from_start: bool = False
    """Whether a resumed stream is read from its start, because its later chunks depend on earlier ones."""

    @property
    def tenant(self) -> str:
        """The tenant for which the jobs run."""
        return self.options.get("tenant") or "default"

    @property
    def hides_models(self) -> bool:
        """Whether the caller may use only some models. Then an error must not list what else is served."""
        return self.options.get("hides_models", False)

    @property
    def lowers_max_tokens(self) -> bool:
        """Whether `max_tokens` is lowered to what the model's context leaves after the prompt, instead of refused."""
        return self.options.get("lower_max_tokens", False)

    @property
    def read_after(self) -> int:
        """The index of the chunk after which to read a log; the chunk at `cut_at` is read again for comparison."""
        return -1 if self.cut_at is None or self.replay_from_start else self.cut_at.index - 1

    @property
    def requires_reader(self) -> bool:
        """Whether the jobs are canceled when they lose all their readers."""
        return self.options.get("needs_reader", not self.options.get("background"))

    @property
    def token_durability(self) -> Durability | None:
        """What the tokens of the answer wait for; None: the client's setting."""
        return self.body.queueing.get("token_durability") or self.options.get("token_durability")

    @property
    def shows_waiting(self) -> bool:
        """Whether a stream reports queue position and prompt progress of its jobs before their first chunks."""
        return bool(self.body.queueing.get(RETURN_PROGRESS))

    @property
    def key(self) -> JobKey | None:
        """The idempotency key of a request with one prompt."""
        key = self.options.get("idempotency_key")
        return None if key is None else JobKey(self.tenant, key)

    def with_options(self, **options: Unpack[SubmitOptions]) -> GenerationRequest:
        """Return the request with these options of its jobs."""
        return replace(self, options={**self.options, **options})

    def options_of(self, index: int) -> SubmitOptions:
        """Return the options with which to submit the prompt at `index`."""
        options: SubmitOptions = {"background": False, **self.body.submit_options(), **self.options}
        if (key := options.get("idempotency_key")) is not None and len(self.body.prompts) > 1:
            options["idempotency_key"] = f"{key}:{index}"
        return options


# From the bytes of a body to its checked content.


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
    return parsed_body(body, ignored.names)


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


def _parsed_with(body: RequestBody, held: HeldBody, ignored: Sequence[str], rules: ParseRules) -> ParsedBody:
    """Parse the body that another one holds. What both bodies say must be the same."""
    schema = rules.get("held_bodies", {}).get(held.url)
    if schema is None:
        raise RequestError(f"url: this gateway does not have {held.url}", code="unsupported_value", param="url")
    raw = to_json(held.fields, inf_nan_mode="constants")
    try:
        inner = parse(schema, raw, **rules)
        if len(inner.prompts) != 1:
            form = inner.names.get("prompt", "prompt")
            message = f"{form}: a job has exactly one prompt, not {len(inner.prompts)}; send a list of jobs"
            raise RequestError(message, param=form)
        if inner.queueing.get(TOKEN_DURABILITY):
            message = f"{TOKEN_DURABILITY}: submitting a job shows no tokens; name it where the job is read"
            raise RequestError(message, param=TOKEN_DURABILITY)
    except RequestError as error:
        put_under(error, held.member)
        raise
    said = {**inner.queueing, "priority": inner.priority, "model": inner.model or None}
    for name, value in held.beside.items():
        if said.get(name) not in (None, value):
            message = f"{name}: conflicts with {held.member}.{name}; send one of them"
            raise RequestError(message, code="unsupported_value", param=name)
    known = cast("type[Wire]", schema).model_fields
    in_body = {name: name for name in held.fields if name in known and name not in held.beside}
    names = {ours: f"{held.member}.{there}" for ours, there in {**in_body, **inner.names}.items()}
    return replace(
        inner,
        model=inner.model or body.model or "",
        names=names,
        priority=inner.priority or body.asked_class,
        queueing={**inner.queueing, **body.queueing()},
        options={**inner.options, **body.options()},
        ignored=[*ignored, *(f"{held.member}.{name}" for name in inner.ignored)][:MAX_IGNORED_SHOWN],
    )


def with_packed_prompts(body: ParsedBody) -> ParsedBody:
    """Return the body with its prompts checked and packed for the queue. Raises RequestError for an invalid prompt."""
    prompts: list[Prompt] = []
    try:
        for number, prompt in enumerate(body.prompts):
            with naming_prompt(body, number):
                prompts.append(pack_prompt_of(prompt))
    except RequestError as error:
        rename(error, body.names)
        raise
    return replace(body, prompts=prompts)
