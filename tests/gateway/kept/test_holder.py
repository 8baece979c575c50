"""The holder of a real process has its connections when that process is killed, and sends those that have a slot."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fakes.waiting import wait_until

from penstock.gateway.kept.slots import ConnectionTable, mapped, memory_bytes
from penstock.runtime.kept_sockets import KEEP, Inherited, receive_message

NUM_SLOTS = 2000
GATEWAY = """
import os, signal, socket, sys, threading, time
from penstock.gateway.kept.holder import begin_to_hold, start_holder
from penstock.gateway.kept.slots import ConnectionTable, mapped
from penstock.runtime.kept_sockets import Inherited
signal.signal(signal.SIGTERM, lambda *_: None)
start_holder()
inherited = Inherited.of_environment()
if "begins" in sys.argv:
    begin_to_hold(inherited)
table = ConnectionTable(mapped(inherited.slots, inherited.num_slots), inherited.num_slots)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
listener = socket.create_server(("127.0.0.1", 0))
print(inherited.holder, listener.getsockname()[1], flush=True)
accepted = []
for line in sys.stdin:
    what, number = line.split()
    if what == "accept":
        connection, _ = listener.accept()
        connection.sendall(b"hello")
        accepted.append(connection)
        if int(number) >= 0:
            table.note(int(number), connection.fileno())
    elif what == "forget":
        table.forget(int(number))
    elif what == "exit":
        os._exit(0)
    print("done", flush=True)
"""


class Gateway:
    """A process that accepts connections as it is told, with a holder."""

    def __init__(self, control: socket.socket, slots: int, *, begins: bool) -> None:
        inherited = Inherited(control.fileno(), slots, NUM_SLOTS, (0,))
        self.process = subprocess.Popen(
            [sys.executable, "-c", GATEWAY, *(["begins"] if begins else [])],
            env={**os.environ, **inherited.variable},
            pass_fds=(control.fileno(), slots),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.clients: list[socket.socket] = []
        self.holder, self.port = map(int, self._line().split())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def told(self, what: str, number: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {number}\n")
        self.process.stdin.flush()
        assert what == "exit" or self._line() == "done\n"

    def client(self, slot: int) -> socket.socket:
        """Return the client's end of a connection in a slot; -1: in none."""
        client = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        self.clients.append(client)
        self.told("accept", slot)
        assert client.recv(5) == b"hello"
        return client

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(30) == -signal.SIGKILL


@contextmanager
def started(*, begins: bool = True) -> Iterator[tuple[Gateway, socket.socket, int]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    slots = os.memfd_create("slots")
    os.ftruncate(slots, memory_bytes(NUM_SLOTS))
    ours.settimeout(30)
    gateway = Gateway(theirs, slots, begins=begins)
    theirs.close()
    try:
        yield gateway, ours, slots
    finally:
        gateway.process.kill()
        with gateway.process:
            gateway.process.wait(30)
        for client in gateway.clients:
            client.close()
        ours.close()
        os.close(slots)


def sent(control: socket.socket) -> dict[int, socket.socket]:
    """Return the connections that arrive, until the other end closes."""
    found: dict[int, socket.socket] = {}
    while (message := receive_message(control)) is not None:
        kind, number, descriptor = message
        assert kind == KEEP and descriptor is not None
        found[number] = socket.socket(fileno=descriptor)
    return found


def check_goes_on(kept: socket.socket, client: socket.socket) -> None:
    """Check that bytes reach the client, and close the connection."""
    kept.sendall(b"goes on")
    assert client.recv(20) == b"goes on"
    kept.close()


def test_connections_with_a_slot_outlive_a_kill_and_all_others_end() -> None:
    with started() as (gateway, control, slots):
        kept, plain, left = gateway.client(7), gateway.client(-1), gateway.client(9)
        gateway.told("forget", 9)
        gateway.kill()
        found = sent(control)
        assert list(found) == [7]
        assert plain.recv(1) == b"" and left.recv(1) == b""
        assert ConnectionTable(mapped(slots, NUM_SLOTS), NUM_SLOTS).found() == {}
        check_goes_on(found[7], kept)
        assert kept.recv(1) == b""


def test_a_connection_that_the_gateway_closes_ends_at_once() -> None:
    with started() as (gateway, control, _):
        client = gateway.client(3)
        gateway.told("forget", 3)
        gateway.told("exit", 0)
        assert sent(control) == {} and client.recv(1) == b""


def test_a_gateway_that_exits_by_itself_leaves_its_connections() -> None:
    with started() as (gateway, control, _):
        client = gateway.client(0)
        gateway.told("exit", 0)
        found = sent(control)
        check_goes_on(found[0], client)


def test_signals_to_the_group_of_the_gateway_do_not_reach_its_holder() -> None:
    with started() as (gateway, control, _):
        client = gateway.client(5)
        for number in (signal.SIGTERM, signal.SIGHUP):
            os.kill(gateway.holder, number)
        os.killpg(gateway.process.pid, signal.SIGKILL)
        found = sent(control)
        check_goes_on(found[5], client)


def test_more_connections_arrive_than_the_socket_to_the_keeper_has_room_for() -> None:
    with started() as (gateway, control, _):
        clients = [gateway.client(number) for number in range(400)]
        gateway.kill()
        time.sleep(0.2)
        found = sent(control)
        assert sorted(found) == [*range(400)]
        for number, client in enumerate(clients):
            found[number].sendall(b"%d" % number)
            assert client.recv(20) == b"%d" % number
            found[number].close()


def test_a_holder_without_a_keeper_ends() -> None:
    with started() as (gateway, control, _):
        client = gateway.client(5)
        control.close()
        gateway.kill()
        assert client.recv(1) == b""


def test_a_holder_ends_with_its_gateway_and_is_small() -> None:
    with started() as (gateway, control, _):
        status = wait_until(
            lambda: Path(f"/proc/{gateway.holder}/status").read_text(),
            lambda one: "Name:\tgateway-holder\n" in one,
            within_s=30,
        )
        resident_kib = int(status.partition("VmRSS:")[2].split()[0])
        assert resident_kib < 64 << 10
        gateway.kill()
        assert sent(control) == {}


def test_a_gateway_on_standby_sends_no_connection_of_the_gateway_that_serves() -> None:
    with started(begins=False) as (gateway, control, slots):
        table = ConnectionTable(mapped(slots, NUM_SLOTS), NUM_SLOTS)
        table.note(3, 0)  # Of the gateway that serves.
        gateway.kill()
        assert sent(control) == {} and table.found() == {3: 0}


def test_a_process_without_a_keeper_has_no_holder() -> None:
    code = "from penstock.gateway.kept.holder import start_holder; start_holder()"
    code += "; print(open('/proc/thread-self/children').read())"
    result = subprocess.run([sys.executable, "-c", code], timeout=60, stdout=subprocess.PIPE, text=True)
    assert result.returncode == 0 and result.stdout.strip() == ""
