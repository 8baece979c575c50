"""The content of a checked request body as pure data, and its encoding for the parser process."""

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
"""The schema of each form of body."""
MAX_CHOICES_OF_REQUEST = 256
"""Most choices of one HTTP request, over all its prompts."""


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """The content of one request body, without the caller and the headers."""

    model: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: ClassName | None = None
    """The class that the body asks for. The caller's rights decide whether it is allowed."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Maps penstock's field names to the names in the body where they differ. Errors use the latter."""
    tool_use: ToolUse = NO_TOOLS
    echoes: bool = False
    stream: bool = False
    include_usage: bool = False


def parse(form: str, raw: bytes) -> ParsedBody:
    """Parse and check a body of the given form. Raises RequestError that names the invalid field."""
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
        message = (
            f"n: {len(prompts)} prompts × {params.n} choices exceed the limit of {MAX_CHOICES_OF_REQUEST} "
            "choices per request"
        )
        raise RequestError(message, param="n")
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


def with_packed_prompts(body: ParsedBody) -> ParsedBody:
    """Return the body with its prompts checked and packed for the queue. Raises RequestError for an invalid prompt."""
    try:
        return replace(body, prompts=[pack_prompt_of(prompt) for prompt in body.prompts])
    except RequestError as error:
        rename(error, body.names)
        raise


# Between processes ------------------------------------------------------------------------------

_REFUSALS: dict[str, type[PenstockError]] = {kind.__name__: kind for kind in (RequestError, TooLargeError)}


def encode_parsed_body(body: ParsedBody) -> bytes:
    """Encode a body with packed prompts as bytes."""
    params = body.params.model_dump(exclude_defaults=True)
    if "logit_bias" in params:
        params["logit_bias"] = {str(token): added for token, added in params["logit_bias"].items()}
    use, prompts = body.tool_use, [_fields_of(prompt) for prompt in body.prompts]
    small = {
        "model": body.model,
        "priority": body.priority,
        "names": dict(body.names),
        "tool_use": [use.tools, use.choice, use.parallel],
        "flags": [body.echoes, body.stream, body.include_usage],
    }
    return pack({**small, "params": params, "prompts": prompts})


def encode_refusal(error: PenstockError) -> bytes:
    """Encode an error as bytes that `decode_parsed_body` raises."""
    return pack({"refusal": [type(error).__name__, error.message, error.code, error.param]})


def decode_parsed_body(data: bytes) -> ParsedBody:
    """Decode a body, or raise the error that the bytes hold instead."""
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
