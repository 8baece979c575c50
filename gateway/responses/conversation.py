"""The conversation of a response: its instructions, the stored responses before it, and its own input."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from penstock.contract.errors import NotFoundError, RequestError
from penstock.contract.job import MAX_MESSAGES
from penstock.contract.packed_prompt import PackedPrompt
from penstock.contract.tools import MAX_CALLS_OF_CHAT
from penstock.gateway.responses.ids import MAX_SHOWN_CHARS, job_id_of, place_of
from penstock.gateway.responses.output import OutputItem, OutputReader, message_of, reading_of
from penstock.gateway.responses.record import PackedMessages, StoredResponse, decode_stored_response
from penstock.producer.client import AsyncClient
from penstock.producer.client.request import Prompt, pack_prompt_of
from penstock.queue.msgpack_codec import array_header
from penstock.queue.packed_result import PackedResult

MAX_CHAIN = 256
"""Most responses of a chain of `previous_response_id`. Each one is read from Redis by itself."""
MAX_REFERENCED = 64
"""Most responses to which the items of one request may refer."""
MAX_STORED_BYTES = 64 << 20
"""Most bytes of stored records and results that one request reads. They hold more than the messages that are limited:
reasoning, and what repeats their requests."""
_MAX_BYTES_ON_LOOP = 16 << 10
"""A larger record or result is read on a thread."""


class Conversations:
    """Builds the conversations of one tenant's requests."""

    def __init__(self, client: AsyncClient, tenant: str, max_bytes: int) -> None:
        """`max_bytes` limits the texts and calls of a conversation."""
        self._client = client
        self._tenant = tenant
        self._max_bytes = max_bytes
        self._num_stored_bytes = 0

    async def resolved(
        self, prompt: Prompt, num_calls: int, references: Sequence[tuple[int, Sequence[str]]]
    ) -> PackedMessages:
        """Return a request's own messages. Each reference becomes the items of the stored response that it names."""
        own = PackedMessages.of(_packed(prompt), num_calls)
        if len(references) > MAX_REFERENCED:
            message = f"input: the items refer to {len(references)} responses; the limit is {MAX_REFERENCED}"
            raise RequestError(message, param="input")
        # From the last one on, so that the indexes before it stay right.
        for index, item_ids in reversed(references):
            found = await self._referenced(item_ids)
            before, after = own.split_at(index)
            own = _joined((PackedMessages(before), found, _without_data(own, PackedMessages(after))))
        return own

    async def prompt_of(self, own: PackedMessages, instructions: str | None, previous: str | None) -> PackedPrompt:
        """Return the whole conversation. Raises RequestError if it exceeds a limit, or if a response is missing."""
        parts = [own]
        if previous is not None:
            parts = [*await self._chain(previous, own), own]
        if instructions:
            parts.insert(0, _message(pack_prompt_of([{"role": "system", "content": instructions}])))
        whole = _joined(parts)
        self._check(whole)
        data = array_header(whole.num_messages) + whole.data
        return PackedPrompt("messages", data, whole.num_text_bytes, None, whole.num_tool_bytes)

    async def _chain(self, previous: str, own: PackedMessages) -> list[PackedMessages]:
        parts: list[PackedMessages] = []
        num_responses, whole = 0, own
        while previous:
            num_responses += 1
            if num_responses > MAX_CHAIN:
                message = f"previous_response_id: the chain has more than {MAX_CHAIN} responses"
                raise RequestError(message, param="previous_response_id")
            record, items = await self._read(previous)
            parts += [_packed_message(items), record.messages]
            whole = _joined(PackedMessages(b"", *_sizes(part)) for part in (whole, *parts[-2:]))
            self._check(whole)
            previous = record.previous
        return parts[::-1]

    def _check(self, whole: PackedMessages) -> None:
        for what, number, limit in (
            ("messages", whole.num_messages, MAX_MESSAGES),
            ("tool calls", whole.num_calls, MAX_CALLS_OF_CHAT),
            ("bytes", whole.num_bytes, self._max_bytes),
        ):
            if number > limit:
                message = f"input: the conversation with its earlier responses has more than {limit} {what}"
                raise RequestError(message, code="conversation_too_large", param="input")

    async def _read(self, response_id: str) -> tuple[StoredResponse, list[OutputItem]]:
        """Return a response of the chain and its output."""
        try:
            job_id = job_id_of(response_id)
            record, items = await self._stored(job_id)
        except NotFoundError:
            message = f"Previous response with id {response_id[:MAX_SHOWN_CHARS]!r} not found."
            raise RequestError(message, code="previous_response_not_found", param="previous_response_id") from None
        if items is None:
            message = f"previous_response_id: response {response_id!r} has not been completed"
            raise RequestError(message, code="previous_response_not_completed", param="previous_response_id")
        return record, items

    async def _referenced(self, item_ids: Sequence[str]) -> PackedMessages:
        """Return the items as messages, one for the items of each response in a row."""
        found, places = list[OutputItem](), [(item_id, place_of(item_id)) for item_id in item_ids]
        known: dict[str, list[OutputItem]] = {}
        for item_id, place in places:
            if place is None:
                raise _no_item(item_id)
            job_id, index = place
            if job_id not in known:
                if len(known) == MAX_REFERENCED:
                    raise RequestError(f"input: items refer to more than {MAX_REFERENCED} responses", param="input")
                known[job_id] = await self._items_of_reference(item_id, job_id)
            if index >= len(known[job_id]) or known[job_id][index].id != item_id:
                raise _no_item(item_id)
            found.append(known[job_id][index])
        groups: list[list[OutputItem]] = []
        for item in found:
            if not groups or groups[-1][0].job_id != item.job_id:
                groups.append([])
            groups[-1].append(item)
        return _joined(_packed_message(group) for group in groups)

    async def _items_of_reference(self, item_id: str, job_id: str) -> list[OutputItem]:
        try:
            _, items = await self._stored(job_id)
        except NotFoundError:
            raise _no_item(item_id) from None
        if items is None:
            raise _no_item(item_id)
        return items

    async def _stored(self, job_id: str) -> tuple[StoredResponse, list[OutputItem] | None]:
        """Return a response and its output, or None in place of the output if its job is not done."""
        data = await self._client.responses.read(job_id, self._tenant)
        self._count_stored(len(data))
        on_thread = len(data) > _MAX_BYTES_ON_LOOP
        record = await asyncio.to_thread(decode_stored_response, data) if on_thread else decode_stored_response(data)
        result = await self._client.responses.result(job_id, self._tenant)
        if result is None or result.outcome.state != "done":
            return record, None
        self._count_stored(result.num_bytes)
        if result.num_bytes > _MAX_BYTES_ON_LOOP:
            return record, await asyncio.to_thread(_items_of, result, record)
        return record, _items_of(result, record)

    def _count_stored(self, num_bytes: int) -> None:
        self._num_stored_bytes += num_bytes
        if self._num_stored_bytes > MAX_STORED_BYTES:
            message = f"input: its earlier responses take more than {MAX_STORED_BYTES} bytes as they are stored"
            raise RequestError(message, code="conversation_too_large", param="input")


