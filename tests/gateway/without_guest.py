"""Asks gateways that lack an API, as if its folder and its row in `app.DIALECTS` were deleted.

`python without_guest.py REDIS_URL GUEST...` prints a line of JSON for each guest, and one for a gateway with all APIs
("all"): the statuses of the answers, the operations of the OpenAPI document, and its references to what it lacks.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import httpx

import penstock.gateway.http.dialect as core

APIS = "penstock.gateway.apis"
APP = "penstock.gateway.app"
ASKED = {
    "jobs": ("GET", "/v1/jobs"),
    "openai": ("GET", "/v1/models"),
    "anthropic": ("POST", "/v1/messages"),
    "responses": ("POST", "/v1/responses"),
    "tasks": ("POST", "/tokenize"),
    "files": ("GET", "/v1/files"),
    "batches": ("GET", "/v1/batches"),
    "message_batches": ("GET", "/v1/messages/batches"),
    "schedules": ("GET", "/v1/schedules"),
    "webhooks": ("GET", "/v1/webhook_endpoints"),
    "websocket": ("GET", "/v1/stream"),
    "usage": ("GET", "/v1/usage"),
    "web": ("GET", "/web/main.js"),
    "api_docs": ("GET", "/version"),
}
"""A request to each API that needs no node. One that is not listed must only leave the others alone."""


class Blocked:
    """Refuses to import one API."""

    def __init__(self, guest: str) -> None:
        self._name = f"{APIS}.{guest}"

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == self._name or name.startswith(f"{self._name}."):
            raise ImportError(f"{name} is blocked")
        return None


def app_without(guest: str) -> ModuleType:
    """Import the app without the row of an API, and without its import."""
    sys.meta_path.insert(0, Blocked(guest))
    spec = importlib.util.find_spec(APP)
    assert spec is not None and spec.origin is not None
    with open(spec.origin) as file:
        source = file.read()
    imported = re.compile(rf"from {APIS}\.{guest}\.\w+ import (\w+)\n")
    if (found := imported.search(source)) is not None:
        source = re.sub(rf"(?m)^    {found[1]},\n", "", imported.sub("", source))
    module = importlib.util.module_from_spec(spec)
    sys.modules[APP] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module


async def asked(app: Any) -> dict[str, Any]:
    """Start the app, ask each API, and return the statuses. The status of a missing API is 404."""
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
    ):
        answers = {
            name: await http.request(method, path, json={} if method == "POST" else None)
            for name, (method, path) in ASKED.items()
        }
        statuses = {name: answer.status_code for name, answer in answers.items()}
        document = await http.get("/openapi.json")
        job = await http.post("/v1/jobs", json={"url": "/v1/responses", "body": {"input": "hi"}})
    described = document.json() if document.status_code == httpx.codes.OK else {"paths": {}}
    named = set(re.findall(r'"#/components/(\w+)/(\w+)"', json.dumps(described)))
    missing = [name for kind, name in named if name not in described["components"][kind]]
    # The operations of a whole document are valid, so some of them are too.
    operations = {path: hash(json.dumps(of_path)) for path, of_path in described["paths"].items()}
    error = job.json()["error"]["message"]
    return {"statuses": statuses, "operations": operations, "missing": missing, "job": [job.status_code, error]}


def import_all_but_apis(names: Sequence[str]) -> None:
    """Import, once for all forks, what a whole gateway had imported beside its APIs."""
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)
    assert not imported_apis(), "a module that is no API imports one"


def imported_apis() -> list[str]:
    return [name for name in sys.modules if name.startswith(f"{APIS}.")]


def main() -> None:
    """Ask each gateway in a fork, so that the APIs that one has imported do not serve the next."""
    redis_url, *guests = sys.argv[1:]
    assert core and not imported_apis(), "the core imports an API"
    known = set(sys.modules)
    for guest in ("all", *guests):
        reader, writer = os.pipe()
        if os.fork() == 0:
            settings = importlib.import_module("penstock.gateway.settings").GatewaySettings(redis_url=redis_url)
            found = asyncio.run(asked(app_without(guest).create_app(settings)))
            if guest == "all":
                new = sys.modules.keys() - known
                found["others"] = sorted(name for name in new if not name.startswith((APIS, APP, "__")))
            os.write(writer, json.dumps(found).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            answer = json.loads(file.read() or b"null")
        os.wait()
        print(json.dumps([guest, answer]), flush=True)
        if guest == "all":
            import_all_but_apis(answer["others"])


if __name__ == "__main__":
    main()
