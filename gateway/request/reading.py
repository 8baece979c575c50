"""Reading of an HTTP request: its bytes become a checked body, and the body a GenerationRequest."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from penstock.contract.errors import PenstockError, RequestError, TooLargeError, UnavailableError
from penstock.contract.job import is_job_id
from penstock.contract.json_text import json_or_empty, without_mark
from penstock.contract.priority import allowed_class, default_class
from penstock.contract.tenant import ApiKey
from penstock.gateway.budget import Claim, Refusal, SharedBudget
from penstock.gateway.request.encoding import (
    ListItem,
    SocketMessage,
    decode_list,
    decode_parsed_body,
    decode_socket_message,
    is_list,
    parse_list,
    parse_socket_message,
)
from penstock.gateway.request.generation import FIRST_OF_TWO, GenerationRequest, StreamPosition, parse
from penstock.gateway.request.parser_process import HEAD, IS_LIST, IS_MESSAGE, BodySchemas
from penstock.gateway.settings import GatewaySettings, UnknownFields
from penstock.producer.parsed_body import ParsedBody, RequestBody

logger = logging.getLogger("penstock.gateway")

# Reading of request bodies, which must be JSON and are bounded in size and time.

MAX_BODY_BYTES_HELD = 64 << 20
"""Bytes of large bodies that a gateway holds in memory until they are parsed. Further bytes wait unread."""
MAX_BODY_BYTES_HELD_OF_TENANT = 16 << 20
"""The share of MAX_BODY_BYTES_HELD that one tenant may use."""
BODY_STEP_BYTES = 256 << 10
"""Bytes by which the claim of a large body grows while it arrives. Bodies up to this size are not large."""
FREE_BODY_BYTES = 16 << 10
"""Bodies up to this size need no claim."""
MAX_SMALL_BYTES_HELD = 64 << 20
"""Bytes of other bodies, and of the beginnings of large ones, that a gateway holds until they are parsed."""
MAX_SMALL_BYTES_HELD_OF_TENANT = 16 << 20
"""The share of MAX_SMALL_BYTES_HELD that one tenant may use, and the bytes of its bodies that may wait for it. Further
bodies are refused, because a connection has received a part of its body before it waits."""
MAX_SMALL_WAIT_S = 30.0
"""Seconds that a body waits for that memory. After that, it is refused, too."""


class BodyBudgets:
    """The memory for bodies and messages until they are parsed: one budget for large ones, and one for small ones."""

    def __init__(self, max_body_bytes: int) -> None:
        per_owner = MAX_BODY_BYTES_HELD_OF_TENANT
        self.large = SharedBudget(MAX_BODY_BYTES_HELD, per_owner=per_owner, step=BODY_STEP_BYTES, most=max_body_bytes)
        self.small = SharedBudget(
            MAX_SMALL_BYTES_HELD,
            per_owner=MAX_SMALL_BYTES_HELD_OF_TENANT,
            max_waiting=MAX_SMALL_BYTES_HELD_OF_TENANT,
            max_wait_s=MAX_SMALL_WAIT_S,
            refusal=Refusal("request bodies", code="body_memory_full"),
        )


class BodyMemory:
    """The memory of one body while it arrives and until it is parsed."""

    __slots__ = ("_large", "_num_granted", "_small")

    def __init__(self, budgets: BodyBudgets, owner: str) -> None:
        self._large = Claim(budgets.large, owner)
        self._small = Claim(budgets.small, owner)
        self._num_granted = FREE_BODY_BYTES

    def has(self, num_bytes: int) -> bool:
        """Return whether so many bytes may be held."""
        return num_bytes <= self._num_granted

    async def grow_to(self, num_bytes: int, num_whole: int) -> None:
        """Wait for the memory of so many bytes. `num_whole`: the length of the whole body, if it is known, else 0.

        The first claim is for all of a small body, so that two of them never wait for each other.
        """
        if num_bytes <= BODY_STEP_BYTES:
            at_once = num_whole if num_bytes <= num_whole <= BODY_STEP_BYTES else BODY_STEP_BYTES
            await self._small.grow_to(at_once)
            self._num_granted = at_once
            return
        await self._large.grow_to(num_bytes)
        self._small.shrink_to(0)
        self._num_granted = max(num_bytes, self._large.amount)

    def release(self) -> None:
        """Give all of it back."""
        self._large.shrink_to(0)
        self._small.shrink_to(0)


async def read_json_body(request: Request, memory: BodyMemory, *, max_bytes: int, timeout_s: float) -> bytes:
    """Read and return the body, at most `max_bytes` long. Its memory grows as it arrives.

    So a slow client holds only what it has sent. While the body waits for memory, its time stands still. Raises
    TooLargeError for a larger body; the server then discards the rest. Raises RequestError for a body that arrives too
    slowly, ends early, is not plain JSON by its headers, or has another encoding than UTF-8.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            body = await _read(request, memory, max_bytes, limit)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {timeout_s:g} s", code="body_timeout") from None
    except ClientDisconnect:
        raise RequestError("the body ended early", code="body_incomplete") from None
    check_kind(request)
    return without_mark(body)


