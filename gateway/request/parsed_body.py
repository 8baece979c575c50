"""The content of a checked request body as pure data, and its encoding for the parser process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from penstock.contract.errors import InvariantError, PenstockError, RequestError, TooLargeError
from penstock.contract.job import SamplingParams
from penstock.contract.named import UNKNOWN_FIELD, IgnoredFields
from penstock.contract.packed_prompt import PackedPrompt
from penstock.contract.priority import ClassName
from penstock.contract.problems import MAX_NAME_CHARS, rename, request_error
from penstock.contract.tasks import Task
from penstock.gateway.anthropic.schemas import CountTokensRequest, MessagesRequest
from penstock.gateway.embeddings.schemas import EmbeddingRequest, RerankRequest, ScoreRequest
from penstock.gateway.jobs.schemas import JobRequest
from penstock.gateway.openai.schemas import ChatRequest, CompletionRequest
from penstock.gateway.responses.body import CompactBody, ResponseBody
from penstock.gateway.stream.generation_request import RequestContent, naming_prompt
from penstock.gateway.tokens.schemas import DetokenizeRequest, TaskBody, TokenizeRequest
from penstock.producer.client.request import Prompt, pack_prompt_of
from penstock.producer.openai.messages import ToolUse
from penstock.queue.msgpack_codec import pack, unpack_all

RequestBody = (
    ChatRequest
    | CompletionRequest
    | JobRequest
    | MessagesRequest
    | CountTokensRequest
    | ResponseBody
    | CompactBody
    | TokenizeRequest
    | DetokenizeRequest
    | EmbeddingRequest
    | RerankRequest
    | ScoreRequest
)
BODIES: dict[str, type[RequestBody]] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
    "job": JobRequest,
    "messages": MessagesRequest,
    "count_tokens": CountTokensRequest,
    "response": ResponseBody,
    "compact": CompactBody,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
    "embedding": EmbeddingRequest,
    "rerank": RerankRequest,
    "score": ScoreRequest,
}
"""The schema of each form of body."""
MAX_CHOICES_OF_REQUEST = 256
"""Most choices of one HTTP request for text, over all its prompts."""
MAX_IGNORED_SHOWN = 32
"""Most ignored fields of a body that its answer lists."""


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


def parse(form: str, raw: bytes, *, ignores_unknown: bool = False) -> ParsedBody:
    """Parse and check a body of the given form. Raises RequestError that names the invalid field.

    With `ignores_unknown`, unknown fields of the body itself are dropped instead of refused.
    """
    ignored = IgnoredFields(BODIES[form])
    try:
        body = BODIES[form].model_validate_json(raw, context=ignored if ignores_unknown else None)
    except ValidationError as error:
        raise _with_remedy(request_error(error)) from None
    try:
        params = body.params()
    except ValidationError as error:
        raise request_error(error, body.names()) from None
    prompts = body.prompts()
    task = body.task() if isinstance(body, TaskBody) else None
    if task is None and len(prompts) * params.n > MAX_CHOICES_OF_REQUEST:
        message = (
            f"n: {len(prompts)} prompts × {params.n} choices exceed the limit of {MAX_CHOICES_OF_REQUEST} "
            "choices per request"
        )
        raise RequestError(message, param="n")
    content = RequestContent(
        body.model or "", prompts, params, body.names(), body.tool_use(), body.echoes, body.template_kwargs, task
    )
    names = [name[:MAX_NAME_CHARS] for name in (*ignored.names, *body.dropped)[:MAX_IGNORED_SHOWN]]
    return ParsedBody(content, body.asked_class, bool(body.stream), {**body.queueing(), **body.options()}, names)


def _with_remedy(error: RequestError) -> RequestError:
    """Add to the refusal of a body's unknown field how a gateway accepts it."""
    if error.code == UNKNOWN_FIELD and not re.search(r"[.\[]", error.param or ""):
        error.message += "; a gateway with --unknown-fields ignore accepts it without effect"
    return error


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


# Between processes ------------------------------------------------------------------------------

_TASKS: TypeAdapter[Task | None] = TypeAdapter(Task | None)
_REFUSALS: dict[str, type[PenstockError]] = {
    kind.__name__: kind for kind in (RequestError, TooLargeError, InvariantError)
}


def encode_parsed_body(body: ParsedBody) -> bytes:
    """Encode a body with packed prompts as bytes."""
    content, use = body.content, body.content.tool_use
    params = content.params.model_dump(exclude_unset=True)
    if "logit_bias" in params:
        params["logit_bias"] = {str(token): added for token, added in params["logit_bias"].items()}
    small = {
        "model": content.model,
        "priority": body.priority,
        "names": dict(content.names),
        "tool_use": [use.tools, use.choice, use.parallel],
        "flags": [content.echoes, body.stream],
        "options": dict(body.options),
        "ignored": list(body.ignored),
        "template_kwargs": content.template_kwargs,
        "task": None if content.task is None else content.task.model_dump(),
    }
    return pack({**small, "params": params, "prompts": [_fields_of(prompt) for prompt in content.prompts]})


def encode_refusal(error: PenstockError) -> bytes:
    """Encode an error as bytes that `decode_parsed_body` raises."""
    return pack({"refusal": [type(error).__name__, error.message, error.code, error.param]})


def decode_parsed_body(data: bytes) -> ParsedBody:
    """Decode a body, or raise the error that the bytes hold instead."""
    (fields,) = unpack_all(data)
    if "refusal" in fields:
        kind, message, code, param = fields["refusal"]
        raise _REFUSALS.get(kind, RequestError)(message, code=code, param=param)
    echoes, stream = fields["flags"]
    tools, choice, parallel = fields["tool_use"]
    content = RequestContent(
        fields["model"],
        [PackedPrompt(*prompt) for prompt in fields["prompts"]],
        SamplingParams(**fields["params"]),
        fields["names"],
        ToolUse(tools, choice, parallel),
        echoes,
        fields["template_kwargs"],
        _TASKS.validate_python(fields["task"]),
    )
    return ParsedBody(content, fields["priority"], stream, fields["options"], fields["ignored"])


def _fields_of(prompt: Any) -> list[Any]:
    return [prompt.form, prompt.data, prompt.num_text_bytes, prompt.num_tokens, prompt.num_tool_bytes]
