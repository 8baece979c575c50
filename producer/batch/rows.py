"""Rows of batch files beside chats and completions: embeddings, and responses that are not stored."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Discriminator, FailFast, Field, PlainValidator, Tag

from penstock.contract.fields import (
    BATCH_ROWS,
    NO_EFFECT,
    RESPONSES,
    WHOLE_NUMBER,
    Hint,
    OpenWire,
    Whole,
    Wire,
    given_options,
    only,
    with_option_fields,
)
from penstock.contract.job import MAX_MESSAGES, MAX_TOKENS_LIMIT, NO_SAMPLING, QueueFields, QueueOptions, SamplingParams
from penstock.contract.output import Result, Usage
from penstock.contract.tasks import MAX_DIMENSIONS, Embed, Embedding, Pooling, TruncatedTokens
from penstock.contract.tools import MAX_TOOLS, NO_TOOLS, Arguments, CallId, FunctionName, ToolUse
from penstock.producer.anthropic.bodies import MessageBody
from penstock.producer.openai.bodies import prompts_of
from penstock.producer.openai.messages import GivenToolChoice
from penstock.producer.openai.render import call_id_of
from penstock.producer.parsing.parsed_text import AnswerFormat, ParsedText

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MAX_INPUTS = 2048
"""Most texts of one row of embeddings, as over HTTP. Each text is a job."""


if TYPE_CHECKING:
    _Queued = Wire
else:
    _Queued = with_option_fields(Wire, BATCH_ROWS, QueueFields)


class QueuedRow(_Queued):
    """Fields of a row beside those of its endpoint. A row cannot stream and cannot choose its priority class.

    Durations count from the submission of the row.
    """

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: Annotated[Any, only(None, False)] = None
    service_tier: Annotated[Any, only(None, "auto", "default", "flex")] = None
    # The jobs of rows are background work, which waits for as long as it takes and has no reader.
    max_wait_s: Annotated[Any, only(None)] = None
    return_progress: Annotated[Any, only(None, False)] = None

    @property
    def asked_class(self) -> None:
        """The class that the body asks for: none, because rows are work of the class batch."""
        return None

    def queueing(self) -> QueueOptions:
        """Return how to queue the row's jobs. Raises pydantic's ValidationError."""
        given = given_options(self, QueueFields, BATCH_ROWS)
        QueueFields.model_validate(given)
        return cast(QueueOptions, given)


class MessageRow(MessageBody, QueuedRow):
    """A body of `/v1/messages` whose message is not streamed."""

    stream: Annotated[Any, only(None, False)] = None


def _inputs_of(value: object) -> list[str | list[int]]:
    return prompts_of(value, MAX_INPUTS)


class EmbeddingRow(QueuedRow):
    """A body of `/v1/embeddings`."""

    input: Annotated[list[str | list[int]], PlainValidator(_inputs_of)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Whole, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    pooling: Pooling | None = None
    truncate_prompt_tokens: Annotated[TruncatedTokens, WHOLE_NUMBER] | None = None
    normalize: Annotated[Any, only(None, True)] = None
    channel: Annotated[Any, only(None, False)] = None
    user: Hint = None

    echoes: ClassVar[bool] = False
    template_kwargs: ClassVar[None] = None

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return {"prompt": "input"}

    def prompts(self) -> list[str | list[int]]:
        """Return the texts. Each becomes one job."""
        return self.input

    def params(self) -> SamplingParams:
        """Return the default sampling options, because an embedding samples nothing."""
        return NO_SAMPLING

    def tool_use(self) -> ToolUse:
        """Return that there are no tools."""
        return NO_TOOLS

    def task(self) -> Embed:
        """Return the task of each text."""
        return Embed(
            pooling=self.pooling, dimensions=self.dimensions, truncate_prompt_tokens=self.truncate_prompt_tokens
        )

    def options(self) -> dict[str, Any]:
        """Return the encoding of the answer."""
        return {"base64": self.encoding_format == "base64"}


def embeddings_body(
    model: str, outputs: Sequence[Embedding], usages: Sequence[Usage | None], *, as_base64: bool
) -> dict[str, Any]:
    """Return OpenAI's answer of `/v1/embeddings`."""
    num_tokens = sum(usage.prompt_tokens for usage in usages if usage is not None)
    return {
        "object": "list",
        "model": model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _shown(output.values, as_base64=as_base64)}
            for index, output in enumerate(outputs)
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _shown(values: Sequence[float], *, as_base64: bool) -> str | list[float]:
    if not as_base64:
        return [float(f"{value:.9g}") for value in values]  # Nine digits identify a float32.
    numbers = array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


