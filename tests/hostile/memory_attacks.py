"""Attacks on the memory that answers and bodies of a gateway share: slow readers, and slow senders."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator

from hostile import payloads as p
from hostile.attacker import JSON, Attacker
from hostile.catalogue import attack

RESPONSES = "/v1/responses"
NUM_READERS = 30
NUM_SENDERS = 40
_RECEIVE_BYTES = 4096
_READ_BYTES = 64
_STEP_S = 0.5


def large_response(model: str, **fields: object) -> bytes:
    """Return the body of a response whose record has 7 MB: items outside the prompt, and a repeated member."""
    thoughts = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t" * (4 << 20)}]}
    items = [thoughts, {"role": "user", "content": "Say"}]
    return p.as_body(model, input=items, user="u" * (3 << 20), max_output_tokens=2, **fields)


async def read_slowly(a: Attacker, head: str, body: bytes = b"") -> None:
    """Send a request, read a few bytes of the answer from time to time, and count the answer by its status."""
    connection = a.connect()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    reader, writer = await asyncio.open_connection(sock=connection, limit=_READ_BYTES)
    lines = [head, "host: penstock", f"authorization: Bearer {a.key}", f"content-type: {JSON}"]
    writer.write("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body)
    status = "waiting"
    with contextlib.suppress(TimeoutError, OSError, EOFError):
        async with asyncio.timeout(a.until_s - time.monotonic()):
            status = (await reader.readexactly(len("HTTP/1.1 200")))[-3:].decode()
            while True:
                await asyncio.sleep(_STEP_S)
                await reader.readexactly(_READ_BYTES)
    a.note(status)
    writer.transport.abort()


async def stored_response(a: Attacker) -> str:
    """Return the id of a stored response with a large record."""
    async with a.http() as http:
        answer = await http.post(RESPONSES, content=large_response(a.model), headers={"content-type": JSON})
        return str(answer.json()["id"])


@attack("30 slow readers of responses with records of 7 MB, and of their input", seconds=15.0)
async def record_readers(a: Attacker) -> None:
    path = f"{RESPONSES}/{await stored_response(a)}"
    paths = (path, f"{path}?stream=true", f"{path}/input_items")
    heads = [f"GET {paths[number % len(paths)]} HTTP/1.1" for number in range(NUM_READERS)]
    await asyncio.gather(*(read_slowly(a, head) for head in heads))


@attack("30 slow readers of events of 3 MB, as lines of NDJSON", seconds=15.0)
async def large_lines(a: Attacker) -> None:
    head = f"GET {RESPONSES}/{await stored_response(a)}?stream=true HTTP/1.1\r\naccept: application/x-ndjson"
    await asyncio.gather(*(read_slowly(a, head) for _ in range(NUM_READERS)))


@attack("30 slow readers of streams that repeat 3 MB of a request of 7 MB, not stored", seconds=25.0)
async def repeated_requests(a: Attacker) -> None:
    body = large_response(a.model, stream=True, store=False)
    await asyncio.gather(*(read_slowly(a, f"POST {RESPONSES} HTTP/1.1", body) for _ in range(NUM_READERS)))


@attack("40 bodies of unknown length that stop after 100 KB; beside them, short ones of the same key", seconds=15.0)
async def slow_bodies(a: Attacker) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {a.key}\r\n"
    head += f"content-type: {JSON}\r\ntransfer-encoding: chunked\r\n\r\n"
    connections = [a.connect() for _ in range(NUM_SENDERS)]
    for connection in connections:
        connection.sendall(head.encode() + b"%x\r\n%b\r\n" % (100_000, b" " * 100_000))

    async def parts() -> AsyncIterator[bytes]:
        yield json.dumps({"model": a.model, "prompt": "Say", "max_tokens": 1}).encode()

    longest_s = 0.0
    async with a.http() as http:
        while not a.is_over:
            began_s = time.monotonic()
            answer = await http.post("/v1/completions", content=parts(), headers={"content-type": JSON})
            a.note(str(answer.status_code))
            longest_s = max(longest_s, time.monotonic() - began_s)
            await asyncio.sleep(_STEP_S)
    a.figures["longest s of a short body of unknown length"] = longest_s
    for connection in connections:
        connection.close()
