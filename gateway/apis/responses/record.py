"""The stored record of a response: its ids, its content, and the reading of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgpack
from pydantic import TypeAdapter

from penstock.contract.errors import NotFoundError
from penstock.contract.job import PackedPrompt, is_job_id
from penstock.gateway.budget import Claim
from penstock.producer.client import AsyncClient
from penstock.producer.parsing.parsed_text import AnswerFormat
from penstock.producer.responses.answer import RESPONSE_PREFIX, response_id_of
from penstock.producer.responses.output import ITEM_PREFIXES
from penstock.producer.responses.tools import CalledTool
from penstock.queue.wire import WireError, pack, unpack_utf8

# Ids of responses and of their items. Each contains the id of the response's job, so any gateway can resolve it.

_ITEM_ID = re.compile(rf"(?:{'|'.join(ITEM_PREFIXES.values())})_(\d{{1,6}})_(.+)")
MAX_SHOWN_CHARS = 128


def job_id_of(response_id: str) -> str:
    """Return the id of a response's job. Raises NotFoundError for what is not the id of a response."""
    job_id = response_id.removeprefix(RESPONSE_PREFIX)
    if not response_id.startswith(RESPONSE_PREFIX) or not is_job_id(job_id):
        raise no_response(response_id)
    return job_id


def no_response(response_id: str) -> NotFoundError:
    """Return the error for a response that is unknown, deleted, expired, or of another tenant."""
    message = f"Response with id {response_id[:MAX_SHOWN_CHARS]!r} not found."
    return NotFoundError(message, code="response_not_found", param="response_id")


def input_item_id(index: int, job_id: str) -> str:
    """Return the id of an item of a response's input that came without an id."""
    return f"item_{index}_{job_id}"


def compaction_id(job_id: str) -> str:
    """Return the id of the item with the summary that a job wrote. No reference can name it."""
    return f"cmp_{job_id}"


def place_of(item_id: str) -> tuple[str, int] | None:
    """Return the job and the index of an item of a response's output, or None for another id."""
    found = _ITEM_ID.fullmatch(item_id)
    return (found[2], int(found[1])) if found and is_job_id(found[2]) else None


# The stored record of a response: its input, what it repeats of its request, and how to read its job's text.

RECORD_VERSION = 1
_OF_USER = b'{"type": "message", "role": "user", '
"""How the JSON of an input item begins if it is a message of the user (`_MessageItem.stored`)."""


