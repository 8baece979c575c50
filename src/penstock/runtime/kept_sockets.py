"""What a gateway and its keeper tell each other about connections that outlive the gateway (Linux).

The keeper is the process that starts the gateway. Both have a pair of Unix sockets of the kind SOCK_SEQPACKET, so each
message arrives whole. A message has a letter and a number; that of a connection brings a duplicate of it (SCM_RIGHTS).

    gateway → keeper   LOADED (its modules are loaded, and it waits), READY (it takes the connections of its
                       predecessor), TAKEN (it has them)
    keeper → gateway   START (it is the gateway now), KEEP slot + descriptor for each kept connection,
                       READY + nanoseconds (there are no more), LEAVE
    holder → keeper    KEEP slot + descriptor for each kept connection, when the gateway has ended

The time is that at which the keeper saw the predecessor's end, by the clock CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fcntl import ioctl
from termios import FIONREAD
from typing import Self

KEEPER_VARIABLE = "PENSTOCK_GATEWAY_KEEPER"
"""Environment variable of a gateway that has a keeper:
`<control>:<slots>:<number of slots>:<listener>,<listener>…:<holder>`, all of them descriptors but the number of slots
and the process that holds the gateway's connections (`gateway/kept/holder.py`), which is 0 until it runs."""
LOADED, START, KEEP, READY, TAKEN, LEAVE = b"O", b"S", b"K", b"R", b"T", b"L"
_MESSAGE = struct.Struct("<cQ")
_DESCRIPTORS = array.array("i", [0])


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a gateway inherits from its keeper: descriptors, but for the numbers of slots and of the holder."""

    control: int
    slots: int
    num_slots: int
    listeners: tuple[int, ...]
    holder: int = 0
    """The process that holds the gateway's connections, or 0."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Return what the environment of this process names, or None without a keeper."""
        if not (text := environment.get(KEEPER_VARIABLE, "")):
            return None
        control, slots, num_slots, listeners, holder = text.split(":")
        return cls(int(control), int(slots), int(num_slots), tuple(map(int, listeners.split(","))), int(holder))

    @property
    def variable(self) -> dict[str, str]:
        """The variable for a gateway that inherits these."""
        listeners = ",".join(map(str, self.listeners))
        return {KEEPER_VARIABLE: f"{self.control}:{self.slots}:{self.num_slots}:{listeners}:{self.holder}"}

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All of them."""
        return (self.control, self.slots, *self.listeners)


def send_message(control: socket.socket, kind: bytes, number: int = 0, descriptor: int | None = None) -> None:
    """Send one message. Raises OSError, and BlockingIOError while the other process reads too slowly."""
    data = _MESSAGE.pack(kind, number)
    if descriptor is None:
        control.send(data)
    else:
        rights = array.array("i", [descriptor])
        control.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def receive_message(control: socket.socket) -> tuple[bytes, int, int | None] | None:
    """Return the kind, the number and the descriptor of the next message, or None at the end. Raises OSError.

    A descriptor is lost if this process may have no further one.
    """
    room = socket.CMSG_SPACE(_DESCRIPTORS.itemsize)
    data, ancillary, *_ = control.recvmsg(_MESSAGE.size, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    if not data:
        return None
    kind, number = _MESSAGE.unpack(data)
    for level, what, rights in ancillary:
        if (level, what) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(rights) >= _DESCRIPTORS.itemsize:
            return kind, number, struct.unpack_from("i", rights)[0]
    return kind, number, None


# What the kernel counts of a TCP connection: struct tcp_info of linux/tcp.h.

_COUNTS = struct.Struct("=B127xQ8xI52xQQ")
"""tcpi_state, bytes_received, notsent_bytes, bytes_sent, bytes_retrans (Linux 4.19)."""
_CLOSE_WAIT = 8


@dataclass(frozen=True, slots=True)
class TcpCounts:
    """Bytes of a connection since its beginning."""

    num_accepted: int
    """Those that the kernel has taken from this side's processes, sent or not."""
    num_read: int
    """Those that this side's processes have read."""


def counts_of(connection: int) -> TcpCounts | None:
    """Return the counts of a connection's descriptor, or None if this system does not tell them."""
    if sys.platform != "linux":
        return None
    try:
        borrowed = socket.SocketType(socket.AF_INET, socket.SOCK_STREAM, 0, connection)
        try:
            told = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
        finally:
            borrowed.detach()  # It stays open.
        if len(told) < _COUNTS.size:
            return None
        unread = struct.unpack("i", ioctl(connection, FIONREAD, struct.pack("i", 0)))[0]
    except OSError:
        return None
    state, received, unsent, sent, again = _COUNTS.unpack(told)
    # The kernel counts the peer's end as a byte that was received.
    has_ended = state == _CLOSE_WAIT
    return TcpCounts(sent - again + unsent, received - unread - has_ended)
