"""Checked bodies as bytes, for the parser process, and lists of bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from penstock.contract.errors import InvariantError, PenstockError, RequestError, TooLargeError
from penstock.contract.job import MAX_CUSTOM_ID_CHARS, PackedPrompt, SamplingParams
from penstock.contract.named import UNKNOWN_FIELD
from penstock.contract.problems import MAX_NAME_CHARS
from penstock.contract.tasks import Task
from penstock.gateway.request.generation import ParsedBody, RequestBody, RequestContent, parse, with_packed_prompts
from penstock.producer.openai.messages import ToolUse
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


def parse_list(schema: type[RequestBody], raw: bytes, *, ignores_unknown: bool = False) -> list[ListItem]:
    """Parse each body of a list. An invalid one is refused alone. Raises RequestError for what is no list of bodies."""
    try:
        found = from_json(raw, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if isinstance(found, dict):
        if unknown := next((name for name in found if name != LIST_MEMBER), None):
            shown = unknown[:MAX_NAME_CHARS]
            message = f"{shown}: unknown field; beside a list of {LIST_MEMBER} there is none"
            raise RequestError(message, code=UNKNOWN_FIELD, param=shown)
        found = found[LIST_MEMBER]
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_LIST_ITEMS:
        message = f"{LIST_MEMBER}: must be a list of 1 to {MAX_LIST_ITEMS} items"
        raise RequestError(message, param=LIST_MEMBER)
    return [_list_item(schema, one, ignores_unknown=ignores_unknown) for one in found]


def _list_item(schema: type[RequestBody], fields: object, *, ignores_unknown: bool) -> ListItem:
    custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
    shown = custom_id if isinstance(custom_id, str) and len(custom_id) <= MAX_CUSTOM_ID_CHARS else None
    try:
        parsed = parse(schema, to_json(fields, inf_nan_mode="constants"), ignores_unknown=ignores_unknown)
        return ListItem(encode_parsed_body(with_packed_prompts(parsed)), shown)
    except PenstockError as error:
        return ListItem(encode_refusal(error), shown)


# The encoding of checked bodies for the parser process.

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
