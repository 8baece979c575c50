"""`python fork_server.py <fd> services`, `... <fd> tests <pytest's arguments>`: import once, fork for each request.

`services` runs commands of penstock as armed.py does. `tests` imports the test files and becomes xdist's workers, which
then find each of them imported. A child has its own streams, process id and exit status. A start takes milliseconds
of CPU time instead of a second for a service, and of ten seconds for a worker. See forked_process.py for the other end.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import gc
import json
import os
import selectors
import signal
import socket
import sys
import termios
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module, resources
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

MAX_REQUEST_BYTES = 1 << 20
STREAMS = 3
"""Stdin, stdout and stderr come with a request, and behind them the pipe that gets the exit status, and what a program
was given besides."""
MAX_INHERITED = 16
FIRST_ASIDE = 256
"""Descriptors are kept above this number while others get theirs."""
PRELOADED = (
    *("penstock.cli.main", "penstock.cli.services", "penstock.cli.serve", "penstock.gateway.app"),
    *("penstock.gpu_node.process", "penstock.producer.client", "reference_engine"),
    # What FastAPI and uvicorn import when a gateway starts. Some tests run without uvloop.
    *("pydantic.v1", "fastapi.telemetry", "uvicorn.lifespan.on"),
    "httpx",
)
"""Services, without torch: a request of a node with a real model names that."""

Request = dict[str, Any]


class Server:
    """Forks for its clients. The first one is the process that started it."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._opener, _ = listener.accept()
        self._clients = {self._opener}
        self._children: dict[int, tuple[int, int, socket.socket]] = {}
        """By its pidfd: a child's id, the pipe of its exit status, and the client that asked for it."""
        self._selector = selectors.DefaultSelector()
        for readable in (listener, self._opener):
            self._selector.register(readable, selectors.EVENT_READ)

    def serve(self) -> Request | None:
        """Fork for each request. Return the request in a child, and None in the server when the opener has ended."""
        while self._opener in self._clients:
            for key, _ in self._selector.select():
                if key.fd in self._children:
                    self._report_end(key.fd)
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    request = self._answer(key.fileobj)
                    if request is not None:
                        return request
        return None

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self._clients.add(client)
        self._selector.register(client, selectors.EVENT_READ)

    def _answer(self, client: socket.socket) -> Request | None:
        """Fork for a client's request, which is returned in the child."""
        message, fds, _, _ = socket.recv_fds(client, MAX_REQUEST_BYTES, STREAMS + 1 + MAX_INHERITED)
        if not message:
            self._end_children_of(client)
            return None
        request: Request = json.loads(message)
        streams, status, inherited = fds[:STREAMS], fds[STREAMS], fds[STREAMS + 1 :]
        if not sys.modules.keys() >= set(request["imports"]):
            for name in request["imports"]:
                import_module(name)
            gc.freeze()
        pid = os.fork()
        if pid == 0:
            os.close(status)
            self._close()
            _take_streams(streams)
            _take_inherited(inherited, request.get("descriptors", ()))
            return request
        if request.get("new_group"):
            # Before the client knows the id, to which it may send a signal at once.
            os.setpgid(pid, pid)
        for stream in (*streams, *inherited):
            os.close(stream)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid, status, client
        self._selector.register(pidfd, selectors.EVENT_READ)
        with suppress(BrokenPipeError):
            client.send(str(pid).encode())
        return None

    def _end_children_of(self, client: socket.socket) -> None:
        """Kill what a client that has ended has left."""
        self._selector.unregister(client)
        self._clients.remove(client)
        client.close()
        for pid, _, asked_by in self._children.values():
            if asked_by is client:
                os.kill(pid, signal.SIGKILL)

    def _report_end(self, pidfd: int) -> None:
        """Reap a child and write its exit status, negative for a signal."""
        pid, status, _ = self._children.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, ended = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):
            os.write(status, array.array("i", [os.waitstatus_to_exitcode(ended)]).tobytes())
        os.close(status)

    def _close(self) -> None:
        """Close, in a child, what belongs to the server and to its other children."""
        self._selector.close()
        for connection in (self._listener, *self._clients):
            connection.close()
        for pidfd, (_, status, _) in self._children.items():
            os.close(pidfd)
            os.close(status)


