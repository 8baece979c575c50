"""A rank that joins rank 0 from another host, and again whenever its ranks start again, each time as a new process."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.contract.errors import EXIT_WRONG_USE, ConfigError
from penstock.gpu_node.model.ranks.connection import ConnectionLostError, RankConnection, ask, read_secret
from penstock.gpu_node.model.ranks.hosts import parse_address
from penstock.runtime.logging import inherited_log_variables
from penstock.runtime.process_guard import guarded

log = logging.getLogger(__package__)

RANK_MODULE = "penstock.gpu_node.model.loading.torch_rank_process"
_PAUSE_S = 0.5
_SAY_S = 10.0
"""Interval of log lines while rank 0 cannot be reached."""
_CONNECT_PATIENCE_S = 5.0
_END_PATIENCE_S = 3.0


def follow_rank_0(join: str, secret_file: Path, model: str, revision: str | None, own: Mapping[str, Any]) -> None:
    """Compute a rank's part of a model for the rank 0 at an address, HOST:PORT, until this process is ended.

    model, revision: as this host has it. own: options of this host in place of rank 0's. Raises ConfigError if rank 0
    refuses this rank, or if the rank cannot compute what rank 0 wants; its last line on stderr then says why.
    """
    (host, port), secret, said_s = parse_address(join, "join"), read_secret(secret_file), -_SAY_S
    while True:
        try:
            connection = RankConnection(socket.create_connection((host, port), _CONNECT_PATIENCE_S))
        except OSError as error:
            if time.monotonic() - said_s >= _SAY_S:
                said_s = time.monotonic()
                log.warning("rank 0 cannot be reached", extra={"address": join, "reason": str(error)})
            time.sleep(_PAUSE_S)
            continue
        with connection.stream:
            connection.stream.settimeout(None)
            try:
                config = ask(connection, secret)
            except ConnectionLostError as error:
                log.warning("rank 0 has closed the connection", extra={"reason": str(error)})
                time.sleep(_PAUSE_S)
                continue
            log.info("joined", extra={"rank": config["rank"], "address": join})
            given = {"model": model, "revision": revision, "options": {**config["options"], **own}}
            status = _run({**config, **given}, connection)
        if status == EXIT_WRONG_USE:
            raise ConfigError(f"rank {config['rank']} cannot compute what rank 0 wants; the line above says why")
        log.warning("the ranks have ended; this one joins again", extra={"rank": config["rank"], "status": status})
        time.sleep(_PAUSE_S)


def _run(config: Mapping[str, Any], connection: RankConnection) -> int:
    """Run the rank in a process of its own, which ends with this one and with the connection. Return its exit status.

    A rank that hangs, or that a signal has stopped, does not notice that its connection has ended.
    """
    descriptor = connection.stream.fileno()
    given = {**config, "connection": descriptor, "cores": sorted(os.sched_getaffinity(0))}
    command = [sys.executable, "-P", "-m", RANK_MODULE, json.dumps(given)]
    guard = subprocess.Popen(
        guarded(command, grace_s=0.0, descriptors=(descriptor,)),
        stdin=subprocess.PIPE,
        stdout=2,
        pass_fds=(descriptor,),
        start_new_session=True,
        env=os.environ | inherited_log_variables(),
    )
    ended = os.pidfd_open(guard.pid)
    try:
        _await_either(ended, descriptor)
        # It ends by itself a second after its connection, if it runs.
        select.select([ended], [], [], _END_PATIENCE_S)
    finally:
        os.close(ended)
        if guard.stdin is not None:
            guard.stdin.close()
        guard.wait()
    return guard.returncode


def _await_either(process: int, connection: int) -> None:
    """Wait until a process has ended, or the other host has closed a connection or cannot be reached any more."""
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    # Without POLLIN: what arrives is for the rank.
    waiting.register(connection, select.POLLRDHUP)
    waiting.poll()
