"""Keep the requests of a client in files, without the texts of its authors and without traces of this machine.

`make clients CLIENT="NAME --record"` writes them to build/clients/recorded/. Some of them are bodies of tests.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any

import httpx
from clients.environments import FOLDER
from clients.server import Server

RECORDED = FOLDER / "recorded"
_HEADERS = (
    *("accept", "anthropic-beta", "anthropic-version", "authorization", "content-type", "user-agent"),
    *("x-api-key", "x-app"),
)
"""Those that are kept. Others name sessions, processes and machines."""
_NOT_FORWARDED = ("connection", "content-length", "date", "host", "server", "transfer-encoding")
_IDS = ("id", "tool_call_id", "tool_use_id", "call_id")
_KEPT = ("const", "data", "enum", "pattern", "required")
"""Members whose texts are no sentences."""
_BILLING = "x-anthropic-billing-header: "
_OF_SYSTEM = re.compile(r"<(system-reminder)>.*</\1>\s*", re.DOTALL)


@contextmanager
def recorded(server: Server, name: str) -> Iterator[Server]:
    """Start a proxy before a server that records the requests of the client of this name."""
    folder = RECORDED / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    numbers = itertools.count(1)

    class Recorder(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            if body:
                record = record_of(self.path, dict(self.headers), json.loads(body))
                (folder / f"{next(numbers):03}.json").write_text(json.dumps(record, separators=(",", ":")) + "\n")
            headers = {key: value for key, value in self.headers.items() if key.lower() not in _NOT_FORWARDED}
            headers["accept-encoding"] = "identity"
            with httpx.stream(
                self.command, server.url + self.path, content=body, headers=headers, timeout=60
            ) as answer:
                self._send(answer)

        def _send(self, answer: httpx.Response) -> None:
            self.send_response(answer.status_code)
            for key, value in answer.headers.items():
                if key.lower() not in _NOT_FORWARDED:
                    self.send_header(key, value)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for part in answer.iter_raw():
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")

        def do_GET(self) -> None:
            self._forward()

        def do_POST(self) -> None:
            self._forward()

        def log_message(self, *_words: Any) -> None:
            """Print nothing."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield replace(server, url=f"http://127.0.0.1:{proxy.server_address[1]}")
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()


def record_of(path: str, headers: dict[str, str], body: Any) -> dict[str, Any]:
    """Return what is kept of a request."""
    kept = {name.lower(): value for name, value in headers.items() if name.lower() in _HEADERS}
    return {"path": path, "headers": kept, "body": _Neutral().value(body)}


class _Neutral:
    """Replaces the texts of a body by their lengths, ids by numbers, and folders by one name."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}

    def value(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: self.value(one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [self.value(one, key) for one in value]
        return self._text(value, key) if isinstance(value, str) and key not in _KEPT else value

    def _text(self, text: str, key: str) -> str:
        if key in _IDS:
            return self._ids.setdefault(text, f"call_{len(self._ids) + 1}")
        if key == "user_id":
            return "user"
        if key == "arguments":
            return json.dumps(self.value(json.loads(text)))
        if text.startswith(_BILLING):
            return _BILLING + f"{len(text)}"
        if text.startswith("/"):
            return f"/project/{PurePosixPath(text).name}"
        if not any(map(str.isspace, text)):
            return text
        marked = f"{key} {len(text)}"
        return f"<system-reminder>\n{marked}\n</system-reminder>" if _OF_SYSTEM.fullmatch(text) else marked
