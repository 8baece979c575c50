"""The OpenAPI description: complete, valid, public, and with examples that run."""

from __future__ import annotations

import argparse
import asyncio
import html
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route, WebSocketRoute

from penstock import __version__
from penstock.gateway.apis.api_docs import openapi, routes
from penstock.gateway.app import create_app
from penstock.gateway.http.dialect import RouteIf
from penstock.gateway.request.encoding import MAX_LIST_ITEMS
from penstock.gateway.settings import GatewaySettings
from tests.gateway.conftest import MODEL, EchoEngine, Stack, routes_of

PUBLIC = ("/", "/version", "/openapi.json", "/docs")
BODIES = {
    "/v1/chat/completions": "ChatRequest",
    "/v1/completions": "CompletionRequest",
    "/tokenize": "TokenizeRequest",
    "/detokenize": "DetokenizeRequest",
    "/v1/embeddings": "EmbeddingRequest",
    "/v1/rerank": "RerankRequest",
    "/score": "ScoreRequest",
}


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/openapi.json").json()
    return found


def test_document_has_every_route_of_the_gateway_and_no_other(document: dict[str, Any]) -> None:
    app = create_app(GatewaySettings.load(redis_url="redis://127.0.0.1:1"))
    served = {(route.path_format, method.lower()) for route in routes_of(app) for method in route.methods or ()}
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert served == described
    assert len(served) > 15


def test_document_is_valid_openapi(document: dict[str, Any]) -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(document)
    assert document["openapi"].startswith("3.1")


def test_document_describes_bodies_by_their_schemas(document: dict[str, Any]) -> None:
    for path, name in BODIES.items():
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
    job = document["paths"]["/v1/jobs"]["post"]
    one, of_list = job["requestBody"]["content"]["application/json"]["schema"]["oneOf"]
    assert one == of_list["items"] == {"$ref": "#/components/schemas/JobRequest"}
    assert of_list["maxItems"] == MAX_LIST_ITEMS
    assert {*job["responses"]} == {"202", "207", "default"}
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert {"model", "messages", "stream", "tools", "logprobs"} <= chat["properties"].keys()
    assert chat["required"] == ["messages"]


def test_every_reference_of_the_document_has_a_target(document: dict[str, Any]) -> None:
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert names
    assert names <= document["components"]["schemas"].keys()


def test_operations_have_ids_of_their_own_and_summaries(document: dict[str, Any]) -> None:
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    assert [one["operationId"] for one in operations if not one["summary"] or one["summary"].startswith("/")] == []


def test_streaming_routes_describe_events_and_how_to_resume(document: dict[str, Any]) -> None:
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert {"application/json", "text/event-stream", "application/x-ndjson"} == chat["responses"]["200"][
        "content"
    ].keys()
    assert {"Idempotency-Key", "after"} == {one["name"] for one in chat["parameters"]}
    assert [*document["paths"]["/tokenize"]["post"]["responses"]["200"]["content"]] == ["application/json"]


@pytest.mark.parametrize("path", sorted(BODIES))
def test_answer_has_the_members_that_the_document_names(
    http: httpx.Client, document: dict[str, Any], path: str
) -> None:
    operation = document["paths"][path]["post"]
    body = document["components"]["schemas"][BODIES[path]]["examples"][0] | {"model": MODEL}
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    answer = http.post(path, json={name: value for name, value in body.items() if name != "stream"})
    assert answer.status_code == 200
    assert {*schema["required"]} <= answer.json().keys() <= schema["properties"].keys()
    validator = pytest.importorskip("openapi_schema_validator")
    validator.OAS31Validator({**schema, "components": document["components"]}).validate(answer.json())


def test_page_needs_no_other_host_and_no_script(http: httpx.Client) -> None:
    answer = http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"<script|<link|<img|@import|url\(|src=|https?://(?!127\.0\.0\.1)", answer.text)


def test_page_shows_every_operation_and_field(http: httpx.Client, document: dict[str, Any]) -> None:
    page = http.get("/docs").text
    for path, methods in document["paths"].items():
        for method in methods.keys() - {"head"}:
            assert f'<span class="method">{method.upper()}</span> <code>{path}</code>' in page
    for name in document["components"]["schemas"]["ChatRequest"]["properties"]:
        assert f"<code>{name}</code>" in page


def examples_of(page: str) -> list[str]:
    return [
        html.unescape(found) for found in re.findall(r'<pre class="example" tabindex="0">(.*?)</pre>', page, re.DOTALL)
    ]


