"""What a body says, checked: that of an HTTP request, of a batch's row or of a task. It knows no caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import ValidationError

from penstock.contract.chat_shapes import ChatShape, shapes_of
from penstock.contract.errors import RequestError
from penstock.contract.job import NO_SAMPLING, QueueOptions, SamplingParams, SubmitOptions
from penstock.contract.priority import ClassName
from penstock.contract.problems import MAX_NAME_CHARS, request_error
from penstock.contract.tasks import Task
from penstock.contract.tools import NO_TOOLS, ToolUse
from penstock.producer.client.request import Prompt

MAX_CHOICES_OF_REQUEST = 256
"""Most choices of one request for text, over all its prompts."""
MAX_IGNORED_SHOWN = 32
"""Most ignored fields of a body that its answer lists."""


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A checked body: the jobs that it asks for, and how to queue and answer them. Another process may parse it."""

    model: str = ""
    """The model's name. Empty if the body names none, which is allowed while only one model is served."""
    prompts: Sequence[Prompt] = ()
    """Each prompt becomes one job."""
    params: SamplingParams = NO_SAMPLING
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
    other_tasks: Sequence[Task] = ()
    """What they do for a model that cannot run `task`, the best one first."""
    priority: ClassName | None = None
    """The class that the body asks for. The caller's rights decide whether it is allowed."""
    stream: bool = False
    queueing: QueueOptions = field(default_factory=QueueOptions)
    """How to queue the jobs, as far as the body says it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the answer that only this API has. Plain values."""
    shapes: Sequence[ChatShape] = ()
    """The shapes of its chats that some chat templates refuse."""
    ignored: Sequence[str] = ()
    """Names of ignored fields and parts of fields, at most MAX_IGNORED_SHOWN of them."""

    @property
    def needs_token_details(self) -> bool:
        """Whether the answer needs more than text of the tokens: an echo of the prompt, or log-probabilities."""
        return self.echoes or self.params.needs_token_details

    @property
    def in_background(self) -> bool:
        """Whether no caller waits for the answer: a caller that reads a stream from its start does."""
        return bool(self.queueing.get("background")) and not self.stream

    def submit_options(self) -> SubmitOptions:
        """Return what the body says of each of its jobs, as arguments of `AsyncClient.submit`."""
        options: SubmitOptions = {
            "model": self.model or None,
            "task": self.task,
            "params": self.params,
            "tools": self.tool_use.tools,
            "tool_choice": self.tool_use.choice,
            "parallel_tool_calls": self.tool_use.parallel,
            "chat_template_kwargs": self.template_kwargs,
        }
        return {**options, **self.queueing}


class RequestBody(Protocol):
    """What a ParsedBody is made from: a validated body of any API. Its class is a Wire, the schema."""

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


def parsed_body(body: RequestBody, ignored: Sequence[str] = ()) -> ParsedBody:
    """Return what a validated body says. `ignored`: the unknown fields that were dropped.

    Raises RequestError for options that are out of range.
    """
    try:
        params, queueing = body.params(), body.queueing()
    except ValidationError as error:
        raise request_error(error, body.names()) from None
    # A body whose jobs do something else than generate text says what.
    task: Callable[[], Task] | None = getattr(body, "task", None)
    others: Callable[[], Sequence[Task]] | None = getattr(body, "other_tasks", None)
    prompts = body.prompts()
    parsed = ParsedBody(
        body.model or "",
        prompts,
        params,
        body.names(),
        body.tool_use(),
        body.echoes,
        body.template_kwargs,
        None if task is None else task(),
        () if others is None else others(),
        body.asked_class,
        bool(body.stream),
        queueing,
        body.options(),
        sorted(frozenset().union(*map(_shapes_of, prompts))),
        [name[:MAX_NAME_CHARS] for name in (*ignored, *body.dropped)[:MAX_IGNORED_SHOWN]],
    )
    if parsed.task is None:
        _check_choices(parsed)
    return parsed


def _shapes_of(prompt: Any) -> frozenset[ChatShape]:
    """Return the shapes of a chat; none for another prompt."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return frozenset()
    return shapes_of([one["role"] if isinstance(one, dict) else one.role for one in prompt])


def _check_choices(body: ParsedBody) -> None:
    """Refuse more choices than one request may have, and a stream of choices that are ranked when all are complete."""
    params, num_prompts = body.params, len(body.prompts)
    name = "best_of" if params.num_sequences > params.n else "n"
    if params.use_beam_search:
        name = "use_beam_search"
    if num_prompts * params.num_sequences > MAX_CHOICES_OF_REQUEST:
        limit = f"exceed the limit of {MAX_CHOICES_OF_REQUEST} choices per request"
        raise RequestError(f"{name}: {num_prompts} prompts × {params.num_sequences} choices {limit}", param=name)
    if body.stream and params.withholds_output:
        message = f"stream: cannot be combined with {name}, whose choices are ranked when all of them are complete"
        raise RequestError(message, code="unsupported_value", param="stream")
