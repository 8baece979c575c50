"""What a checked body asks for, as pure data, and the same as bytes for the process that parses large bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from penstock.contract.errors import PenstockError, RequestError, TooLargeError
from penstock.contract.job import SamplingParams
from penstock.contract.packed_prompt import PackedPrompt
from penstock.contract.priority import ClassName
from penstock.contract.problems import rename, request_error
from penstock.gateway.openai.schemas import ChatRequest, CompletionRequest
from penstock.producer.client.request import Prompt, pack_prompt_of
from penstock.producer.openai.messages import NO_TOOLS, ToolUse
from penstock.queue.msgpack_codec import pack, unpack_all

BODIES: dict[str, type[ChatRequest | CompletionRequest]] = {"chat": ChatRequest, "completion": CompletionRequest}
"""The forms of a body by name."""
MAX_CHOICES_OF_REQUEST = 256
"""Choices of one HTTP request, over all of its prompts."""


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """What a body says, apart from the caller and the headers."""

    model: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: ClassName | None = None
    """As the body names it; the caller's rights decide."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the body calls our fields, where that differs."""
    tool_use: ToolUse = NO_TOOLS
    echoes: bool = False
    stream: bool = False
    include_usage: bool = False


def parse(form: str, raw: bytes) -> ParsedBody:
    """Check a body of a form; raises RequestError that names the field at fault."""
    try:
        body = BODIES[form].model_validate_json(raw)
    except ValidationError as error:
        raise request_error(error) from None
    try:
        params = body.params()
    except ValidationError as error:
        raise request_error(error, body.names()) from None
    prompts = body.prompts()
    if len(prompts) * params.n > MAX_CHOICES_OF_REQUEST:
        said = f"n: {len(prompts)} prompts × {params.n} choices are more than the {MAX_CHOICES_OF_REQUEST} of a request"
        raise RequestError(said, param="n")
    return ParsedBody(
        body.model,
        prompts,
        params,
        body.priority,
        body.names(),
        body.tool_use(),
        echoes=body.echoes,
        stream=bool(body.stream),
        include_usage=body.include_usage,
    )


def with_packed_prompts(asked: ParsedBody) -> ParsedBody:
    """The same with prompts that are checked as those of a job, and packed; raises RequestError."""
    try:
        return replace(asked, prompts=[pack_prompt_of(prompt) for prompt in asked.prompts])
    except RequestError as error:
        rename(error, asked.names)
        raise


# Between processes ------------------------------------------------------------------------------

_REFUSALS: dict[str, type[PenstockError]] = {kind.__name__: kind for kind in (RequestError, TooLargeError)}


def encode_asked(asked: ParsedBody) -> bytes:
    """The bytes of a body whose prompts are packed."""
    params = asked.params.model_dump(exclude_defaults=True)
    if "logit_bias" in params:
        params["logit_bias"] = {str(token): added for token, added in params["logit_bias"].items()}
    use, prompts = asked.tool_use, [_fields_of(prompt) for prompt in asked.prompts]
    small = {
        "model": asked.model,
        "priority": asked.priority,
        "names": dict(asked.names),
        "tool_use": [use.tools, use.choice, use.parallel],
        "flags": [asked.echoes, asked.stream, asked.include_usage],
    }
    return pack({**small, "params": params, "prompts": prompts})


def encode_refusal(error: PenstockError) -> bytes:
    """The bytes of an error in place of a body."""
    return pack({"refusal": [type(error).__name__, error.message, error.code, error.param]})


def decode_asked(data: bytes) -> ParsedBody:
    """The body of those bytes; raises the error that they carry in its place."""
    (fields,) = unpack_all(data)
    if "refusal" in fields:
        kind, message, code, param = fields["refusal"]
        raise _REFUSALS.get(kind, RequestError)(message, code=code, param=param)
    echoes, stream, include_usage = fields["flags"]
    tools, choice, parallel = fields["tool_use"]
    return ParsedBody(
        fields["model"],
        [PackedPrompt(*prompt) for prompt in fields["prompts"]],
        SamplingParams(**fields["params"]),
        fields["priority"],
        fields["names"],
        ToolUse(tools, choice, parallel),
        echoes=echoes,
        stream=stream,
        include_usage=include_usage,
    )


def _fields_of(prompt: Any) -> list[Any]:
    return [prompt.form, prompt.data, prompt.num_text_bytes, prompt.num_tokens, prompt.num_tool_bytes]