async def _read(request: Request, memory: BodyMemory, max_bytes: int, limit: asyncio.Timeout) -> bytes:
    declared = request.headers.get("content-length", "")
    num_whole, body = int(declared) if declared.isdecimal() else 0, bytearray()
    too_large = TooLargeError(f"the body is larger than {max_bytes} bytes", code="body_too_large")
    if num_whole > max_bytes:
        raise too_large
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise too_large
        if not memory.has(len(body)):
            await _grow(memory, len(body), num_whole, limit)
    return bytes(body)


async def _grow(memory: BodyMemory, num_bytes: int, num_whole: int, limit: asyncio.Timeout) -> None:
    """Wait for memory. Meanwhile the connection is not read, so the time does not count."""
    loop, due_s = asyncio.get_running_loop(), limit.when()
    began_s = loop.time()
    limit.reschedule(None)
    await memory.grow_to(num_bytes, num_whole)
    limit.reschedule(None if due_s is None else due_s + loop.time() - began_s)


def check_kind(request: Request) -> None:
    """Refuse a body that is compressed, or that a browser sends without declaring it as JSON.

    A page of another site can send other types without a CORS preflight. A program may leave the type out (`curl -d`).
    """
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        message = f"Content-Encoding {coding[:64]!r} is not supported; send the body uncompressed"
        raise RequestError(message, code="unsupported_media_type")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_of_browser = any(name in request.headers for name in ("origin", "sec-fetch-site"))
    if kind != "application/json" and (is_of_browser or kind == "multipart/form-data"):
        raise RequestError("Content-Type must be application/json", code="unsupported_media_type")


# Parsing of request bodies: small bodies on the event loop, large bodies in a separate process.

MAX_BYTES_ON_LOOP = 256 << 10
_FEW_BYTES = 8 << 10
"""A body up to this size parses within a millisecond, whatever its content."""
_MAX_CONTAINERS_ON_LOOP = 256
_MAX_COMMAS_ON_LOOP = 4096
"""A body with more objects, lists or values than these limits takes several milliseconds to check at any size."""
_MAX_OBJECTS_OF_LIST_ON_LOOP = 32
PARSE_TIMEOUT_S = 20.0
"""Seconds that the parser process may take for one body. After that the body is refused and the process is killed."""
_REAP_TIMEOUT_S = 5.0
_PARSER = (sys.executable, "-m", "penstock.gateway.request.parser_process")


def is_heavy(raw: bytes) -> bool:
    """Return whether parsing the body on the event loop would block it too long."""
    if len(raw) <= _FEW_BYTES:
        return False
    return (
        len(raw) > MAX_BYTES_ON_LOOP
        or raw.count(b"{") + raw.count(b"[") > _MAX_CONTAINERS_ON_LOOP
        or raw.count(b",") > _MAX_COMMAS_ON_LOOP
    )


