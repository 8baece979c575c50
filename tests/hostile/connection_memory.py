"""Measures how much memory a gateway takes for many connections of one tenant.

    PYTHONPATH=tests:ops .venv/bin/python -m hostile.connection_memory [NUM_CONNECTIONS] [BODY_BYTES]

Each of the connections stays in one state: its body lacks the last byte, or its job waits, or its stream is not read.
It prints how much the gateway's memory (VmRSS and its peak, VmHWM) grows in each state, in MiB. Blocks that the
allocator keeps count too, so each state has a gateway of its own.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hostile.stack import POOL, Stack, running_stack

NUM_CONNECTIONS = 500
BODY_BYTES = 200 << 10
SETTLE_S = 8.0
_RECEIVE_BYTES = 4096
_STATES = ("incomplete body", "waiting job", "unread stream")


def status_mib(pid: int, name: str) -> float:
    """Return a field of a process's status, such as VmHWM, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def body_of(state: str, num_bytes: int, number: int) -> bytes:
    """Return the body of one connection."""
    fields: dict[str, Any] = {"model": POOL, "stream": True, "max_tokens": 4, "truncate_prompt_tokens": 64}
    if state == "unread stream":
        return json.dumps({**fields, "prompt": "Say", "max_tokens": 3000, "ignore_eos": True, "logprobs": 20}).encode()
    fields |= {"prompt": "", "not_before_s": 600}
    text = f"{number} " + "the gate " * (num_bytes // 9)
    return json.dumps({**fields, "prompt": text[: num_bytes - len(json.dumps(fields))]}).encode()


def opened(stack: Stack, state: str, num_bytes: int, number: int) -> socket.socket:
    """Open a connection and send its request, without the last byte if its body shall be incomplete."""
    url, body = urlsplit(stack.url), body_of(state, num_bytes, number)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    connection.settimeout(2.0)
    connection.connect((url.hostname, url.port))
    lines = ["POST /v1/completions HTTP/1.1", "host: penstock", f"authorization: Bearer {stack.keys['attacker']}"]
    lines += ["content-type: application/json", f"content-length: {len(body)}", "", ""]
    with contextlib.suppress(TimeoutError):  # The gateway may not read on.
        connection.sendall("\r\n".join(lines).encode() + (body[:-1] if state == "incomplete body" else body))
    return connection


def answer_of(connection: socket.socket) -> str:
    """Return the status, and of a refusal the code, if an answer has begun."""
    connection.setblocking(False)
    try:
        text = connection.recv(2000).decode()
    except BlockingIOError:
        return "none yet"
    except OSError as error:
        return repr(error)
    code = re.search(r'"code":\s*"(\w+)"', text)
    return f"{text[9:12]} {code[1] if code else ''}".strip()


def measure(state: str, num_connections: int, num_bytes: int) -> None:
    """Print how the gateway's memory grows with connections in one state."""
    with running_stack(model=None, maxmemory="2gb") as stack:
        pid = stack.processes["gateway"].pid
        opened(stack, state, 300, -1).close()
        time.sleep(1.0)
        before = status_mib(pid, "VmRSS")
        connections = [opened(stack, state, num_bytes, number) for number in range(num_connections)]
        time.sleep(SETTLE_S if state != "unread stream" else 5 * SETTLE_S)
        now, peak = (status_mib(pid, name) - before for name in ("VmRSS", "VmHWM"))
        answers = Counter(map(answer_of, connections))
        for connection in connections:
            connection.close()
        print(f"{state:16} {before:5.0f} MiB, grows by {now:5.0f}, at most {peak:5.0f}: {dict(answers)}", flush=True)


def main() -> None:
    """Print the growth in each state."""
    num_connections, num_bytes = (*map(int, sys.argv[1:]), *(NUM_CONNECTIONS, BODY_BYTES)[len(sys.argv) - 1 :])
    for state in _STATES:
        measure(state, num_connections, num_bytes)


if __name__ == "__main__":
    main()