@dataclass(frozen=True, slots=True)
class PackedMessages:
    """Messages of a chat as msgpack values without the header of their list, and the sizes that admission needs."""

    data: bytes = field(default=b"", repr=False)
    num_messages: int = 0
    num_calls: int = 0
    num_text_bytes: int = 0
    num_tool_bytes: int = 0

    @classmethod
    def of(cls, prompt: PackedPrompt, num_calls: int) -> PackedMessages:
        """Return the messages of a packed chat."""
        num_messages, start = _header_of(prompt.data)
        return cls(prompt.data[start:], num_messages, num_calls, prompt.num_text_bytes, prompt.num_tool_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the texts, of the calls' names and of their arguments."""
        return self.num_text_bytes + self.num_tool_bytes

    def split_at(self, indexes: Sequence[int]) -> list[bytes]:
        """Return the packed messages before, between and after those at `indexes`, which must ascend."""
        unpacker = msgpack.Unpacker(max_buffer_size=max(len(self.data), 1), max_ext_len=0)
        unpacker.feed(self.data)
        parts: list[bytes] = []
        start = next_index = 0
        for index in indexes:
            for _ in range(next_index, index):
                unpacker.skip()
            parts.append(self.data[start : unpacker.tell()])
            unpacker.skip()
            start, next_index = unpacker.tell(), index + 1
        return [*parts, self.data[start:]]


def _header_of(data: bytes) -> tuple[int, int]:
    """Return the number of items of a packed list, and the length of its header in bytes."""
    if data[0] & 0xF0 == 0x90:
        return data[0] & 0x0F, 1
    size = {0xDC: 2, 0xDD: 4}[data[0]]
    return int.from_bytes(data[1 : 1 + size], "big"), 1 + size


_FORM = TypeAdapter(AnswerFormat)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The stored record of a response. Its events can be made from this record and the log of its job."""

    created_s: int
    background: bool
    format: AnswerFormat
    """How to parse the text of the job."""
    echo: bytes = field(repr=False)
    """The members that repeat the request: a JSON object in ASCII."""
    items: list[tuple[str, bytes]] = field(repr=False)
    """The input items: the caller's id, which may be empty, and the other members as JSON in UTF-8."""
    messages: PackedMessages = field(default_factory=PackedMessages, repr=False)
    """The messages of the input, without instructions and earlier responses."""
    previous: str = ""
    """The id of the previous response."""
    stored: bool = True
    limits: tuple[int, int] | None = None
    """The `max_output_tokens` of the request, and the tokens of prompt and output together to which it is lowered."""
    called: Mapping[str, CalledTool] = field(default_factory=dict, repr=False)
    """By the offered names of functions, what their calls come back as. Without those that are plain functions."""
    sealed_for: str = ""
    """The model that the seal of its reasoning names; empty: its reasoning has no seal."""
    compaction: str = ""
    """The summary with its seal, if the conversation was shortened for this response: the first item of its output."""

    def encode(self) -> bytes:
        """Return the record as bytes."""
        fields = {name: getattr(self, name) for name in ("created_s", "background", "echo", "previous")}
        fields["items"] = [(item_id, text.decode()) for item_id, text in self.items]
        if self.limits is not None:
            fields["limits"] = self.limits
        if self.compaction:
            fields["compaction"] = self.compaction
        if self.sealed_for:
            fields["sealed_for"] = self.sealed_for
        if self.called:
            fields["called"] = [(name, *called) for name, called in self.called.items()]
        return pack(
            {"v": RECORD_VERSION, **fields, "form": _FORM.dump_json(self.format), "messages": asdict(self.messages)}
        )

    def items_of_user(self, job_id: str) -> list[tuple[str, bytes]]:
        """Return the input items that are messages of the user, with the ids under which they are listed."""
        return [
            (item_id or input_item_id(index, job_id), text)
            for index, (item_id, text) in enumerate(self.items)
            if text.startswith(_OF_USER)
        ]

    def without_input(self) -> StoredResponse:
        """Return what the events and the state of the response need."""
        return replace(self, items=[], messages=PackedMessages())

    def without_request(self) -> StoredResponse:
        """Return what a conversation that continues the response needs."""
        return replace(self, items=[], echo=b"")


def decode_stored_response(data: bytes) -> StoredResponse:
    """Decode a record. It takes as many bytes as `data`. Raises WireError."""
    found = unpack_utf8(data)
    if not isinstance(found, dict) or found.pop(b"v", None) != RECORD_VERSION:
        raise WireError("not the record of a response, or one of another version")
    try:
        fields = _with_names(found)
        items: list[tuple[str, bytes]] = [(item_id.decode(), text) for item_id, text in fields.pop("items")]
        form = _FORM.validate_json(fields.pop("form"))
        parts: dict[str, Any] = {"format": form, "previous": fields.pop("previous").decode()}
        limits = fields.pop("limits", None)
        parts["limits"] = limits and tuple(limits)
        called = [[text.decode() for text in row] for row in fields.pop("called", ())]
        parts["sealed_for"] = fields.pop("sealed_for", b"").decode()
        parts["compaction"] = fields.pop("compaction", b"").decode()
        parts["called"] = {name: CalledTool(*rest) for name, *rest in called}
        parts["messages"] = PackedMessages(**_with_names(fields.pop("messages")))
        return StoredResponse(items=items, **parts, **fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"not the record of a response: {error!r}") from error


def _with_names(found: dict[bytes, Any]) -> dict[str, Any]:
    return {name.decode(): value for name, value in found.items()}


# Reading of stored responses. A large record claims memory from the budget of results before it is read.

LARGE_RECORD_BYTES = 256 << 10
"""A larger record claims its memory."""
MAX_BYTES_ON_LOOP = 16 << 10
"""A larger record or result is decoded on a thread."""


def bytes_to_claim(num_bytes: int) -> int:
    """Return how many bytes to claim for so many bytes of a record or result."""
    return num_bytes if num_bytes > LARGE_RECORD_BYTES else 0


def decoding_bytes_to_claim(num_bytes: int) -> int:
    """Return how many bytes to claim while a record of so many bytes is decoded: for its bytes and for the record."""
    return 2 * bytes_to_claim(num_bytes)


async def record_of(client: AsyncClient, claim: Claim, job_id: str, tenant: str) -> StoredResponse:
    """Return the record of a stored response, for whose memory the claim grows.

    Raises NotFoundError that names the response, and UnavailableError if there is no memory for too long.
    """
    try:
        num_bytes = (await client.servers.of_job(job_id).responses.num_bytes(job_id, tenant)).record
        claim.shrink_to(0)
        await claim.grow_to(decoding_bytes_to_claim(num_bytes))
        return await decoded_record(await client.servers.of_job(job_id).responses.read(job_id, tenant))
    except NotFoundError:
        raise no_response(response_id_of(job_id)) from None


async def record_without_input_of(client: AsyncClient, claim: Claim, job_id: str, tenant: str) -> StoredResponse:
    """Return a record without its input, and keep memory for that only. Raises what `record_of` raises."""
    record = (await record_of(client, claim, job_id, tenant)).without_input()
    claim.shrink_to(bytes_to_claim(len(record.echo)))
    return record


async def decoded_record(data: bytes) -> StoredResponse:
    """Decode a record without holding the event loop."""
    if len(data) <= MAX_BYTES_ON_LOOP:
        return decode_stored_response(data)
    return await asyncio.to_thread(decode_stored_response, data)


RecordSource = Callable[[Claim], Awaitable[StoredResponse]]
"""Returns the record of an answer without its input. The claim, or an earlier one, covers the memory that is kept."""


async def new_record(record: StoredResponse, claim: Claim) -> RecordSource:
    """Return the source of a new response's record, for whose memory `claim` grows. It outlives the answer."""
    kept = record.without_input()
    await claim.grow_to(bytes_to_claim(len(kept.echo)))

    async def bring(_: Claim) -> StoredResponse:
        return kept

    return bring


def stored_record(client: AsyncClient, job_id: str, tenant: str) -> RecordSource:
    """Return the source of a stored record. Raises what `record_of` raises when it is called."""
    return lambda claim: record_without_input_of(client, claim, job_id, tenant)