class Parser:
    """Parses request bodies for one gateway. The parser process starts with the first large body."""

    def __init__(self, unknown_fields: UnknownFields, schemas: BodySchemas) -> None:
        self._unknown_fields = unknown_fields
        self._schemas = schemas
        self._rules = schemas.rules(unknown_fields)
        self._parsing = SharedBudget(1, per_owner=1)
        self._child: _Child | None = None
        self._is_closed = False

    async def parse(self, schema: type[RequestBody], raw: bytes, owner: str) -> ParsedBody:
        """Return the checked content of a body with one of the `schemas`.

        Large bodies are parsed one at a time, and owners are served round robin. Raises RequestError for an invalid
        body and UnavailableError if the parser process cannot start.
        """
        if not is_heavy(raw):
            return parse(schema, raw, **self._rules)
        async with self._parsing.taken(owner, 1):
            return decode_parsed_body(await self._ask(self._schemas.bodies.index(schema), raw))

    async def parse_list(self, schema: type[RequestBody], raw: bytes, owner: str) -> list[ListItem]:
        """Return the checked bodies of a list, and the refusals of invalid ones. Raises what `parse` raises.

        Most lists have many objects, so the parser process parses all but the shortest.
        """
        if len(raw) <= _FEW_BYTES and raw.count(b"{") <= _MAX_OBJECTS_OF_LIST_ON_LOOP:
            return parse_list(schema, raw, **self._rules)
        async with self._parsing.taken(owner, 1):
            return decode_list(await self._ask(IS_LIST | self._schemas.bodies.index(schema), raw))

    async def parse_message(self, raw: bytes, owner: str) -> SocketMessage:
        """Return the parsed message of a WebSocket. Raises what `parse` raises where no message was parsed."""
        if not is_heavy(raw):
            return parse_socket_message(raw, self._schemas.of_paths, **self._rules)
        async with self._parsing.taken(owner, 1):
            return decode_socket_message(await self._ask(IS_MESSAGE, raw))

    async def close(self) -> None:
        """Kill the parser process. A body that it is parsing is refused with UnavailableError."""
        self._is_closed = True
        await self._end_child()

    async def _ask(self, index: int, raw: bytes) -> bytes:
        if self._child is None:
            self._child = await _Child.start([self._unknown_fields, *self._schemas.arguments])
        try:
            async with asyncio.timeout(PARSE_TIMEOUT_S):
                return await self._child.ask(index, raw)
        except TimeoutError:
            await self._end_child()
            message = f"the body takes longer than {PARSE_TIMEOUT_S:g} s to parse"
            raise RequestError(message, code="body_too_complex") from None
        except (OSError, EOFError) as error:
            await self._end_child()
            if self._is_closed:
                raise UnavailableError("this gateway is stopping", code="gateway_stopped") from error
            logger.warning("the parser process ended", extra={"reason": repr(error), "body_bytes": len(raw)})
            raise RequestError("the body takes too much memory to parse", code="body_too_complex") from None
        except asyncio.CancelledError:
            # Otherwise the next body would receive the answer to this one.
            await self._end_child()
            raise

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end()


class BodyProcess:
    """A process that computes on bodies, and the socket to it."""

    name = ""
    """What its errors call it."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket) -> None:
        self._process = process
        self._line = line

    async def receive(self, num_bytes: int) -> bytearray:
        """Return so many bytes of its answer. Raises OSError or EOFError at its end."""
        loop, data, at = asyncio.get_running_loop(), bytearray(num_bytes), 0
        view = memoryview(data)
        while at < num_bytes:
            num_received = await loop.sock_recv_into(self._line, view[at:])
            if not num_received:
                raise EOFError(f"the {self.name} process closed its socket")
            at += num_received
        return data

    async def end(self) -> None:
        """Kill the process and wait for its exit."""
        self._line.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, _REAP_TIMEOUT_S)


class _Child(BodyProcess):
    """A parser process."""

    name = "parser"

    @classmethod
    async def start(cls, arguments: Sequence[str]) -> _Child:
        """Start a parser process. It starts on a thread, because forking a large process is slow."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            process = await asyncio.to_thread(spawn_on, theirs, [*_PARSER, *arguments])
        except OSError as error:
            ours.close()
            logger.warning("the parser process cannot be started", extra={"reason": str(error)})
            raise UnavailableError("large bodies cannot be parsed at the moment", code="no_parser") from error
        except BaseException:
            ours.close()
            raise
        return cls(process, ours)

    async def ask(self, index: int, raw: bytes) -> bytes:
        """Send a body, with its `index` for the HEAD. Return the answer. Raises OSError or EOFError at its end."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._line, HEAD.pack(index, len(raw)))
        await loop.sock_sendall(self._line, raw)
        _, num_bytes = HEAD.unpack(await self.receive(HEAD.size))
        return bytes(await self.receive(num_bytes))


def spawn_on(line: socket.socket, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process whose stdin is `line`, and close the gateway's copy of it.

    Both happen on one thread. If the caller closed the copy after a cancellation, its descriptor could belong to a
    client's connection by the time of the fork, and the process would inherit that.
    """
    with line:
        environment = os.environ | {"RUST_BACKTRACE": "0"}
        return subprocess.Popen(command, stdin=line.fileno(), env=environment)