def _take_streams(streams: list[int]) -> None:
    """Make the streams stdin, stdout and stderr."""
    for own, stream in enumerate(streams):
        os.dup2(stream, own)
        os.close(stream)
    # The server's own objects remember whether its descriptors can seek.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  open as long as the process
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _take_inherited(descriptors: list[int], numbers: Sequence[int]) -> None:
    """Give descriptors the numbers that they have in the process which asks for the fork."""
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_ASIDE) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(aside, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def import_services() -> None:
    """Import what commands need."""
    # As in the node's loading of a model: the OpenMP runtime reads these when torch is first imported.
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="2000")
    sys.path.insert(0, str(Path(__file__).parent))
    for name in PRELOADED:
        import_module(name)
    # A service that calls a script puts its text together first.
    texts = import_module("penstock.queue.broker.script_text")
    for script in (resources.files("penstock.queue") / "scripts").iterdir():
        if script.name.endswith(".lua"):
            texts.source(script.name.removesuffix(".lua"))
    # Each gateway describes its API when it starts. The schemas in that are made once in a process.
    apis = import_module("penstock.gateway.app").DIALECTS
    bodies = tuple(schema for api in apis for schema in api.bodies)
    with suppress(ModuleNotFoundError):  # A copy of the repository may lack this API.
        import_module("penstock.gateway.apis.api_docs.openapi").body_schemas(bodies)


def run_command(request: Request, address: str) -> None:
    """Run a command in its own environment and working folder. The parts that it starts are forks too."""
    from armed import arm, end_with_parent, run  # type: ignore[import-not-found]
    from fork_client import command_of  # type: ignore[import-not-found]

    import_module("penstock.cli.processes")._PENSTOCK = command_of(address, "-m", "penstock")  # type: ignore[attr-defined]
    if request.get("on_terminal"):
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    end_with_parent()
    if os.environ.get("FAULT_AT"):
        arm(os.environ["FAULT_AT"])
    run(request["command"])


def import_tests(arguments: list[str]) -> None:
    """Import the test files of a run. Only workers make the tests of them: these are thousands of objects."""
    import pytest

    class ImportedFile(pytest.Module):
        def collect(self) -> list[pytest.Item]:
            assert self.obj
            return []

    class Importing:
        @pytest.hookimpl
        def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Module:
            module: pytest.Module = ImportedFile.from_parent(parent, path=module_path)
            return module

    # A test that is named must be found.
    plugins = [] if any("::" in word for word in arguments) else [Importing()]
    status = pytest.main([*arguments, "--collect-only", "-qq", "-n0"], plugins=plugins)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        # Pytest keeps a module whose import has failed. Workers import it again, and report why it fails.
        for name, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "").name.startswith(("test_", "conftest.")):
                del sys.modules[name]
        return
    if "transformers" in sys.modules:
        # It loads its parts when they are asked for. This one takes two seconds, which each worker would take anew.
        import_module("transformers.modeling_utils")
    # Hypothesis draws numbers and texts that stand in our sources. Each worker would parse all of these for a second.
    import_module("hypothesis.internal.conjecture.providers")._get_local_constants()


def run_worker(request: Request) -> None:
    """Run the code that xdist gives a worker, as `python -c` does."""
    sys.argv = ["-c"]
    sys.modules["__main__"] = main_module = ModuleType("__main__")
    exec(request["command"][0], vars(main_module))


def end(run: Callable[[], None]) -> NoReturn:
    """Run, and end as an interpreter does, but without freeing all that the server has imported: that takes 0.3 s.

    An exception other than SystemExit does end the interpreter.
    """
    status: Any = 0
    try:
        run()
    except SystemExit as exit_request:
        status = exit_request.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # It waits for threads as the end of an interpreter does.
    atexit._run_exitfuncs()
    # What the program itself leaves open gives warnings as usual. All that was imported is frozen.
    sys.modules.pop("__main__", None)
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)


def main() -> None:
    """Serve until the test process ends; in a child, do what the request says."""
    fd, kind, *arguments = sys.argv[1:]
    gc.disable()  # What is imported stays. Looking for garbage among it took half of the time.
    import_services() if kind == "services" else import_tests(arguments)
    gc.freeze()
    gc.enable()
    # An interrupt is for the processes that run tests: they end, and this one ends with them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=int(fd))
    address = listener.getsockname()
    request = Server(listener).serve()
    if request is None:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end(lambda: run_command(request, address) if kind == "services" else run_worker(request))


if __name__ == "__main__":
    main()