def test_every_example_of_the_page_runs(
    stack: Stack, engine: EchoEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_FILES_URL", str(tmp_path))
    url = stack.start_gateway()
    examples = examples_of(httpx.get(f"{url}/docs", timeout=60).text)
    assert len(examples) >= len(BODIES) + len(PUBLIC)
    assert {path for path in BODIES if any(f'{path}"' in one for one in examples)} == {*BODIES}
    variables = {"PENSTOCK_URL": url, "PENSTOCK_KEY": "none", "PENSTOCK_MODEL": MODEL}
    # No model of these tests labels texts.
    for example in (one for one in examples if "/classify" not in one and "/predict" not in one):
        answer = answer_to(example, variables)
        assert answer.is_success, f"{example}\n{answer.text}"
        assert answer.text.strip(), example


def answer_to(command: str, variables: dict[str, str]) -> httpx.Response:
    """Send what `curl` would send for a shell's command. The machine may have no curl."""
    words = ["sh", "-c", f"curl() {{ printf '%s\\0' \"$@\"; }}\n{command}"]
    done = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, timeout=60, check=True)
    curl = argparse.ArgumentParser(exit_on_error=False)
    curl.add_argument("url")
    for flag in ("-s", "-S", "--fail-with-body"):
        curl.add_argument(flag, action="store_true")
    curl.add_argument("-H", dest="headers", action="append", default=[])
    curl.add_argument("-d", dest="body")
    sent = curl.parse_args(done.stdout.split("\0")[:-1])
    headers = [tuple(header.split(": ", 1)) for header in sent.headers]
    method = "GET" if sent.body is None else "POST"
    with httpx.stream(method, sent.url, headers=headers, content=sent.body, timeout=60) as answer:
        if sent.url.endswith("/v1/jobs/events"):
            # It never ends.
            return httpx.Response(answer.status_code, text=next(answer.iter_text()))
        answer.read()
        return answer


async def test_first_requests_for_the_description_get_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    render = Mock(wraps=openapi.document_of)
    monkeypatch.setattr(routes, "document_of", render)
    app = create_app(GatewaySettings.load(redis_url="redis://127.0.0.1:1"))
    assert not render.called, "a gateway's start need not wait for it"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        answers = await asyncio.gather(*(client.get("/openapi.json") for _ in range(5)), client.get("/docs"))
    assert len({answer.content for answer in answers[:5]}) == render.call_count == 1
    assert all(answer.status_code == 200 for answer in answers)


def test_no_request_builds_routes() -> None:
    """FastAPI builds the routes of an included router during the first request, which holds the loop for 20 ms."""
    app = create_app(GatewaySettings.load(redis_url="redis://127.0.0.1:1"))
    assert {*map(type, app.routes)} <= {Route, RouteIf, APIRoute, WebSocketRoute}


def test_index_names_the_release_and_every_endpoint(http: httpx.Client, document: dict[str, Any]) -> None:
    found = http.get("/").json()
    assert (found["name"], found["version"]) == ("penstock", __version__)
    named = {tuple(one.split()) for one in found["endpoints"]}
    paths = document["paths"]
    assert named == {(m.upper(), path) for path, methods in paths.items() for m in methods if m != "head"}
    assert http.get(found["docs"]).status_code == http.get(found["openapi"]).status_code == 200


def test_version_is_the_packages(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize("path", [*PUBLIC, "/v1/models", f"/v1/models/{MODEL}", "/health", "/ready"])
def test_head_answers_with_the_headers_of_get(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-type", "content-length"):
        assert head.headers[name] == get.headers[name]


def test_model_is_found_by_its_id_with_and_without_escaped_slashes(http: httpx.Client) -> None:
    for path in (MODEL, MODEL.replace("/", "%2F"), "echo-alias", "echo-tuned"):
        found = http.get(f"/v1/models/{path}").json()
        assert found["id"] in (MODEL, "echo-alias", "echo-tuned")
        assert found["root"] == MODEL
    answer = http.get("/v1/models/acme/none")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_description_is_public_and_everything_else_needs_a_key(stack: Stack, engine: EchoEngine) -> None:
    url = stack.start_gateway(require_keys=True)
    with httpx.Client(base_url=url, timeout=60) as client:
        document = client.get("/openapi.json").json()
        for path in PUBLIC:
            assert client.get(path).status_code == client.head(path).status_code == 200
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                is_open = path in (*PUBLIC, "/health", "/ready") and method in ("get", "head")
                assert ("security" in operation) is not is_open
                answer = client.request(method, path.replace("{model}", MODEL))
                assert (answer.status_code == 401) is not is_open, (method, path)
        assert MODEL not in client.get("/docs").text
        assert MODEL not in json.dumps(document)


def test_browsers_of_allowed_origins_may_read_the_description(stack: Stack, engine: EchoEngine) -> None:
    origin = "https://app.example"
    url = stack.start_gateway(cors_origins=(origin,))
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x"}
    with httpx.Client(base_url=url, timeout=60) as client:
        for path in PUBLIC:
            assert client.get(path, headers={"Origin": origin}).headers["access-control-allow-origin"] == origin
        preflight = client.options("/tokenize", headers=headers)
        assert preflight.status_code == 200
        assert {"GET", "HEAD", "POST"} <= {*preflight.headers["access-control-allow-methods"].split(", ")}
        assert (
            "access-control-allow-origin"
            not in client.get("/version", headers={"Origin": "https://evil.example"}).headers
        )