# From an HTTP request to a GenerationRequest.

KEY_HEADER = "idempotency-key"
MAX_KEY_CHARS = 200
"""Longest idempotency key in characters. A job's key may be longer, because it adds the number of the prompt."""
AFTER = "after"
LAST_EVENT_HEADER = "last-event-id"
"""Query parameter and browser header with the id of the last received event. The caller sends either one with the same
body as before, and the stream continues after that event."""
MAX_NUMBER_DIGITS = 9
EVENT_IDS_HEADER = "x-penstock-event-ids"
"""Request header that asks for event ids: "true" or "false". `stream_options.include_event_ids` precedes it."""
EVENT_IDS_OPTION = "include_event_ids"
PARSED_BODY = "penstock.parsed_body"
"""ASGI extension with the body of a WebSocket's request: a ParsedBody, or the error to raise."""
_TRUTH = {"true": True, "false": False}

AnyParsed = TypeVar("AnyParsed")


class RequestReader:
    """Reads the requests of a gateway: their bodies within its limits of size, time and memory, and their headers."""

    def __init__(self, settings: GatewaySettings, parser: Parser, budgets: BodyBudgets) -> None:
        """`budgets`: those that the gateway's metrics show."""
        self._settings = settings
        self._parser = parser
        self._budgets = budgets

    async def read(self, request: Request, schema: type[RequestBody]) -> ParsedBody:
        """Read and check the request's body. The body of a message has been parsed with the message."""
        async with self.held(request, schema) as body:
            return body

    @asynccontextmanager
    async def held(self, request: Request, schema: type[RequestBody]) -> AsyncIterator[ParsedBody]:
        """Read a body as `read` does, and keep the memory that was claimed for it in the block."""
        async with self._held(request, partial(self._parser.parse, schema)) as body:
            yield body

    @asynccontextmanager
    async def held_one_or_list(
        self, request: Request, schema: type[RequestBody]
    ) -> AsyncIterator[ParsedBody | list[ListItem]]:
        """Read a body, or a list of bodies, and keep the memory that was claimed for it in the block."""

        async def parsed(raw: bytes, owner: str) -> ParsedBody | list[ListItem]:
            if is_list(raw):
                return await self._parser.parse_list(schema, raw, owner)
            return await self._parser.parse(schema, raw, owner)

        async with self._held(request, parsed) as body:
            yield body

    @asynccontextmanager
    async def _held(
        self, request: Request, parse: Callable[[bytes, str], Awaitable[AnyParsed]]
    ) -> AsyncIterator[ParsedBody | AnyParsed]:
        # Remove it from the scope, which would otherwise keep it in memory until the end of the answer.
        parsed: ParsedBody | PenstockError | None = request.scope.get("extensions", {}).pop(PARSED_BODY, None)
        if isinstance(parsed, PenstockError):
            raise parsed
        if parsed is not None:
            yield parsed
            return
        owner = caller_of(request).tenant
        memory = BodyMemory(self._budgets, owner)
        try:
            max_bytes, timeout_s = self._settings.max_body_bytes, self._settings.body_timeout_s
            raw = await read_json_body(request, memory, max_bytes=max_bytes, timeout_s=timeout_s)
            found = await parse(raw, owner)
            del raw
            yield found
        finally:
            memory.release()

    async def small_json(self, request: Request) -> bytes:
        """Read the bytes of a JSON body, empty or valid, that has at most FREE_BODY_BYTES."""
        memory = BodyMemory(self._budgets, caller_of(request).tenant)
        try:
            limit_s = self._settings.body_timeout_s
            return json_or_empty(await read_json_body(request, memory, max_bytes=FREE_BODY_BYTES, timeout_s=limit_s))
        finally:
            memory.release()

    def message_memory(self, tenant: str) -> AbstractAsyncContextManager[Claim]:
        """Return the memory of one message of a WebSocket, for the duration of a block."""
        return self._budgets.large.taken(tenant)

    def generation_of(self, request: Request, body: ParsedBody) -> GenerationRequest:
        """Combine the caller, the headers and the body into one GenerationRequest.

        Raises RequestError for invalid headers and ForbiddenError for a priority class above the caller's.
        """
        caller = caller_of(request)
        if caller.models:
            body = replace(body, model=caller.model_of(body.model))
        key, cut_at = idempotency_key_of(request), stream_position_of(request, body)
        if body.task is None and (default := self._settings.token_durability) is not None:
            body = replace(body, queueing={"token_durability": default, **body.queueing})
        owner = "this API key" if caller.key_id else "this gateway while it has no API keys (open_highest_class)"
        return GenerationRequest(
            body,
            {
                "priority": allowed_class(
                    body.priority, caller.highest_class, owner, default_class(body.in_background)
                ),
                "tenant": caller.tenant,
                "terms": caller.metered_terms,
                "hides_models": bool(caller.models),
                "lower_max_tokens": self._settings.max_tokens_beyond_context == "lower",
                "idempotency_key": key,
            },
            cut_at,
            _wants_event_ids(request, body, may_resume=key is not None or cut_at is not None),
        )


