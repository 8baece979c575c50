"""The processes that evaluate a model's chat template: one compiles it and forks workers, and the workers render.

    python -P -m penstock.gpu_node.engine.text.template_worker FD

FD is a socket to the node. The first message brings the template, later messages the sockets of new workers. The kernel
ends a worker whose render takes too much CPU or wall time. All of them end when the node closes its end of the socket.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from penstock.gpu_node.engine.text.template_frames import COSTLY, RAISED, RENDERED, receive, send

WORKER_MEMORY_MIB = 1024
"""Limit of the address space that compiling the template may add, and then each worker."""
_MAX_ERROR_CHARS = 2000
_OOM_SCORE = "500"
_PR_SET_PDEATHSIG = 1


class _Generation(Extension):
    """`{% generation %}` marks assistant messages for training. At inference only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON without escapes for HTML, which Jinja's own filter adds and a model would read literally."""
    if isinstance(value, Iterator):
        value = list(value)  # That of a filter such as `map`.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _compiled(source: str, variables: dict[str, str]) -> tuple[Template, bool]:
    """Return the template, and whether it uses tools."""
    # Some templates append to lists of their own. Each chat arrives as new values, so nothing of it stays changed.
    environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    template = environment.from_string(source, globals=variables)
    return template, "tools" in find_undeclared_variables(environment.parse(source))


def _rendered(template: Template, chat: dict[str, Any]) -> tuple[str, str]:
    """Return the kind of an answer and its text."""
    now = datetime.fromisoformat(chat["now"])
    variables = {
        "strftime_now": now.strftime,
        # Firefunction cannot do without these.
        "datetime": now.strftime("%Y-%m-%d %H:%M:%S"),
        "functions": "",
        **chat["variables"],
        "messages": chat["messages"],
        "tools": chat["tools"],
        "documents": None,
    }
    pieces: list[str] = []
    num_chars = 0
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > chat["max_chars"]:
                return COSTLY, f"{chat['max_chars']} characters"
        return RENDERED, "".join(pieces)
    except MemoryError:
        pieces.clear()
        return COSTLY, f"{WORKER_MEMORY_MIB} MiB of memory"
    except Exception as error:
        # Templates are the model's own code, and refuse messages by raising anything.
        return RAISED, str(error)[:_MAX_ERROR_CHARS]


def _limit_time(cpu_s: float, wall_s: float) -> None:
    """Let the kernel end this process after so much time; 0 takes the limit away. No code of the template runs then."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _limit_memory(*, is_final: bool) -> None:
    """Limit the address space. is_final: this process cannot raise the limit again."""
    with open("/proc/self/statm", "rb") as statm:
        limit = int(statm.read().split()[0]) * resource.getpagesize() + (WORKER_MEMORY_MIB << 20)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with suppress(ValueError):  # The process was started with a lower limit.
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit if is_final else hard))


def _serve(template: Template, node: socket.socket) -> None:
    _limit_memory(is_final=True)
    while (data := receive(node)) is not None:
        chat = json.loads(data[0])
        _limit_time(chat["cpu_s"], chat["wall_s"])
        kind, text = _rendered(template, chat)
        body = text.encode(errors="surrogatepass")
        _limit_time(0, 0)
        send(node, kind, body)


def _fork(template: Template, node: socket.socket, fd: int) -> None:
    parent = os.getpid()
    if os.fork():
        os.close(fd)
        return
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        node.close()
        if os.getppid() == parent:
            with socket.socket(fileno=fd) as own:
                _serve(template, own)
    except (OSError, MemoryError):
        pass
    finally:
        os._exit(0)


def _tell(node: socket.socket, kind: str, body: bytes) -> None:
    with suppress(BrokenPipeError):  # The node has ended, for example because of another file of the model.
        send(node, kind, body)


def main() -> None:
    """Serve until the node closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal's Ctrl-C is for the node. Its end ends this process.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel reaps the workers.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write(_OOM_SCORE)
    with socket.socket(fileno=int(sys.argv[1])) as node:
        if (received := receive(node)) is None:
            return
        wanted = json.loads(received[0])
        # Jinja evaluates constants when it compiles. Each worker sets a limit of its own later.
        _limit_time(wanted["cpu_s"], wanted["wall_s"])
        _limit_memory(is_final=False)
        try:
            template, takes_tools = _compiled(wanted["source"], wanted["variables"])
        except MemoryError:
            send(node, RAISED, f"it takes more than {WORKER_MEMORY_MIB} MiB of memory".encode())
            return
        except Exception as error:
            _tell(node, RAISED, str(error)[:_MAX_ERROR_CHARS].encode(errors="replace"))
            return
        _limit_time(0, 0)
        gc.collect()
        gc.freeze()
        _tell(node, RENDERED, b"tools" if takes_tools else b"")
        while (received := receive(node)) is not None:
            for fd in received[1]:
                _fork(template, node, fd)


if __name__ == "__main__":
    main()
