"""The reader of streams counts chunks and tokens however bytes are split, and does not count errors as answers."""

from __future__ import annotations

import asyncio
import json

import pytest
from bench.engines.sse import AnswerError, stream

CHUNK = {"choices": [{"index": 0, "text": 'a "quoted"\nline'}], "usage": None}
LAST = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 5}}
PING = ": ping\n\n"


def event(content: dict[str, object]) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def answer(body: str, *, status: str = "200 OK", cut: int = 7) -> tuple[int, int]:
    """Return what the reader counts in a body that arrives in HTTP chunks of `cut` bytes."""
    seen = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        asked = json.loads(await reader.readexactly(length))
        assert asked["stream"] and asked["prompt"] == [1, 2]
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode())
        content = body.encode()
        for start in range(0, len(content), cut):
            piece = content[start : start + cut]
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    def count() -> None:
        nonlocal seen
        seen += 1

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await stream("127.0.0.1", port, {"prompt": [1, 2]}, count), seen


@pytest.mark.parametrize("cut", [1, 7, 64, 100_000])
async def test_chunks_and_tokens_are_counted_however_the_bytes_are_cut(cut: int) -> None:
    body = PING + event(CHUNK) * 3 + PING + event(LAST) + "data: [DONE]\n\n"
    assert await answer(body, cut=cut) == (5, 3)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (event(CHUNK) + "data: [DONE]\n\n", "200 OK"),
        (event(CHUNK) + event({"error": {"message": "it broke"}}), "200 OK"),
        ('{"error": {"message": "busy"}}', "429 Too Many Requests"),
    ],
)
async def test_a_stream_without_usage_and_an_error_raise(body: str, status: str) -> None:
    with pytest.raises(AnswerError):
        await answer(body, status=status)
