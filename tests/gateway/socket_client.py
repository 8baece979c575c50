"""A client of the gateway's WebSocket, for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.gateway.conftest import MODEL

TIMEOUT_S = 60.0
Message = dict[str, Any]


def address_of(url: str) -> str:
    """The address of the WebSocket of the gateway at `url`."""
    return url.replace("http", "ws", 1) + "/v1/stream"


class SocketClient:
    """Sends and receives messages as JSON."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def send(self, kind: str, tag: str, **members: Any) -> None:
        self.connection.send(json.dumps({"type": kind, "id": tag, **members}))

    def submit(self, tag: str, prompt: str, *, path: str = "/v1/completions", **members: Any) -> None:
        """Submit a prompt, in the shape that the path takes."""
        forms: dict[str, dict[str, Any]] = {
            "/v1/jobs": {"prompt": prompt},
            "/v1/completions": {"prompt": prompt, "max_tokens": 250},
            "/v1/responses": {"input": prompt},
        }
        form = forms.get(path, {"messages": [{"role": "user", "content": prompt}], "max_tokens": 250})
        self.send("submit", tag, path=path, body={"model": MODEL, **form, **members.pop("body", {})}, **members)

    def receive(self) -> Message:
        message: Message = json.loads(self.connection.recv(timeout=TIMEOUT_S))
        return message

    def until(self, is_last: Callable[[Message], bool]) -> list[Message]:
        """The messages up to the first one that is the last."""
        found = [self.receive()]
        while not is_last(found[-1]):
            found.append(self.receive())
        return found

    def until_end_of(self, *tags: str) -> dict[str, list[Message]]:
        """The messages about each of these streams, to their ends."""
        found: dict[str, list[Message]] = {tag: [] for tag in tags}
        while not all(messages and is_end(messages[-1]) for messages in found.values()):
            message = self.receive()
            assert not is_end((found[message["id"]] or [{}])[-1]), "a message after the end"
            found[message["id"]].append(message)
        return found

    def end_of(self, tag: str) -> list[Message]:
        """The messages about one stream, to its end."""
        return self.until_end_of(tag)[tag]


def is_end(message: Message) -> bool:
    return message.get("type") in ("end", "error", "refused")


def data_of(messages: list[Message]) -> list[dict[str, Any]]:
    """The events among the messages."""
    return [message["data"] for message in messages if message["type"] == "event"]


def text_of(messages: list[Message]) -> str:
    """The text of a stream of chunks or of a completion."""
    events = data_of(messages)
    return "".join(data["choices"][0]["text"] if "choices" in data else data.get("text", "") for data in events)


@contextmanager
def socket_to(url: str, **options: Any) -> Iterator[SocketClient]:
    """A WebSocket to the gateway at `url`."""
    with connect(address_of(url), max_size=None, compression=None, **options) as connection:
        yield SocketClient(connection)


def status_of_refusal(url: str, **options: Any) -> tuple[int, str]:
    """The status and the code with which the gateway refuses a WebSocket."""
    with pytest.raises(InvalidStatus) as caught, socket_to(url, **options):
        pass
    response = caught.value.response
    return response.status_code, json.loads(response.body or b"")["error"]["code"]