def _items_of(result: PackedResult, record: StoredResponse) -> list[OutputItem]:
    reader = OutputReader(result.job_id, record.form)
    for _ in reading_of(result, reader):
        pass
    return reader.items


def _packed(prompt: Prompt) -> PackedPrompt:
    return prompt if isinstance(prompt, PackedPrompt) else pack_prompt_of(prompt)


def _message(prompt: PackedPrompt, num_calls: int = 0) -> PackedMessages:
    return PackedMessages.of(prompt, num_calls)


def _packed_message(items: Sequence[OutputItem]) -> PackedMessages:
    """Return the message that items of an output stand for; nothing if they are reasoning alone."""
    if all(item.kind == "reasoning" for item in items):
        return PackedMessages()
    message = message_of(items)
    return _message(pack_prompt_of([message]), len(message.get("tool_calls", ())))


def _sizes(messages: PackedMessages) -> tuple[int, int, int, int]:
    return messages.num_messages, messages.num_calls, messages.num_text_bytes, messages.num_tool_bytes


def _without_data(own: PackedMessages, after: PackedMessages) -> PackedMessages:
    """Return the messages after a reference, with the sizes of all own messages but the empty one that stood for it."""
    return PackedMessages(after.data, own.num_messages - 1, own.num_calls, own.num_text_bytes, own.num_tool_bytes)


def _joined(parts: Iterable[PackedMessages]) -> PackedMessages:
    found = list(parts)
    sizes = [sum(column) for column in zip(*map(_sizes, found), strict=True)]
    return PackedMessages(b"".join(part.data for part in found), *sizes)


def _no_item(item_id: str) -> RequestError:
    message = f"input: no item with id {item_id[:MAX_SHOWN_CHARS]!r} is stored"
    return RequestError(message, code="item_not_found", param="input")
