"""What the parser process reads and returns: checked bodies as bytes, lists of bodies, and messages of WebSockets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Unpack, cast

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError, from_json, to_json

from penstock.contract.durability import Durability
from penstock.contract.errors import InvariantError, PenstockError, RequestError, TooLargeError
from penstock.contract.fields import UNKNOWN_FIELD, Wire
from penstock.contract.job import MAX_CUSTOM_ID_CHARS, PackedPrompt, SamplingParams, is_job_id
from penstock.contract.json_text import json_refusal
from penstock.contract.problems import MAX_NAME_CHARS, request_error
from penstock.contract.tasks import Task
from penstock.contract.tools import ToolUse
from penstock.gateway.request.generation import ParseRules, parse, with_packed_prompts
from penstock.producer.parsed_body import ParsedBody, RequestBody
from penstock.queue.wire import pack, unpack_all

# Lists of bodies.

MAX_LIST_ITEMS = 1000
"""Most bodies of one list. `max_body_bytes` limits its bytes."""
LIST_MEMBER = "jobs"
_BEGIN_OF_LIST = re.compile(rb'\s*(?:\[|\{\s*"%s"\s*:)' % LIST_MEMBER.encode())


def is_list(raw: bytes) -> bool:
    """Return whether a body is a list of bodies: an array, or an object whose first member is LIST_MEMBER."""
    return _BEGIN_OF_LIST.match(raw) is not None


@dataclass(frozen=True, slots=True)
class ListItem:
    """A body of a list: encoded as `encode_parsed_body` does, or its refusal."""

    data: bytes
    custom_id: str | None = None
    """The caller's name for it."""

    def parsed(self) -> ParsedBody:
        """Return the checked body, or raise its refusal."""
        return decode_parsed_body(self.data)


