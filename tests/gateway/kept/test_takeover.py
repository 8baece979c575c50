"""A gateway learns which slots are taken before it answers, and suspected answers take short turns."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.gateway.app import make_server
from penstock.gateway.http import takeover
from penstock.gateway.http.takeover import AnswerTakeover
from penstock.gateway.kept.connection import Keep
from penstock.gateway.kept.slots import memory_bytes
from penstock.gateway.settings import GatewaySettings
from penstock.runtime.kept_sockets import KEEP, READY, TAKEN, Inherited, receive_message, send_message

NUM_SLOTS = 4
REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_no_request_is_answered_before_the_kept_connections_have_arrived(redis_url: str) -> None:
    """Its answer took a slot that was one of those, or the place of the newest part of a stream: tokens were lost."""
    loop = asyncio.get_running_loop()
    keeper, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, theirs = socket.socketpair()
    slots = os.memfd_create("slots")
    os.ftruncate(slots, memory_bytes(NUM_SLOTS))
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    for one in (keeper, listener, client):
        one.setblocking(False)
    keep = Keep(Inherited(control.detach(), slots, NUM_SLOTS, (listener.fileno(),), os.getpid()))
    server = make_server(GatewaySettings.load(redis_url=redis_url, drain_s=1), keep)
    with keeper, ours, client:
        await loop.sock_sendall(client, REQUEST)
        task = asyncio.create_task(server.serve([listener]))
        await loop.sock_recv_into(keeper, message := bytearray(9))
        assert bytes(message[:1]) == READY
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.sock_recv(client, 1), 0.3)
        send_message(keeper, KEEP, 2, theirs.fileno())
        send_message(keeper, READY, 0)
        theirs.close()
        assert (await asyncio.wait_for(loop.sock_recv(client, 1000), 60)).startswith(b"HTTP/1.1 200")
        taken = receive_message(keeper)
        assert taken is not None and taken[0] == TAKEN
        server.should_exit = True
        with suppress(SystemExit):
            await task
    os.close(slots)


async def test_many_suspected_answers_take_their_turns_in_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waited for a turn of a quarter of a second: after two kills the last of 1,000 streams for minutes."""
    monkeypatch.setattr(takeover, "TURN_S", 60.0)
    monkeypatch.setattr(takeover, "TURNS_S", 0.2)
    monkeypatch.setattr(takeover, "keep_of", lambda _: SimpleNamespace(survive=lambda: None))
    answered: list[int] = []

    async def app(scope: Any, *_: Any) -> None:
        answered.append(scope["number"])

    unused: Any = None
    answers = AnswerTakeover(unused, unused, app, unused)
    slot: Any = SimpleNamespace(set_takeovers=lambda _: None)
    left: Any = SimpleNamespace(num_takeovers=1)
    answers._num_suspects = 50
    async with asyncio.timeout(30):
        await asyncio.gather(*(answers._answer(slot, left, {"number": at}, unused, unused) for at in range(50)))  # type: ignore[typeddict-item, typeddict-unknown-key, misc]
    assert answered == [*range(50)]
