"""Whether the connections of a gateway can outlive it on this machine, and how many."""

from __future__ import annotations

import socket

from penstock.cli.keeper import MAX_SLOTS, num_slots
from penstock.cli.machine.check import Check
from penstock.gateway.kept.holder import can_share_descriptors
from penstock.runtime.kept_sockets import counts_of

FEW_SLOTS = 1024
SUBJECT = "answers"


def check_kept_connections() -> Check:
    """Return what a keeper could hold here: connections with an open answer, which then outlive their gateway."""
    slots = num_slots()
    return judge_kept(slots if can_share_descriptors() else None, has_counts=slots is not None and _has_counts())


def judge_kept(slots: int | None, *, has_counts: bool) -> Check:
    """Judge by the number of connections that a keeper may hold (None: no keeper here), and by the kernel's counts."""
    if slots is None:
        advice = "use Linux on x86-64, ARM or RISC-V; until then open answers are cut off after their gateway's drain"
        finding = "no process can share a gateway's connections here, so no answer outlives its gateway"
        return Check("warn", SUBJECT, finding, advice)
    if not has_counts:
        advice = "use Linux 4.19 or later"
        return Check(
            "warn", SUBJECT, "the kernel does not count a connection's bytes: no answer outlives its gateway", advice
        )
    finding = f"up to {slots} connections outlive a gateway that has a keeper and this limit of open files"
    if slots < FEW_SLOTS:
        return Check(
            "warn", SUBJECT, finding, f"raise the limit of open files (ulimit -n, LimitNOFILE=), up to {MAX_SLOTS}"
        )
    return Check("ok", SUBJECT, finding)


def _has_counts() -> bool:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()) as connection,
        ):
            return counts_of(connection.fileno()) is not None
    except OSError:
        return False
