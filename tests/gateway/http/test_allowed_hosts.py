"""The Host header while a gateway has no API keys: names that a web site could resolve to this machine are refused."""

from __future__ import annotations

import socket

import httpx
import pytest
from starlette.datastructures import Headers

from penstock.contract.errors import ForbiddenError
from penstock.gateway.http.allowed_hosts import AllowedHosts
from tests.gateway.conftest import MODEL, EchoEngine, Stack

FOREIGN = {"Host": "attacker.example:8000"}
ORIGIN = {"Origin": "http://attacker.example:8000"}
LOCAL = ["localhost", "LOCALHOST.:8000", "127.0.0.1:8000", "[::1]:8000", "192.168.1.20", "gateway:8000", "box.local"]
STRANGE = ["attacker.example", "attacker.example.:8000", "localhost.attacker.example", "127.0.0.1.attacker.example"]


def is_allowed(hosts: AllowedHosts, host: str) -> bool:
    try:
        hosts.check(Headers({"host": host}))
    except ForbiddenError:
        return False
    return True


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_loopback_address_allows_addresses_and_local_names(address: str) -> None:
    hosts = AllowedHosts(address)
    assert {host: is_allowed(hosts, host) for host in LOCAL} == dict.fromkeys(LOCAL, True)
    malformed = ["", ":8000", "[::1", "a b.c", "attacker.example#localhost"]
    assert {host: is_allowed(hosts, host) for host in STRANGE + malformed} == dict.fromkeys(STRANGE + malformed, False)
    assert is_allowed(hosts, socket.gethostname())
    hosts.check(Headers())  # as in HTTP/1.0


def test_other_addresses_allow_every_name_until_names_are_given() -> None:
    assert is_allowed(AllowedHosts("0.0.0.0"), "llm.example")
    hosts = AllowedHosts("0.0.0.0", ("llm.example:443", "Other.Example"))
    names = {"llm.example:8000": True, "other.example": True, "gateway:8000": True, "attacker.example": False}
    assert {host: is_allowed(hosts, host) for host in names} == names
    assert is_allowed(AllowedHosts("127.0.0.1", ("*",)), "attacker.example")


def test_foreign_host_reaches_nothing_but_public_paths(http: httpx.Client) -> None:
    for path in ("/v1/models", "/v1/jobs", "/dashboard", "/metrics", "/health/nodes", "/no/such/path"):
        refused = http.get(path, headers=FOREIGN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed"), path
    refused = http.post("/v1/completions", json={"model": MODEL, "prompt": "hi"}, headers=FOREIGN | ORIGIN)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "host")
    assert "PENSTOCK_GATEWAY_ALLOWED_HOSTS" in refused.json()["error"]["message"]
    assert http.get("/health", headers=FOREIGN).status_code == 200


def test_foreign_host_needs_a_key_or_its_name_in_the_settings(stack: Stack, shared_engine: EchoEngine) -> None:
    named = stack.start_gateway(allowed_hosts=("attacker.example",))
    assert httpx.get(f"{named}/v1/models", headers=FOREIGN, timeout=60).status_code == 200
    closed = stack.start_gateway(require_keys=True)
    assert httpx.get(f"{closed}/v1/models", headers=FOREIGN, timeout=60).status_code == 401