def caller_of(request: Request) -> ApiKey:
    """Return the caller of an authenticated request."""
    caller: ApiKey = request.state.caller
    return caller


def idempotency_key_of(request: Request) -> str | None:
    """Return the caller's idempotency key, or None. Raises RequestError for a key of the wrong length."""
    key = request.headers.get(KEY_HEADER)
    if key is not None and not 1 <= len(key) <= MAX_KEY_CHARS:
        raise RequestError(f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters", param=KEY_HEADER)
    return key


def stream_position_of(request: Request, body: ParsedBody) -> StreamPosition | None:
    """Return the position after which to resume the caller's stream, or None for a new request.

    Raises RequestError for an invalid event id, and for a request that cannot be resumed.
    """
    event_id = request.query_params.get(AFTER) or request.headers.get(LAST_EVENT_HEADER)
    if not event_id:
        return None
    job_id, *numbers = event_id.removesuffix(FIRST_OF_TWO).split(":")
    if (
        not is_job_id(job_id)
        or len(numbers) != 2
        or not all(number.isdecimal() and len(number) <= MAX_NUMBER_DIGITS for number in numbers)
    ):
        raise RequestError("after: an event id has the form <job>:<chunk>:<tokens>", param=AFTER)
    if not body.stream or len(body.prompts) != 1:
        raise RequestError("after: only a streaming request with one prompt can be resumed", param=AFTER)
    index, num_tokens = map(int, numbers)
    return StreamPosition(job_id, index, num_tokens, lacks_end=event_id.endswith(FIRST_OF_TWO))


def _wants_event_ids(request: Request, body: ParsedBody, *, may_resume: bool) -> bool:
    """Return whether the events of the answer have ids. `may_resume`: the request shows that its caller resumes."""
    wanted = body.options.get(EVENT_IDS_OPTION)
    if wanted is not None:
        return bool(wanted)
    header = request.headers.get(EVENT_IDS_HEADER)
    if header is None:
        return may_resume
    if header.lower() not in _TRUTH:
        raise RequestError("X-Penstock-Event-Ids must be true or false", param=EVENT_IDS_HEADER)
    return _TRUTH[header.lower()]
