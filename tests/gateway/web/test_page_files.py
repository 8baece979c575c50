"""The files of the web page: access and headers, and that they load nothing from elsewhere."""

from __future__ import annotations

import re

import httpx
import pytest

from penstock.gateway.web.routes import ASSET_PATHS, POLICY
from tests.gateway.conftest import EchoEngine, Stack

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.fixture(scope="module")
def closed(stack: Stack, shared_engine: EchoEngine) -> str:
    """A gateway that requires keys."""
    url: str = stack.start_gateway(require_keys=True)
    return url


def test_browser_gets_the_page_and_other_clients_the_index(http: httpx.Client) -> None:
    page, index = http.get("/", headers=BROWSER), http.get("/")
    assert "<title>penstock</title>" in page.text
    assert index.json()["name"] == "penstock"
    assert page.headers["vary"] == index.headers["vary"] == "Accept"


def test_head_has_the_headers_of_get(http: httpx.Client) -> None:
    for headers in (BROWSER, {}):
        head, get = http.head("/", headers=headers), http.get("/", headers=headers)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == get.headers["content-length"]


def test_page_and_its_files_need_no_key(closed: str) -> None:
    with httpx.Client(base_url=closed) as http:
        assert http.get("/", headers=BROWSER).status_code == 200
        assert {http.get(path).status_code for path in ASSET_PATHS} == {200}
        assert http.get("/dashboard").status_code == 401
        assert http.get("/web/no-such-file.js").status_code == 401


def test_policy_allows_the_gateway_alone(http: httpx.Client) -> None:
    for path in ("/", *ASSET_PATHS):
        headers = http.get(path, headers=BROWSER).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in POLICY
    assert "http" not in POLICY


def test_files_are_not_sent_again_until_they_change(http: httpx.Client) -> None:
    first = http.get("/web/main.js")
    again = http.get("/web/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert http.get("/web/nothing.js").status_code == 404


def test_files_refer_to_nothing_outside_of_the_page(http: httpx.Client) -> None:
    for path in ASSET_PATHS:
        text = http.get(path).text
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        for module in re.findall(r'from "(.+?)"', text):
            assert f"/web/{module.removeprefix('./')}" in ASSET_PATHS
