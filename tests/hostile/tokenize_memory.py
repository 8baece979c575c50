"""Measures how much memory a gateway takes for large `/tokenize` bodies that arrive together.

    .venv/bin/python tests/hostile/tokenize_memory.py [NUM_BODIES] [BODY_BYTES]

It starts the `penstock serve` of the installation whose Python runs it, with the demo model, so the file can be run by
the Python of another checkout too. It prints the peak of each process's memory (VmHWM) in MiB, and by how much all
of them grow: the limit is 128 MiB.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

NUM_BODIES = 12
BODY_BYTES = 1_600_000
TIMEOUT_S = 300.0
SMALL = {"prompt": "warm", "return_token_strs": True}
KINDS = ("words", "letters")
PROCESSES = {"gateway": b"gateway", "parser": b"penstock.gateway.request.parser_process", "node": b"node"}


def status_mib(pid: int, name: str) -> float:
    """Return a field of a process's status, such as VmHWM, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def clear_peak(pid: int) -> float:
    """Let the peak of a process begin anew. Return its memory now, in MiB."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return status_mib(pid, "VmRSS")


def descendants(pid: int) -> Iterator[int]:
    """Yield the process ids of a process's children, and of theirs."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from descendants(child)


def pid_of(root: int, word: bytes) -> int | None:
    """Return the descendant that has this word in its command, but is not a guard."""
    for pid in descendants(root):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if word in command and not any(b"process_guard" in part for part in command):
            return pid
    return None


def large_body(kind: str, num_bytes: int) -> bytes:
    """Return a body of `num_bytes`: a text of words, or of letters of a token each."""
    chance = random.Random(7)
    alphabet = "etaoinshrdlu"
    if kind == "words":
        words = ["".join(chance.choices(alphabet, k=chance.randint(2, 9))) for _ in range(num_bytes // 4)]
        text = " ".join(words)
    else:
        text = "\u00e9 " * num_bytes
    frame = len(json.dumps({**SMALL, "prompt": ""}))
    return json.dumps(
        {**SMALL, "prompt": text.encode()[: num_bytes - frame].decode(errors="ignore")}, ensure_ascii=False
    ).encode()


def post(url: str, body: bytes) -> tuple[int, int]:
    """Return the status and the length of an answer of `/tokenize`."""
    request = urllib.request.Request(f"{url}/tokenize", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            num_bytes = 0
            while part := answer.read(1 << 16):
                num_bytes += len(part)
            return answer.status, num_bytes
    except urllib.error.HTTPError as error:
        text = error.read()
        print(error.code, text[:300].decode(), file=sys.stderr)
        return error.code, len(text)


@contextmanager
def served() -> Iterator[tuple[int, str]]:
    """Run `penstock serve`. Yields its process id and the gateway's URL."""
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0"]
    # A folder of its own: otherwise the queue of another `penstock serve` of this user is used.
    folder = tempfile.mkdtemp(prefix="memory-", dir="/tmp")
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PENSTOCK_RUNTIME_DIR": folder, "XDG_STATE_HOME": folder}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            lines = process.stdout or ()
            found = next(found for line in lines if (found := re.search(r"at (http://\S+)/v1", line)))
            threading.Thread(target=lambda: [None for _ in lines], daemon=True).start()
            yield process.pid, found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(TIMEOUT_S)
            shutil.rmtree(folder, ignore_errors=True)


def measure(kind: str, num_bodies: int, num_bytes: int) -> None:
    """Print how the memory of each process grows while so many bodies of this kind arrive together."""
    with served() as (root, url):
        post(url, large_body(kind, 300_000))  # starts the parser process
        pids = {name: found for name, words in PROCESSES.items() if (found := pid_of(root, words))}
        before = {name: clear_peak(pid) for name, pid in pids.items()}
        body, began_s = large_body(kind, num_bytes), time.monotonic()
        with ThreadPoolExecutor(num_bodies) as pool:
            answers = Counter(pool.map(post, [url] * num_bodies, [body] * num_bodies))
        took_s = time.monotonic() - began_s
        total = 0.0
        for name, mib in before.items():
            peak = status_mib(pids[name], "VmHWM")
            print(f"{kind:8} {name:8} {mib:6.0f} MiB, peak {peak:6.0f}, growth {peak - mib:6.0f}")
            total += peak - mib
        print(
            f"{kind:8} all grow by {total:.0f} MiB in {took_s:.1f} s, answers (status, bytes): {dict(answers)}",
            flush=True,
        )


def main() -> None:
    """Print the peaks for each kind of body."""
    num_bodies, num_bytes = (*map(int, sys.argv[1:]), *(NUM_BODIES, BODY_BYTES)[len(sys.argv) - 1 :])
    for kind in KINDS:
        measure(kind, num_bodies, num_bytes)


if __name__ == "__main__":
    main()
