"""The files of the web page: access and headers, and that they load nothing from elsewhere."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files

import httpx
import pytest

from penstock.gateway.apis.web.page_files import ASSET_PATHS, POLICY, RELEASE
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
    with httpx.Client(base_url=closed, timeout=60) as http:
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


def test_a_browser_keeps_the_files_of_a_release_and_asks_for_the_page_each_time(http: httpx.Client) -> None:
    page = http.get("/", headers=BROWSER)
    assert page.headers["cache-control"] == "no-cache"
    loaded = re.findall(r'(?:href|src)="(web/.+?)"', page.text)
    assert {path.partition("?")[0] for path in loaded} == {"web/icon.svg", "web/page.css", "web/main.js"}
    for path in loaded:
        assert path.endswith(f"?{RELEASE}")
        assert "immutable" in http.get(f"/{path}").headers["cache-control"]


@pytest.mark.parametrize("query", ["", "?", "?0123456789abcdef", f"?{RELEASE}&again"])
def test_a_file_of_another_release_is_not_kept(http: httpx.Client, query: str) -> None:
    assert http.get(f"/web/main.js{query}").headers["cache-control"] == "no-cache"
    assert http.get(f"/{query}", headers=BROWSER).headers["cache-control"] == "no-cache"


VENDORED = {
    "/web/markdown-it.js": "40ee4f75f35a4c8d24f1d7a902f4c56a26da8bd9eec5bb02ad4a672d6ba05525",
    "/web/prism.js": "d5721f43615cba7c7dc4a5290f35c3db0e0626dd8fa416a9e0b6c172514a020d",
}
"""The files of other projects, and their SHA-256. gateway/apis/web/vendor/README.md says where they are from."""


def test_files_of_other_projects_are_pinned_and_have_a_license(http: httpx.Client) -> None:
    folder = files("penstock.gateway.apis.web").joinpath("vendor")
    scripts = {f"/web/{path.name}" for path in folder.iterdir() if path.name.endswith(".js")}
    assert {path: hashlib.sha256(http.get(path).content).hexdigest() for path in scripts} == VENDORED
    for path in scripts:
        name = path.rpartition("/")[2].removesuffix(".js")
        assert "Permission is hereby granted" in folder.joinpath(f"{name}.LICENSE").read_text()


def test_files_refer_to_nothing_outside_of_the_page(http: httpx.Client) -> None:
    # The addresses in the files of other projects are names of the authors' pages.
    for path in ASSET_PATHS - VENDORED.keys():
        text = http.get(path).text
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        for module in re.findall(r'from "(.+?)"', text):
            name, _, release = module.removeprefix("./").partition("?")
            assert f"/web/{name}" in ASSET_PATHS
            assert release == RELEASE
