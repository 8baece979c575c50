"""`GET /`, `/version`, `/openapi.json` and `/docs`.

They are public: they describe the release, and reveal nothing about its models, tenants and settings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
from starlette.routing import Route

from penstock.gateway.api_docs.openapi import VERSION, document_of, operations_in
from penstock.gateway.api_docs.page import page_of
from penstock.gateway.health import PROBE_METHODS
from penstock.gateway.web.assets import PAGE, asset_response, wants_page

_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}

router = APIRouter()


class ApiDocs:
    """The description of the API with these routes, rendered once."""

    def __init__(self, routes: Sequence[Route]) -> None:
        document = document_of(routes)
        self.document = json.dumps(document, ensure_ascii=False).encode()
        self.page = page_of(document)
        self.endpoints = [f"{method.upper()} {path}" for path, method, _ in operations_in(document) if method != "head"]


@router.api_route("/", methods=PROBE_METHODS)
async def index(request: Request, response: Response) -> Any:
    """Return what this server is, and its endpoints. A browser gets the web page instead."""
    if wants_page(request):
        return asset_response(request, PAGE)
    response.headers["Vary"] = "Accept"
    docs: ApiDocs = request.app.state.api_docs
    links = {"docs": "/docs", "openapi": "/openapi.json"}
    return {"name": "penstock", "version": VERSION, **links, "endpoints": docs.endpoints}


@router.api_route("/version", methods=PROBE_METHODS)
async def version() -> dict[str, str]:
    """Return the release of this gateway."""
    return {"version": VERSION}


@router.api_route("/openapi.json", methods=PROBE_METHODS)
async def openapi(request: Request) -> Response:
    """Return the OpenAPI document of this gateway."""
    docs: ApiDocs = request.app.state.api_docs
    return Response(docs.document, media_type="application/json")


@router.api_route("/docs", methods=PROBE_METHODS, response_class=HTMLResponse)
async def docs(request: Request) -> Response:
    """Return the API's documentation as a page."""
    page: ApiDocs = request.app.state.api_docs
    return HTMLResponse(page.page, headers=_PAGE_HEADERS)
