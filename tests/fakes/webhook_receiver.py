"""A receiver of webhooks on a local port: it notes what arrives, and answers as a test wishes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from fakes.waiting import wait_until

ALLOWED = {"webhook_allow_http": True, "webhook_allowed_networks": ("127.0.0.0/8",)}
"""Settings of a gateway that may deliver to a receiver of this machine."""


@dataclass(frozen=True)
class Received:
    """One request."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        """The body as JSON."""
        return dict(json.loads(self.body))


@dataclass(frozen=True)
class Reply:
    """How to answer. `hang_s`: seconds before anything is sent. `dies`: close the connection without an answer."""

    status: int = 204
    headers: Mapping[str, str] = field(default_factory=dict)
    hang_s: float = 0.0
    dies: bool = False


class WebhookReceiver:
    """An HTTP server on a local address in threads of its own. `reply` chooses the answer to each request."""

    def __init__(
        self, reply: Callable[[Received], Reply] = lambda _: Reply(), host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.reply = reply
        self.received: list[Received] = []
        self.accepted: list[Received] = []
        """Those that got an answer of success."""
        self.num_connections = 0
        self.num_open = self.most_open = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer._handle(self)

            def do_GET(self) -> None:
                outer._handle(self)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def process_request(self, request: Any, client_address: Any) -> None:
                outer.num_connections += 1
                super().process_request(request, client_address)

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # A gateway that is killed resets its connections.

        def make() -> ThreadingHTTPServer:
            return Server((host, self.port or port), Handler)

        self.port = 0
        self._make = make
        self._server = make()
        self.port = int(self._server.server_address[1])
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        return thread

    def url(self, path: str = "/hook") -> str:
        """Return a URL of it."""
        return f"http://127.0.0.1:{self.port}{path}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def die_for(self, seconds: float) -> None:
        """Listen to nothing for a while."""
        self._stop()
        time.sleep(seconds)
        self._server = self._make()
        self._thread = self._start()

    def wait_for(self, count: int, path: str | None = None) -> list[Received]:
        """Wait until that many requests arrived (on a path), and return them."""
        return wait_until(
            lambda: [one for one in list(self.received) if path in (None, one.path)],
            lambda found: len(found) >= count,
            what=f"{count} webhooks",
        )

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("content-length") or 0)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        received = Received(handler.path, headers, handler.rfile.read(length))
        if len(received.body) < length:
            return  # The sender died.
        with self._lock:
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            self.received.append(received)
        try:
            reply = self.reply(received)
            time.sleep(reply.hang_s)
            handler.close_connection = True
            if reply.dies:
                return
            handler.send_response(reply.status)
            for name, value in reply.headers.items():
                handler.send_header(name, value)
            handler.send_header("content-length", "0")
            handler.end_headers()
            if reply.status // 100 == 2:
                with self._lock:
                    self.accepted.append(received)
        except OSError:
            pass
        finally:
            with self._lock:
                self.num_open -= 1
