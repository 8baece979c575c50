"""The keeper of a gateway holds its connections, gives them to the next one, and ends those that none takes."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from penstock.cli import keeper as module
from penstock.cli.keeper import ConnectionKeeper
from penstock.cli.processes import BackOff, ChildCommand
from penstock.contract.errors import ConfigError
from penstock.gateway.kept.connection import Keep
from penstock.gateway.kept.holder import send_connections
from penstock.gateway.kept.slots import AnswerSlot, memory_bytes
from penstock.runtime.kept_sockets import KEEPER_VARIABLE, READY, Inherited, receive_message, send_message

COMMAND = ChildCommand("gateway", ("gateway",), {"A": "b"}, 1.0)


@asynccontextmanager
async def opened(num_slots: int = 4) -> AsyncIterator[ConnectionKeeper]:
    keeper = ConnectionKeeper([socket.create_server(("127.0.0.1", 0))], os.memfd_create("slots"), num_slots)
    os.ftruncate(keeper._slots, memory_bytes(num_slots))
    try:
        yield keeper
    finally:
        keeper.close()


def gateway_of(keeper: ConnectionKeeper) -> Keep:
    """Return the side of a gateway that was just started, whose descriptors are its own."""
    inherited = Inherited.of_environment(keeper.command_of(COMMAND).env)
    assert inherited is not None
    own = os.dup(inherited.control)
    keep = Keep(replace(inherited, control=own, holder=os.getpid()))
    keep.slots.connections.forget_all()
    keeper.next_exists()
    keeper.start_next()
    return keep


def end(keep: Keep) -> None:
    """Do what the holder of a gateway does when the gateway has ended."""
    if keep._control is not None:
        send_connections(keep._control.fileno(), keep.slots.connections)
        keep._lose_keeper()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    client.settimeout(10)
    yield client, ours
    client.close()
    ours.close()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0.01)


async def test_a_connection_moves_to_the_next_gateway(pair):
    client, ours = pair
    async with opened() as keeper:
        first = gateway_of(keeper)
        assert await first.kept_before() == ([], 0)
        slot = first.hold(ours.fileno())
        assert isinstance(slot, AnswerSlot)
        await turns()
        assert keeper.num_kept == 0
        end(first)
        ours.close()
        keeper.gateway_ended()
        assert keeper.num_kept == 1
        client.sendall(b"still open")
        second = gateway_of(keeper)
        ((number, descriptor),), ended_ns = await second.kept_before()
        assert number == slot.number and ended_ns > 0
        await turns()
        assert keeper.num_kept == 0 and second.slots.connections.found() == {number: descriptor}
        (taken,) = second.slots.taken([number])
        with socket.socket(fileno=descriptor) as again:
            assert again.recv(20) == b"still open"
            again.sendall(b"answer")
            assert client.recv(20) == b"answer"
        second.num_kept += 1
        second.drop(taken)
        assert client.recv(1) == b"" and second.slots.connections.found() == {}
        end(second)


async def test_a_gateway_that_dies_before_it_has_the_connections_leaves_them_to_the_next_one(pair):
    client, ours = pair
    async with opened() as keeper:
        first = gateway_of(keeper)
        assert isinstance(first.hold(ours.fileno()), AnswerSlot)
        end(first)
        ours.close()
        keeper.gateway_ended()
        second = gateway_of(keeper)
        assert second._control is not None
        send_message(second._control, READY)
        await turns()
        end(second)
        keeper.gateway_ended()
        assert keeper.num_kept == 1
        third = gateway_of(keeper)
        ((_, descriptor),), _ = await third.kept_before()
        with socket.socket(fileno=descriptor) as again:
            again.sendall(b"answer")
            assert client.recv(20) == b"answer"
        third.slots.connections.forget_all()
        end(third)


async def test_connections_that_no_gateway_takes_end(pair, monkeypatch):
    client, ours = pair
    monkeypatch.setattr(module, "KEEP_S", 0.05)
    async with opened() as keeper:
        keep = gateway_of(keeper)
        assert isinstance(keep.hold(ours.fileno()), AnswerSlot)
        end(keep)
        ours.close()
        keeper.gateway_ended()
        assert keeper.num_kept == 1
        await asyncio.sleep(0.2)
        assert keeper.num_kept == 0 and client.recv(1) == b""


async def test_the_stop_of_the_command_ends_no_connection_of_the_gateway(pair):
    client, ours = pair
    async with opened() as keeper:
        keep = gateway_of(keeper)
        await keep.kept_before()
        slot = keep.hold(ours.fileno())
        assert isinstance(slot, AnswerSlot)
        await turns()
    await turns()
    assert not keep.is_alive and keep.hold(ours.fileno()) == "no_keeper"
    ours.sendall(b"goes on")
    assert client.recv(20) == b"goes on"


async def test_more_connections_than_slots_are_not_kept(pair):
    _, ours = pair
    async with opened(num_slots=1) as keeper:
        keep = gateway_of(keeper)
        slot = keep.hold(ours.fileno())
        assert isinstance(slot, AnswerSlot) and keep.hold(ours.fileno()) == "too_many_connections"
        keep.drop(slot)
        assert isinstance(keep.hold(ours.fileno()), AnswerSlot)
        keep.slots.connections.forget_all()
        end(keep)


async def test_without_a_holder_no_connection_is_kept(pair):
    _, ours = pair
    async with opened() as keeper:
        keep = gateway_of(keeper)
        keep._holder = 0
        assert keep.hold(ours.fileno()) == "no_holder"
        end(keep)


async def test_a_gateway_is_asked_to_leave():
    async with opened() as keeper:
        keep = gateway_of(keeper)
        asked = asyncio.Event()
        keep.on_leave = asked.set
        await keep.kept_before()
        keeper.leave()
        await asyncio.wait_for(asked.wait(), 10)
        assert keeper.is_leaving
        end(keep)


async def test_a_taken_address_is_refused_with_its_name():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            await ConnectionKeeper.open("127.0.0.1", port)


def test_the_command_names_what_the_gateway_inherits():
    inherited = Inherited(3, 4, 100, (5, 6))
    assert Inherited.of_environment(inherited.variable) == inherited
    assert inherited.descriptors == (3, 4, 5, 6) and Inherited.of_environment({KEEPER_VARIABLE: ""}) is None


def test_a_gateway_starts_again_at_once_unless_it_ends_again_and_again():
    back_off = BackOff(first_pause_s=0.0, steady_s=3.0)
    assert [back_off.pause_s(0.1) for _ in range(4)] == [0.0, 0.5, 1.0, 2.0]
    assert back_off.pause_s(5.0) == 0.0


def test_a_message_without_its_descriptor_is_read():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.close()
        assert receive_message(ours) is None
