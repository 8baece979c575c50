"""`python -m hostile.attacker NAME URL KEY MODEL SECONDS` runs one attack, and prints the answers that it got.

It begins when a line on stdin names the last event that another tenant's stream has received.

It is a process at the lowest priority, so that the work for its own requests and answers is not measured.
HOSTILE_ATTACKER_NICE=0 runs it at the usual priority, for runs without measurements.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

JSON = "application/json"
PATIENCE_S = 150.0


@dataclass
class Attacker:
    """Sends requests for a tenant and counts the answers by status and the field or code that they name."""

    url: str
    key: str
    model: str
    until_s: float
    """Of the monotonic clock; an attack sends nothing new after it."""
    foreign_place: str = ""
    """The id of an event of another tenant's stream."""
    answers: Counter[str] = field(default_factory=Counter)
    samples: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether the attack's time has passed."""
        return time.monotonic() >= self.until_s

    def rounds(self) -> Iterator[None]:
        """Yield rounds until the time is over, at least one even if a busy machine starts the attack late."""
        yield
        while not self.is_over:
            yield

    @property
    def authorization(self) -> dict[str, str]:
        """The Authorization header with the attacker's key."""
        return {"authorization": f"Bearer {self.key}"}

    def http(self, **options: Any) -> httpx.AsyncClient:
        """Return an HTTP client with the attacker's key and any number of connections."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        usual = {"base_url": self.url, "headers": self.authorization, "timeout": PATIENCE_S, "limits": limits}
        return httpx.AsyncClient(**{**usual, **options})

    def note(self, label: str, sample: str = "") -> None:
        """Count one answer."""
        self.answers[label] += 1
        self.samples.setdefault(label, sample[:300])

    async def post(
        self, http: httpx.AsyncClient, body: Any, *, chat: bool = False, headers: dict[str, str] | None = None
    ) -> bytes:
        """Send one request and read its answer. A body that is not bytes is sent as JSON, with the model's name."""
        raw = (
            body
            if isinstance(body, bytes)
            else json.dumps({"model": self.model, **body}, separators=(",", ":")).encode()
        )
        path = "/v1/chat/completions" if chat else "/v1/completions"
        try:
            answer = await http.post(path, content=raw, headers={"content-type": JSON, **(headers or {})})
        except httpx.HTTPError as error:
            self.note(type(error).__name__)
            return b""
        self.num_bytes += len(answer.content)
        self.note(*label_of(answer.status_code, answer.content))
        return answer.content

    async def post_all(self, bodies: list[Any], *, at_once: int = 4, chat: bool = False, repeat: bool = False) -> None:
        """Send all requests, some concurrently. `repeat`: start again with the first until the time is over."""
        queue = list(reversed(bodies))

        async def lane(http: httpx.AsyncClient) -> None:
            for _ in self.rounds():
                if not queue:
                    if not repeat:
                        return
                    queue.extend(reversed(bodies))
                await self.post(http, queue.pop(), chat=chat)

        async with self.http() as http:
            await asyncio.gather(*(lane(http) for _ in range(at_once)))

    def connect(self) -> socket.socket:
        """Open a bare connection to the gateway."""
        place = urlsplit(self.url)
        return socket.create_connection((place.hostname or "", place.port or 0))

    def head(self, num_bytes: int, path: str = "/v1/completions") -> bytes:
        """Return the head of a request with a body of that size, without the final empty line."""
        lines = [f"POST {path} HTTP/1.1", "host: penstock", f"authorization: Bearer {self.key}"]
        return "\r\n".join([*lines, f"content-type: {JSON}", f"content-length: {num_bytes}", ""]).encode()


def label_of(status: int, content: bytes) -> tuple[str, str]:
    """Return a status with the error's field or code, and the error's text."""
    if content.startswith((b"data: ", b"id: ", b":")):
        at = content.rfind(b'data: {"error"')
        if at < 0:
            return f"{status} stream", ""
        error = json.loads(content[at + len(b"data: ") :].split(b"\n", 1)[0])["error"]
        return f"{status} stream failed: {error['param'] or error['code']}", error["message"]
    if status == 200:
        # Of a large answer its end is not parsed: that would take longer than all the rest.
        return ("200", "") if len(content) < 1 << 20 else ("200 large", "")
    try:
        error = json.loads(content)["error"]
        return f"{status} {error['param'] or error['code']}", str(error["message"])
    except (ValueError, KeyError, TypeError):
        return f"{status} without an error object", content[:200].decode(errors="replace")


Run = Callable[[Attacker], Awaitable[None]]


async def main(name: str, url: str, key: str, model: str, seconds: str) -> None:
    """Run one attack."""
    from hostile.attacks import ATTACKS

    # Python's start costs a second of a core: it is over before the attack begins.
    print("ready", flush=True)
    foreign_place = sys.stdin.readline().strip()
    began_s = time.monotonic()
    attacker = Attacker(url, key, model, began_s + float(seconds), foreign_place)
    try:
        async with asyncio.timeout(float(seconds) + ATTACKS[name].grace_s):
            await ATTACKS[name].run(attacker)
    except TimeoutError:
        attacker.note("no end within the time")
    got = {"answers": attacker.answers, "samples": attacker.samples, "bytes": attacker.num_bytes}
    print(json.dumps(got | {"figures": attacker.figures, "seconds": time.monotonic() - began_s}))


if __name__ == "__main__":
    os.nice(int(os.environ.get("HOSTILE_ATTACKER_NICE", "19")))
    asyncio.run(main(*sys.argv[1:]))
