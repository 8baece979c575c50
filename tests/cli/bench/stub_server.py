"""An OpenAI-compatible streaming server with known delays, token counts and faults."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

Fault = Literal["", "429", "drop", "cut", "error_event", "no_end", "not_json", "hang", "until_closed"]
NUM_PROBES = 2
TOKENS_PER_WORD, TEMPLATE_TOKENS = 2, 7


@dataclass
class StubServer:
    """Streams `max_tokens` tokens: the first after `ttft_s`, each further event after `itl_s`."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    tokens_per_event: int = 1
    usage: Literal["at the end", "in each event", "none"] = "at the end"
    newline: bytes = b"\n"
    is_streamed: bool = True
    refuses_stream_options: bool = False
    requires_key: bool = False
    faults: dict[int, Fault] = field(default_factory=dict)
    """Of requests after the probes, by their number."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    port: int = 0
    times_s: list[tuple[float, float]] = field(default_factory=list)
    """When the first and the last event of each answer really left, after the request came."""
    gaps_s: list[float] = field(default_factory=list)
    """Between two events of an answer, as they really left."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def load(self) -> list[dict[str, Any]]:
        """The bodies after those of the probes."""
        return self.bodies[NUM_PROBES:]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._answer(reader, writer):
                pass

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /v1/models ") and self.requires_key:
            self._whole(writer, "401 Unauthorized", {"error": {"message": "no API key"}})
            return True
        if head.startswith("GET /v1/models "):
            self._whole(writer, "200 OK", {"data": [{"id": "stub"}, {"id": "other"}]})
            return True
        lengths = [line for line in head.split("\r\n") if line.startswith("Content-Length: ")]
        body = json.loads(await reader.readexactly(int(lengths[0].partition(": ")[2])))
        if self.refuses_stream_options and "stream_options" in body:
            self._whole(writer, "400 Bad Request", {"error": {"message": "stream_options: unknown"}})
            return True
        fault = self.faults.get(len(self.bodies) - NUM_PROBES, "")
        self.bodies.append(body)
        self.heads.append(head)
        if fault == "429":
            self._whole(writer, "429 Too Many Requests", {"error": {"message": "too busy", "code": "busy"}})
            return True
        if fault == "hang":
            await asyncio.sleep(60)
        if fault == "drop":
            return False
        if not self.is_streamed:
            self._whole(writer, "200 OK", {"choices": [_choice("all", "stop")], "usage": self._usage(body, 5)})
            return True
        return await _Stream(self, writer, body, fault).write()

    def _whole(self, writer: asyncio.StreamWriter, status: str, fields: dict[str, Any]) -> None:
        body = json.dumps(fields).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    def _usage(self, body: dict[str, Any], num_tokens: int) -> dict[str, int]:
        prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        num_prompt = TOKENS_PER_WORD * len(prompt.split()) + TEMPLATE_TOKENS
        return {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}


class _Stream:
    def __init__(self, server: StubServer, writer: asyncio.StreamWriter, body: dict[str, Any], fault: Fault) -> None:
        self._server, self._writer, self._body, self._fault = server, writer, body, fault
        self._is_chunked = fault != "until_closed"

    async def write(self) -> bool:
        """Return whether the connection may be used again."""
        server, loop, num_tokens = self._server, asyncio.get_running_loop(), self._body["max_tokens"]
        framing = "Transfer-Encoding: chunked\r\n" if self._is_chunked else "Connection: close\r\n"
        self._writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n".encode())
        start_s = loop.time()
        at_s, left_s, num_sent = start_s + server.ttft_s, list[float](), 0
        while num_sent < num_tokens:
            await asyncio.sleep(max(0.0, at_s - loop.time()))
            at_s += server.itl_s
            left_s.append(loop.time() - start_s)
            num_sent = min(num_tokens, num_sent + server.tokens_per_event)
            self._event(self._token_event(num_sent, num_sent == num_tokens))
            if num_sent >= 2 and self._fault in ("cut", "error_event", "not_json"):
                return self._break()
        server.times_s.append((left_s[0], loop.time() - start_s))
        server.gaps_s += [later - earlier for earlier, later in pairwise(left_s)]
        if self._fault == "no_end":
            self._chunk(b"")
            return True
        if server.usage == "at the end" and "stream_options" in self._body:
            self._event({"choices": [], "usage": server._usage(self._body, num_tokens)})
        self._data(b"[DONE]")
        if self._is_chunked:
            self._chunk(b"")
        return self._is_chunked

    def _token_event(self, num_sent: int, is_last: bool) -> dict[str, Any]:
        reason = "length" if is_last and self._fault != "no_end" else None
        event: dict[str, Any] = {"choices": [_choice("x " * self._server.tokens_per_event, reason)]}
        if self._server.usage == "in each event":
            event["usage"] = self._server._usage(self._body, num_sent)
        return event

    def _break(self) -> bool:
        if self._fault == "error_event":
            self._event({"error": {"message": "the node is gone", "type": "server_error", "code": "node_lost"}})
        elif self._fault == "not_json":
            self._data(b"{oops")
        else:
            return False
        self._chunk(b"")
        return True

    def _event(self, fields: dict[str, Any]) -> None:
        self._data(json.dumps(fields).encode())

    def _data(self, data: bytes) -> None:
        newline = self._server.newline
        self._chunk(b": a comment" + newline + b"event: x" + newline + b"data: " + data + newline * 2)

    def _chunk(self, data: bytes) -> None:
        self._writer.write(b"%x\r\n%s\r\n" % (len(data), data) if self._is_chunked else data)


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text}, "text": text, "finish_reason": finish_reason}


@contextmanager
def running(server: StubServer) -> Iterator[StubServer]:
    """Run the server on its own thread."""
    listening = threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=1024)
        server.port = listener.sockets[0].getsockname()[1]
        listening.set()
        async with listener:
            await stop.wait()

    def run() -> None:
        # Ends the tasks of open connections, which close them.
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert listening.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
