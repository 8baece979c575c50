"""The messages that a client sends over a WebSocket: their schemas, and their encoding for the parser process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError, from_json, to_json

from penstock.contract.errors import PenstockError, RequestError
from penstock.contract.job import is_job_id
from penstock.contract.problems import request_error
from penstock.gateway.request.encoding import decode_parsed_body, encode_parsed_body, encode_refusal
from penstock.gateway.request.generation import ParsedBody, RequestBody, parse, with_packed_prompts
from penstock.producer.openai.fields import Wire
from penstock.queue.wire import pack, unpack_all

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
    raw: bytes, bodies: BodiesOfPaths, *, ignores_unknown: bool = False, packs: bool = False
) -> SocketMessage:
    """Parse and check a message and its body. With `packs`, the prompts of the body are packed.

    The body is checked as that of an HTTP request to its path, which streams its answer.
    """
    try:
        data = from_json(raw, cache_strings="keys")
    except ValueError as error:
        return SocketMessage(error=RequestError(f"the message is not valid JSON: {error}"))
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
        checked = _checked(bodies[content.path], body, ignores_unknown=ignores_unknown)
        return SocketMessage(tag, content, with_packed_prompts(checked) if packs else checked)
    except PenstockError as error:
        return SocketMessage(tag, content, error=error)


def _checked(schema: type[RequestBody], body: dict[str, Any], *, ignores_unknown: bool) -> ParsedBody:
    if "stream" in cast("type[Wire]", schema).model_fields:
        if body.get("stream") not in (None, True):
            raise RequestError("stream: must be true or absent; a WebSocket streams every answer", param="stream")
        body["stream"] = True
    # The schemas are those of JSON: checked as Python values, some fields would accept less.
    return parse(schema, to_json(body, inf_nan_mode="constants"), ignores_unknown=ignores_unknown)


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
