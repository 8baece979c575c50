"""Official clients against `penstock serve`: those that install in seconds. `make clients` runs all of them."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator

import pytest
from clients.catalog import CLIENTS, Client
from clients.running import run_client
from clients.server import Server, encoder_server, running_server
from fixtures.minilm import PACKAGE, has_minilm

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.process, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def encoders() -> Iterator[Server]:
    if not has_minilm():
        pytest.skip(f"the package {PACKAGE} is not installed")
    with encoder_server() as server:
        yield server


@pytest.mark.parametrize(
    "client", [client for client in CLIENTS if client.installs_in_seconds], ids=lambda client: client.name
)
def test_every_check_of_the_client_passes(client: Client, request: pytest.FixtureRequest) -> None:
    if client.is_node and shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    if client.platform not in ("", f"{platform.system()} {platform.machine()}"):
        pytest.skip(f"the package is for {client.platform} only")
    server: Server = request.getfixturevalue("encoders" if client.is_for_encoders else "server")
    report = run_client(client, server)
    assert report.passed, "\n".join(f"{check}: {problem}" for check, problem in report.problems.items())