class _TextPart(OpenWire):
    type: Literal["input_text", "output_text", "text"]
    text: str


class _InputMessage(OpenWire):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_TextPart]

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of a chat."""
        return [{"role": self.role, "content": _joined(self.content)}]


class _InputCall(OpenWire):
    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: Arguments

    def messages(self) -> list[dict[str, Any]]:
        called = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": called}
        return [{"role": "assistant", "tool_calls": [call]}]


class _InputResult(OpenWire):
    type: Literal["function_call_output"]
    call_id: CallId
    output: str | list[_TextPart]

    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)}]


class _InputReasoning(OpenWire):
    """An earlier reasoning. It is not passed to the model."""

    type: Literal["reasoning"]

    def messages(self) -> list[dict[str, Any]]:
        return []


def _joined(content: str | list[_TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _kind_of(item: object) -> object:
    return item.get("type", "message") if isinstance(item, dict) else None


_InputItem = Annotated[
    Annotated[_InputMessage, Tag("message")]
    | Annotated[_InputCall, Tag("function_call")]
    | Annotated[_InputResult, Tag("function_call_output")]
    | Annotated[_InputReasoning, Tag("reasoning")],
    Discriminator(
        _kind_of,
        custom_error_type="unsupported_value",
        custom_error_message="a row may have items of type message, function_call, function_call_output and reasoning",
    ),
]


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _chat_of(items: Sequence[_InputMessage | _InputCall | _InputResult | _InputReasoning]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Texts and calls of the assistant that follow one another become one message."""
    found: list[dict[str, Any]] = []
    for message in (message for item in items for message in item.messages()):
        if message["role"] == "assistant" and found and found[-1]["role"] == "assistant":
            before = found[-1]
            calls = [*before.get("tool_calls", ()), *message.get("tool_calls", ())]
            texts = [one["content"] for one in (before, message) if one.get("content")]
            found[-1] = {"role": "assistant", "content": "\n".join(texts)} | ({"tool_calls": calls} if calls else {})
        else:
            found.append(message)
    return found


class _FunctionTool(OpenWire):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def offer(self) -> dict[str, Any]:
        """Return the tool as a chat offers it."""
        given = {name: value for name, value in self if name != "type" and value is not None}
        return {"type": "function", "function": given}


class _Format(Wire):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class _TextOptions(Wire):
    format: _Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class _Reasoning(OpenWire):
    effort: Annotated[str, Field(max_length=64)] | None = None

    @property
    def known_effort(self) -> str | None:
        """The effort. An unknown one is one that only newer models have, and stands for the highest known."""
        return self.effort if self.effort is None or self.effort in _EFFORTS else _EFFORTS[-1]


if TYPE_CHECKING:
    _SampledRow = QueuedRow
else:
    _SampledRow = with_option_fields(QueuedRow, RESPONSES, SamplingParams, lenient=True)