def parse_list(schema: type[RequestBody], raw: bytes, **rules: Unpack[ParseRules]) -> list[ListItem]:
    """Parse each body of a list. An invalid one is refused alone. Raises RequestError for what is no list of bodies."""
    try:
        found = from_json(raw, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise json_refusal(raw, error) from None
    if isinstance(found, dict):
        if unknown := next((name for name in found if name != LIST_MEMBER), None):
            shown = unknown[:MAX_NAME_CHARS]
            message = f"{shown}: unknown field; beside a list of {LIST_MEMBER} there is none"
            raise RequestError(message, code=UNKNOWN_FIELD, param=shown)
        found = found[LIST_MEMBER]
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_LIST_ITEMS:
        message = f"{LIST_MEMBER}: must be a list of 1 to {MAX_LIST_ITEMS} items"
        raise RequestError(message, param=LIST_MEMBER)
    return [_list_item(schema, one, rules) for one in found]


def _list_item(schema: type[RequestBody], fields: object, rules: ParseRules) -> ListItem:
    custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
    shown = custom_id if isinstance(custom_id, str) and len(custom_id) <= MAX_CUSTOM_ID_CHARS else None
    try:
        parsed = parse(schema, to_json(fields, inf_nan_mode="constants"), **rules)
        return ListItem(encode_parsed_body(with_packed_prompts(parsed)), shown)
    except PenstockError as error:
        return ListItem(encode_refusal(error), shown)


# The encoding of checked bodies for the parser process.

_TASKS: TypeAdapter[Task | None] = TypeAdapter(Task | None)
_REFUSALS: dict[str, type[PenstockError]] = {
    kind.__name__: kind for kind in (RequestError, TooLargeError, InvariantError)
}


def encode_parsed_body(body: ParsedBody, prompts: Sequence[PackedPrompt] | None = None) -> bytes:
    """Encode a body with packed prompts as bytes. `prompts`: other ones in their place."""
    use, params = body.tool_use, body.params.model_dump(exclude_unset=True)
    if "logit_bias" in params:
        params["logit_bias"] = {str(token): added for token, added in params["logit_bias"].items()}
    small = {
        "model": body.model,
        "names": dict(body.names),
        "tool_use": [use.tools, use.choice, use.parallel],
        "echoes": body.echoes,
        "template_kwargs": body.template_kwargs,
        "task": None if body.task is None else body.task.model_dump(),
        "other_tasks": [task.model_dump() for task in body.other_tasks],
        "priority": body.priority,
        "stream": body.stream,
        "queueing": dict(body.queueing),
        "options": dict(body.options),
        "shapes": list(body.shapes),
        "ignored": list(body.ignored),
    }
    shown = body.prompts if prompts is None else prompts
    return pack({**small, "params": params, "prompts": [_fields_of(one) for one in shown]})


def encode_list(items: Sequence[ListItem]) -> bytes:
    """Encode a list as bytes."""
    return pack([[item.data, item.custom_id] for item in items])


def decode_list(data: bytes) -> list[ListItem]:
    """Decode a list, or raise the error that the bytes hold instead."""
    (fields,) = unpack_all(data)
    if isinstance(fields, dict):
        raise _refusal_in(fields)
    return [ListItem(*item) for item in fields]


def _refusal_in(fields: Mapping[str, Any]) -> PenstockError:
    kind, message, code, param = fields["refusal"]
    return _REFUSALS.get(kind, RequestError)(message, code=code, param=param)


def encode_refusal(error: PenstockError) -> bytes:
    """Encode an error as bytes that `decode_parsed_body` raises."""
    return pack({"refusal": [type(error).__name__, error.message, error.code, error.param]})


def decode_parsed_body(data: bytes) -> ParsedBody:
    """Decode a body, or raise the error that the bytes hold instead."""
    (fields,) = unpack_all(data)
    if "refusal" in fields:
        raise _refusal_in(fields)
    made = {
        "prompts": [PackedPrompt(*prompt) for prompt in fields["prompts"]],
        "params": SamplingParams(**fields["params"]),
        "tool_use": ToolUse(*fields["tool_use"]),
        "task": _TASKS.validate_python(fields["task"]),
        "other_tasks": [_TASKS.validate_python(one) for one in fields["other_tasks"]],
    }
    return ParsedBody(**(fields | made))


def _fields_of(prompt: Any) -> list[Any]:
    return [
        prompt.form,
        prompt.data,
        prompt.num_text_bytes,
        prompt.num_tokens,
        prompt.num_tool_bytes,
        prompt.first_words,
    ]


# The messages that a client sends over a WebSocket.

JOBS_PATH = "/v1/jobs"
BodiesOfPaths = Mapping[str, type[RequestBody]]
"""The schema of the body for each path that a message may name."""
MAX_TAG_CHARS = 64
MAX_POSITION_CHARS = 256


def _is_known(path: str, info: ValidationInfo) -> str:
    bodies: BodiesOfPaths = cast("BodiesOfPaths", info.context)
    if path not in bodies:
        raise PydanticCustomError("unsupported_value", f"must be one of {', '.join(bodies)}")
    return path


def _is_job(text: str) -> str:
    if not is_job_id(text):
        raise PydanticCustomError("wrong_job", "must be the id of a job")
    return text


def _position(value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if value is None or (isinstance(value, str) and len(value) <= MAX_POSITION_CHARS):
        return value
    raise PydanticCustomError("wrong_position", "must be the id of an event or the number of a chunk")


Tag = Annotated[str, Field(min_length=1, max_length=MAX_TAG_CHARS)]
"""The client's name for a stream. All messages about the stream have it as `id`."""
Position = Annotated[Any, AfterValidator(_position)]
"""The id of an event, or the number of a chunk. A stream continues after it."""


class Submit(Wire):
    """Submit what the body asks for, and stream the answer."""

    type: Literal["submit"]
    id: Tag
    path: Annotated[str, AfterValidator(_is_known)] = JOBS_PATH
    """The path of the HTTP request whose body this is."""
    body: dict[str, Any]
    after: Position = None
    idempotency_key: str | None = None
    event_ids: bool = True
    """Whether the events have ids. With ids, the jobs of a lost WebSocket go on for the pool's grace time."""


class Attach(Wire):
    """Stream the chunks of a job."""

    type: Literal["attach"]
    id: Tag
    job: Annotated[str, AfterValidator(_is_job)]
    after: Position = None
    token_durability: Durability | None = None
    """What each chunk waits for; by default the gateway's setting."""


class Cancel(Wire):
    """Cancel the jobs of a stream of this WebSocket."""

    type: Literal["cancel"]
    id: Tag


Content = Submit | Attach | Cancel
TYPES: dict[str, type[Content]] = {"submit": Submit, "attach": Attach, "cancel": Cancel}


@dataclass(frozen=True, slots=True)
class SocketMessage:
    """A parsed message. If it is invalid, it has an error in place of its content or of its body."""

    tag: str | None = None
    """The message's `id`, if it has a usable one."""
    content: Content | None = None
    """The message, without its body."""
    body: ParsedBody | None = None
    error: PenstockError | None = None


def parse_socket_message(
    raw: bytes, bodies: BodiesOfPaths, *, packs: bool = False, **rules: Unpack[ParseRules]
) -> SocketMessage:
    """Parse and check a message and its body. With `packs`, the prompts of the body are packed.

    The body is checked as that of an HTTP request to its path, which streams its answer.
    """
    try:
        data = from_json(raw, cache_strings="keys")
    except ValueError as error:
        return SocketMessage(error=json_refusal(raw, error, "the message is not valid JSON"))
    if not isinstance(data, dict):
        return SocketMessage(error=RequestError("the message must be a JSON object"))
    tag = data.get("id")
    tag = tag if isinstance(tag, str) and len(tag) <= MAX_TAG_CHARS else None
    kind = data.get("type")
    schema = TYPES.get(kind) if isinstance(kind, str) else None
    if schema is None:
        return SocketMessage(tag, error=RequestError(f"type: must be one of {', '.join(TYPES)}", param="type"))
    try:
        content = schema.model_validate(data, context=bodies)
    except ValidationError as error:
        return SocketMessage(tag, error=request_error(error))
    if not isinstance(content, Submit):
        return SocketMessage(tag, content)
    body, content = content.body, content.model_copy(update={"body": {}})
    try:
        checked = _checked(bodies[content.path], body, rules)
        return SocketMessage(tag, content, with_packed_prompts(checked) if packs else checked)
    except PenstockError as error:
        return SocketMessage(tag, content, error=error)


def _checked(schema: type[RequestBody], body: dict[str, Any], rules: ParseRules) -> ParsedBody:
    if "stream" in cast("type[Wire]", schema).model_fields:
        if body.get("stream") not in (None, True):
            raise RequestError("stream: must be true or absent; a WebSocket streams every answer", param="stream")
        body["stream"] = True
    # The schemas are those of JSON: checked as Python values, some fields would accept less.
    return parse(schema, to_json(body, inf_nan_mode="constants"), **rules)


# The encoding of messages for the parser process.


def encode_socket_message(message: SocketMessage) -> bytes:
    """Encode a message whose prompts are packed."""
    body = None
    if message.error is not None:
        body = encode_refusal(message.error)
    elif message.body is not None:
        body = encode_parsed_body(message.body)
    content = None if message.content is None else message.content.model_dump()
    return pack({"tag": message.tag, "content": content, "body": body})


def decode_socket_message(data: bytes) -> SocketMessage:
    """Decode a message."""
    (fields,) = unpack_all(data)
    given = fields["content"]
    content = None if given is None else TYPES[given["type"]].model_construct(**given)
    try:
        body = None if fields["body"] is None else decode_parsed_body(fields["body"])
        return SocketMessage(fields["tag"], content, body)
    except PenstockError as error:
        return SocketMessage(fields["tag"], content, error=error)
