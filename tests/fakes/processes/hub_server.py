"""A substitute for the Hugging Face hub: the part of its HTTP API that a download uses, on a local port."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

GATED, TOKEN = "org/gated", "hf_of_somebody_who_may"


class HubServer:
    """Serves repositories: commits by id, each a folder; branches and tags name commits."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Path]] = {}
        self.requests: list[tuple[str, str, str]] = []
        """Method, path and Range of each request."""
        self.tokens: set[str] = set()
        self.cuts: dict[str, int] = {}
        """Files whose next answer ends after so many bytes."""
        self.url = ""

    def add(self, repo_id: str, folder: Path, revision: str = "main") -> str:
        """Publish a folder as a repository's revision. Return the commit's id."""
        commit = hashlib.sha1(f"{repo_id}@{revision}".encode()).hexdigest()
        self.repos.setdefault(repo_id, {}).update({revision: folder, commit: folder})
        return commit

    def fetched(self) -> list[str]:
        """The names of the files that were downloaded."""
        return [
            path.partition("/cdn/")[2].split("/", 3)[-1] for _, path, _ in self.requests if path.startswith("/cdn/")
        ]

    @contextmanager
    def running(self) -> Iterator[HubServer]:
        """Serve while the block runs."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: Any) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        file = re.fullmatch(r"/(cdn/)?([^/]+/[^/]+)/(?:resolve/)?([^/]+)/(.+)", path)
        found = api or file
        repo_id = "" if found is None else found[1 if api else 2]
        if repo_id not in self.hub.repos:
            return self._fail(401, "RepoNotFound")
        if not path.startswith("/cdn/") and not self._may_read(repo_id):
            return self._fail(401, "GatedRepo")
        revision = (api[3] if api else file[3] if file else None) or "main"
        folder = self.hub.repos[repo_id].get(revision)
        if folder is None:
            return self._fail(404, "RevisionNotFound")
        if api:
            return self._describe(repo_id, revision, folder, whole=api[2] == "tree")
        assert file is not None
        return self._give(repo_id, revision, folder / file[4], file[4], behind=bool(file[1]))

    def _may_read(self, repo_id: str) -> bool:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.tokens.add(token)
        return repo_id != GATED or token == TOKEN

    def _describe(self, repo_id: str, revision: str, folder: Path, *, whole: bool) -> None:
        commit = next(
            name
            for name, its in self.hub.repos[repo_id].items()
            if its == folder and re.fullmatch("[0-9a-f]{40}", name)
        )
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        if whole:
            self._send_json([self._entry(folder / name, name) for name in names])
        else:
            self._send_json({"id": repo_id, "sha": commit, "siblings": [{"rfilename": name} for name in names]})

    def _entry(self, path: Path, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}

    def _give(self, repo_id: str, revision: str, path: Path, name: str, *, behind: bool) -> None:
        if not path.is_file():
            return self._fail(404, "EntryNotFound")
        if not behind:
            # As the hub does for large files: what the file is, and another place where it lies.
            headers = {"X-Repo-Commit": self._commit(repo_id, revision), "X-Linked-Etag": f'"{_etag(path)}"'}
            headers |= {"X-Linked-Size": str(path.stat().st_size)}
            # By another name of this machine: clients follow what is another host only when they fetch the content.
            store = self.hub.url.replace("127.0.0.1", "localhost")
            place = f"{store}/cdn/{repo_id}/{revision}/{name}"
            return self._send(302, b"", headers | {"Location": place, "ETag": f'"{_etag(path)}"'})
        content = path.read_bytes()
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        headers = {"ETag": f'"{_etag(path)}"'}
        if start is None:
            return self._send(200, content, headers, cut=self.hub.cuts.pop(name, None))
        first = int(start[1])
        headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        return self._send(206, content[first:], headers)

    def _commit(self, repo_id: str, revision: str) -> str:
        revisions = self.hub.repos[repo_id]
        return next(name for name in revisions if len(name) == 40 and revisions[name] == revisions[revision])

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": f"this is {code}"})

    def _send_json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])
        if cut is not None:
            self.close_connection = True


def _etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
