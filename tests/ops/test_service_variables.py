"""Our processes beside Kubernetes services whose names give variables like our settings."""

from __future__ import annotations

import os

import httpx
import pytest
from fakes.processes.node_process import NodeProcess
from fakes.processes.python_process import run_python
from faults.tools.processes import GatewayProcess
from runtime.test_settings import injected

from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.settings import NodeSettings

SERVICES = ("penstock-gateway", "penstock-node", "penstock-node-metrics", "penstock-client", "penstock-celery")


@pytest.fixture(autouse=True)
def services(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in SERVICES:
        for variable, value in injected(service).items():
            monkeypatch.setenv(variable, value)


def test_a_node_and_a_gateway_serve_beside_services_of_their_names(redis_url: str) -> None:
    with NodeProcess(redis_url, pool="served"), GatewayProcess(redis_url) as gateway:
        models = httpx.get(f"{gateway.url}/v1/models", timeout=60).json()
        assert [model["id"] for model in models["data"]] == ["reference"]


@pytest.mark.parametrize(("part", "hint"), [("gateway", "; did you mean PENSTOCK_GATEWAY_PORT?"), ("node", "")])
def test_a_typo_beside_them_is_still_refused(redis_url: str, part: str, hint: str) -> None:
    words = ("-m", "penstock", part, *(("model",) if part == "node" else ()))
    env = os.environ | {"PENSTOCK_REDIS_URL": redis_url, f"PENSTOCK_{part.upper()}_PROT": "8000"}
    ran = run_python(*words, env=env)
    assert ran.returncode == 2
    assert ran.stderr == f"penstock: unknown environment variable PENSTOCK_{part.upper()}_PROT{hint}\n"


def test_ports_of_services_are_not_taken_for_ours() -> None:
    assert GatewaySettings.load().port == 8000
    assert NodeSettings.load(model="any", redis_url="unix://x").metrics_port is None
    assert GatewaySettings.load(port=1).port == 1