class ResponseRow(_SampledRow):
    """A body of `/v1/responses` whose response is not stored, so it neither continues one nor is continued.

    Its tools are functions.
    """

    input: Annotated[
        list[_InputItem], Field(min_length=1, max_length=MAX_MESSAGES), FailFast(), BeforeValidator(_as_items)
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1, le=MAX_TOKENS_LIMIT)] | None = None
    text: _TextOptions | None = None
    reasoning: _Reasoning | None = None
    tools: Annotated[list[_FunctionTool] | None, FailFast(), Field(max_length=MAX_TOOLS)] = None
    tool_choice: GivenToolChoice = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[Any, only(None, 0)] = None
    store: Annotated[Any, only(None, False)] = None
    background: Annotated[Any, only(None, False)] = None
    previous_response_id: Annotated[Any, only(None)] = None
    conversation: Annotated[Any, only(None)] = None
    prompt: Annotated[Any, only(None)] = None
    context_management: Annotated[Any, only(None)] = None
    stream_options: Annotated[Any, only(None)] = None
    truncation: Annotated[Any, only(None, "disabled")] = None
    include: Annotated[Any, only(None, [], ["reasoning.encrypted_content"])] = None
    user: Hint = None
    safety_identifier: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    client_metadata: Annotated[dict[str, Any] | None, NO_EFFECT] = None
    max_tool_calls: Annotated[int | None, Field(ge=1), NO_EFFECT] = None

    def chat_body(self) -> dict[str, Any]:
        """Return the body of a chat with the same answer."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        wanted = {
            **given_options(self, SamplingParams, RESPONSES),
            "logprobs": None,
            "model": self.model,
            "response_format": self._format(),
            "reasoning_effort": self.reasoning and self.reasoning.known_effort,
            "tools": [tool.offer() for tool in self.tools or ()],
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            **given_options(self, QueueFields, BATCH_ROWS),
        }
        return {"messages": system + _chat_of(self.input)} | {
            name: value for name, value in wanted.items() if value is not None
        }

    def _format(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None or wanted.type != "json_schema":
            return None if wanted is None else {"type": wanted.type}
        schema = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": "json_schema", "json_schema": schema}

    def echo(self) -> dict[str, Any]:
        """Return the members of the response that repeat the request."""
        wanted = self.text.format if self.text is not None and self.text.format is not None else _Format()
        return {
            "instructions": self.instructions,
            "previous_response_id": None,
            "background": False,
            "store": False,
            "max_output_tokens": self.max_output_tokens,
            "text": {
                "format": wanted.model_dump(by_alias=True, exclude_none=True),
                "verbosity": (self.text and self.text.verbosity) or "medium",
            },
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": self.reasoning and self.reasoning.known_effort, "summary": None},
            "truncation": "disabled",
            "service_tier": "flex",
            "metadata": given_options(self, QueueFields, BATCH_ROWS).get("metadata") or {},
            "user": self.user,
        }


NAMES_OF_RESPONSES = {
    **dict.fromkeys(("messages", "prompt"), "input"),
    **dict.fromkeys(("response_format", "structured_outputs"), "text.format"),
    "max_tokens": "max_output_tokens",
}
"""Names of a chat's fields → the fields of a response that they stand for."""


def response_body(
    model: str, echo: Mapping[str, Any], sampling: Mapping[str, Any], result: Result, answer_format: AnswerFormat
) -> dict[str, Any]:
    """Return OpenAI's response object for a result with one choice. `answer_format`: how to parse its text."""
    (choice,) = result.choices
    is_cut = choice.finish_reason == "length"
    parsed = answer_format.read(choice.text, is_cut=is_cut)
    status = "incomplete" if is_cut else "completed"
    return {
        "id": f"resp_{result.job_id}",
        "object": "response",
        "created_at": result.submitted_ms // 1000,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": model,
        **echo,
        **sampling,
        "output": [*_output_of(parsed, result.job_id, status)],
        "usage": None if result.usage is None else _usage_of(result.usage),
    }


def _output_of(parsed: ParsedText, job_id: str, status: str) -> Iterator[dict[str, Any]]:
    """Yield the items of an output: reasoning, text, and calls."""
    index = 0
    if parsed.reasoning:
        content = [{"type": "reasoning_text", "text": parsed.reasoning}]
        yield {"id": f"rs_0_{job_id}", "type": "reasoning", "status": status, "summary": [], "content": content}
        index += 1
    if parsed.content or not parsed:
        text = {"type": "output_text", "text": parsed.content, "annotations": [], "logprobs": []}
        message = {"id": f"msg_{index}_{job_id}", "type": "message", "status": status, "role": "assistant"}
        yield {**message, "content": [text]}
        index += 1
    for at, call in enumerate(parsed.calls, index):
        whole = "completed" if call.end == "whole" else "incomplete"
        called = {"call_id": call_id_of(job_id, 0, call.index), "name": call.name, "arguments": call.arguments}
        yield {"id": f"fc_{at}_{job_id}", "type": "function_call", "status": whole, **called}


def _usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
