"""A job's channel in Redis: its format and name, as callers choose them and as the job's record holds them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from penstock.contract.fields import UNKNOWN_FIELD, WRONG_MEMBER, CheckedInput
from penstock.contract.problems import request_error

ChannelFormat = Literal["msgpack", "json"]
"""What a message is: a chunk as the log has it, or an event of `/v1/jobs/ID/stream`."""
MAX_CHANNEL_NAME_CHARS = 40
"""So that the field `channel` of a record is short: a field above 64 bytes makes the whole record wide."""
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_CHANNEL_NAME_CHARS}}}")
_LETTERS: dict[ChannelFormat, str] = {"msgpack": "m", "json": "j"}
_FORMATS = {letter: name for name, letter in _LETTERS.items()}
NO_CHANNEL = "0"
"""The field `channel` in the record of a job without one."""


@dataclass(frozen=True, slots=True)
class Channel:
    """A channel on which the queue publishes a job's chunks."""

    format: ChannelFormat = "msgpack"
    name: str = ""
    """The name that several jobs of a tenant may share; empty for the job's id."""

    @property
    def field(self) -> str:
        """The field `channel` of the job's record: `<letter of the format>[:<name>]`."""
        return f"{_LETTERS[self.format]}:{self.name}" if self.name else _LETTERS[self.format]


def channel_of_field(field: str) -> Channel | None:
    """Return the channel that a record names, None for none."""
    letter, _, name = field.partition(":")
    return Channel(_FORMATS[letter], name) if letter in _FORMATS else None


def channel_of(value: Any) -> Channel | None:
    """Return the channel that a caller names, None for none. Raises PydanticCustomError for another value."""
    if value is None or value is False or isinstance(value, Channel):
        return value or None
    if value is True:
        return Channel()
    if isinstance(value, str) and value in _LETTERS:
        return Channel(value)
    if isinstance(value, Mapping):
        return _named(value)
    raise PydanticCustomError("channel", 'must be true, "json", "msgpack" or {"name": …, "format": …}')


def _named(members: Mapping[Any, Any]) -> Channel:
    if unknown := next((str(member) for member in members if member not in ("name", "format")), None):
        raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {UNKNOWN_FIELD: unknown})
    name, form = members.get("name"), members.get("format", "json")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        text = "must be 1 to {limit} letters, digits, dots, underscores or hyphens"
        raise PydanticCustomError("channel", text, {WRONG_MEMBER: "name", "limit": MAX_CHANNEL_NAME_CHARS})
    if form not in ("json", "msgpack"):
        raise PydanticCustomError("channel", 'must be "json" or "msgpack"', {WRONG_MEMBER: "format"})
    return Channel(form, name)


def _checked(value: Any) -> Any:
    channel_of(value)
    return value


ChannelOption = bool | Literal["json", "msgpack"] | Mapping[str, str] | Channel | None
"""A channel as a caller's argument."""
ChannelOfJob = Annotated[Channel | None, BeforeValidator(channel_of)]
GivenChannel = Annotated[
    Any,
    AfterValidator(_checked),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "boolean"},
                {"enum": ["json", "msgpack"]},
                {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
                        "format": {"enum": ["json", "msgpack"]},
                    },
                    "required": ["name"],
                    "additionalProperties": False,
                },
                {"type": "null"},
            ]
        }
    ),
]
"""A valid channel in a body, as it was sent."""


class _Attachment(CheckedInput):
    channel: ChannelOfJob = None


def checked_channel(channel: ChannelOption) -> Channel | None:
    """Return the channel that a caller names, None for none. Raises RequestError."""
    try:
        return _Attachment(channel=channel).channel
    except ValidationError as error:
        raise request_error(error) from None
