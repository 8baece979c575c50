"""`GET /`, `/version`, `/openapi.json` and `/docs`.

They are public: they describe the release, and reveal nothing about its models, tenants and settings.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
from starlette.routing import Route

from penstock.gateway.apis.api_docs.openapi import VERSION, document_of, page_of
from penstock.gateway.http.dialect import HttpDialect, Services
from penstock.gateway.http.entry import PUBLIC_PATHS
from penstock.gateway.route_doc import PROBE_METHODS

_PATHS = ("/", "/version", "/openapi.json", "/docs")
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


class ApiDocs:
    """The description of the API, and its routes. It is rendered once, for the first request that asks for it.

    That takes a tenth of a second. So a thread does it, and no gateway's start waits for it.
    """

    def __init__(self, services: Services) -> None:
        self.router = APIRouter()
        index, version, document, page = _PATHS
        self.router.add_api_route(index, self.index, methods=PROBE_METHODS)
        self.router.add_api_route(version, self.version, methods=PROBE_METHODS)
        self.router.add_api_route(document, self.openapi, methods=PROBE_METHODS)
        self.router.add_api_route(page, self.docs, methods=PROBE_METHODS, response_class=HTMLResponse)
        self._bodies = tuple(schema for api in services.apis for schema in api.bodies)
        self._public_paths = PUBLIC_PATHS | services.public_paths
        self._rendering = asyncio.Lock()
        self._rendered: tuple[bytes, str] | None = None

    async def index(self, request: Request, response: Response) -> Any:
        """Return what this server is, and its endpoints. A browser gets the web page instead."""
        response.headers["Vary"] = "Accept"
        links = {"docs": "/docs", "openapi": "/openapi.json"}
        described = _described(request)
        operations = sorted((route.path_format, method) for route in described for method in route.methods or ())
        endpoints = [f"{method} {path}" for path, method in operations if method != "HEAD"]
        return {"name": "penstock", "version": VERSION, **links, "endpoints": endpoints}

    async def version(self) -> dict[str, str]:
        """Return the release of this gateway."""
        return {"version": VERSION}

    async def openapi(self, request: Request) -> Response:
        """Return the OpenAPI document of this gateway."""
        document, _ = await self._texts(request)
        return Response(document, media_type="application/json")

    async def docs(self, request: Request) -> Response:
        """Return the API's documentation as a page."""
        _, page = await self._texts(request)
        return HTMLResponse(page, headers=_PAGE_HEADERS)

    async def _texts(self, request: Request) -> tuple[bytes, str]:
        async with self._rendering:
            if self._rendered is None:
                self._rendered = await asyncio.to_thread(self._render, _described(request))
            return self._rendered

    def _render(self, routes: Sequence[Route]) -> tuple[bytes, str]:
        """Return the document as JSON, and the page."""
        document = document_of(routes, self._bodies, self._public_paths)
        return json.dumps(document, ensure_ascii=False).encode(), page_of(document)


def _described(request: Request) -> list[Route]:
    """Return the routes of the app that the document describes."""
    return [route for route in request.app.routes if isinstance(route, Route) and route.include_in_schema]


def _routes(services: Services) -> list[APIRouter]:
    return [ApiDocs(services).router]


API_DOCS = HttpDialect(_routes, public_paths=_PATHS)
