"""`python -I -S fork_client.py ADDRESS <words>`: run `python <words>` as a fork of the server of services at ADDRESS.

`penstock serve` and `penstock demo` start their parts with this program if they are forks of that server themselves.
So do gateways in a test's process with their parser process.
The part has the streams, environment and working folder of this process. This process forwards SIGTERM and SIGINT to
it, and ends with its exit status. If this process is killed, the server kills the part.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
from contextlib import suppress

PARSER = ("-c", "from penstock.gateway.request.parser_process import main; main()")
"""What a gateway starts for large bodies. The server has imported the module, so `-m` would warn."""
OF_NODES = ("penstock.gpu_node.model.loading.load",)
"""What each node imports, in 0.3 s, beyond what all services import."""


def command_of(address: str, *words: str) -> tuple[str, ...]:
    """Return the command that runs `python <words>` as a fork of the server at this address."""
    return (sys.executable, "-I", "-S", __file__, address, *words)


def main(address: str, *words: str) -> None:
    """Ask the server for a fork, and wait for its end."""
    inherited = _inherited()
    ended, status = os.pipe()
    # A signal that arrives after the part has begun, but before this process knows its id, waits.
    passed_on = signal.SIGTERM, signal.SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    imports = OF_NODES if words[:3] == ("-m", "penstock", "node") else ()
    request = {"command": words, "env": dict(os.environ), "cwd": os.getcwd(), "imports": imports}
    request |= {"descriptors": inherited}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, status, *inherited])
        for number in (status, *inherited):
            os.close(number)
        part = int(server.recv(64))

        def pass_on(number: int, _frame: object) -> None:
            with suppress(ProcessLookupError):
                os.kill(part, number)

        for number in passed_on:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        answer = array.array("i", os.read(ended, 64))
    code = answer[0] if answer else -signal.SIGKILL  # Without an answer the server has ended, and its children with it.
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _inherited() -> list[int]:
    """Return the descriptors that this process was given beside its streams."""
    open_now = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in open_now if number > 2 and os.path.exists(f"/proc/self/fd/{number}")]


if __name__ == "__main__":
    main(*sys.argv[1:])
