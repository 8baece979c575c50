"""The files for Kubernetes: they render, fit the schemas, and name settings, commands and each other correctly."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from typer.main import get_command

from penstock.cli.main import app
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.rank import RankSettings
from penstock.gpu_node.settings import NodeSettings
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.client.settings import ClientSettings
from penstock.runtime.settings import Settings
from tests.ops.kubernetes_files import (
    FOLDER,
    KUBECTL,
    OVERLAYS,
    Resource,
    containers_of,
    definitions,
    pods_of,
    rendered,
    resource,
)

pytestmark = [pytest.mark.process, pytest.mark.skipif(KUBECTL is None, reason="needs kubectl (kubectl kustomize)")]
KINDS_OF_OTHERS = {"ScaledObject", "ServiceMonitor", "PodMonitor", "HTTPRoute", "LeaderWorkerSet"}
SETTINGS: dict[str, type[Settings]] = {
    "NODE": NodeSettings,
    "GATEWAY": GatewaySettings,
    "CELERY": CelerySettings,
    "CLIENT": ClientSettings,
    "RANK": RankSettings,
}
PLAIN = {"PENSTOCK_REDIS_URL", "PENSTOCK_KEY_PEPPER", "PENSTOCK_FILES_URL"}


def variables_of(overlay: str, one: Resource) -> Iterator[tuple[str, str]]:
    """Yield names and values of the variables of a workload, those of its ConfigMaps included."""
    for container in containers_of(one):
        for source in container.get("envFrom", ()):
            yield from resource(overlay, "ConfigMap", source["configMapRef"]["name"])["data"].items()
        for variable in container.get("env", ()):
            yield variable["name"], variable.get("value", "")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_resources_of_other_projects_fit_their_definitions(overlay: str) -> None:
    found = [one for one in rendered(overlay) if one["kind"] in KINDS_OF_OTHERS]
    assert found
    for one in found:
        errors = Draft7Validator(definitions()[one["apiVersion"], one["kind"]]).iter_errors(one)
        assert [f"{one['kind']}: {error.json_path}: {error.message}" for error in errors] == []


@pytest.mark.slow  # The package of schemas is large, and only slow tests install it.
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_resources_of_kubernetes_fit_its_schemas(overlay: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    found = [one for one in rendered(overlay) if one["kind"] not in KINDS_OF_OTHERS]
    assert {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget", "HorizontalPodAutoscaler"} <= {
        one["kind"] for one in found
    }
    for one in found:
        kubernetes_validate.validate(one, "1.37", strict=True)
    broken = {**found[0], "unknown": 1}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.37", strict=True)


def test_an_unknown_field_of_a_scaled_object_is_noticed() -> None:
    scaler = resource("gpu-from-zero", "ScaledObject", "qwen-node")
    validator = Draft7Validator(definitions()[scaler["apiVersion"], "ScaledObject"])
    spec: dict[str, Any] = scaler["spec"] | {"coolDownPeriod": 1}
    assert [error.validator for error in validator.iter_errors(scaler | {"spec": spec})] == ["additionalProperties"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_variable_is_a_setting_with_an_allowed_value(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in rendered(overlay):
        variables = dict(variables_of(overlay, one))
        of_node = {name: value for name, value in variables.items() if name.startswith("PENSTOCK_NODE_") and value}
        for name in variables:
            if name.startswith("PENSTOCK_") and name.removesuffix("_FILE") not in PLAIN:
                part, _, setting = name.removeprefix("PENSTOCK_").partition("_")
                assert setting.lower() in SETTINGS[part].model_fields, name
        if of_node:
            with monkeypatch.context() as patched:
                for name, value in of_node.items():
                    patched.setenv(name, value)
                assert NodeSettings.load(redis_url="unix://x").pool_name == of_node["PENSTOCK_NODE_POOL"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_containers_run_without_rights_and_read_secrets_from_files(overlay: str) -> None:
    for spec in [pod["spec"] for one in rendered(overlay) for pod in pods_of(one)]:
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        for container in spec["containers"]:
            context = container["securityContext"]
            assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
            assert container["image"].startswith("registry.example.com/")
            assert not any("secretKeyRef" in variable.get("valueFrom", {}) for variable in container.get("env", ()))
        (secrets,) = [volume for volume in spec["volumes"] if "secret" in volume]
        urls = [item["key"] for item in secrets["secret"]["items"] if item["key"].endswith("_url")]
        assert len(urls) == (0 if spec["containers"][0]["name"] == "rank" else 1)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_longer_to_stop_than_their_drain(overlay: str) -> None:
    drains = {}
    for one in rendered(overlay):
        for name, value in variables_of(overlay, one):
            if name.endswith("_DRAIN_S"):
                pod = next(pods_of(one))
                hook = pod["spec"]["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {})
                spare_s = pod["spec"]["terminationGracePeriodSeconds"] - int(value) - hook.get("seconds", 0)
                drains[one["metadata"]["name"]] = spare_s
    assert len(drains) == 2
    assert all(spare_s >= 15 for spare_s in drains.values()), drains


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_commands_and_ports_exist(overlay: str) -> None:
    commands = get_command(app)
    for one in rendered(overlay):
        for container in containers_of(one):
            program, *words = container["args"]
            if program == "penstock":
                found: Any = commands.commands[words[0]]  # type: ignore[attr-defined]
                while hasattr(found, "commands"):
                    words = words[1:]
                    found = found.commands[words[0]]
                options = {option for parameter in found.params for option in parameter.opts}
                assert [word for word in words if word.startswith("--") and word not in options] == []
            ports = {port["name"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if (call := container.get(probe, {}).get("httpGet")) is not None:
                    assert call["port"] in ports


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_find_pods_and_targets_exist(overlay: str) -> None:
    resources = rendered(overlay)
    pods = [pod["metadata"]["labels"] for one in resources for pod in pods_of(one)]
    services = [one["metadata"]["labels"] for one in resources if one["kind"] == "Service"]
    workloads = {(one["kind"], one["metadata"]["name"]) for one in resources if list(pods_of(one))}
    for one in resources:
        spec = one.get("spec", {})
        if (target := spec.get("scaleTargetRef")) is not None:
            assert (target.get("kind", "Deployment"), target["name"]) in workloads, one["metadata"]["name"]
        selector = spec.get("podSelector") or spec.get("selector") or {}
        labels = selector.get("matchLabels", selector)
        if labels and one["kind"] != "PersistentVolumeClaim":
            among = services if one["kind"] == "ServiceMonitor" else pods
            assert any(labels.items() <= other.items() for other in among), (one["kind"], labels)


def test_nodes_are_replaced_without_a_second_one_beside_them() -> None:
    node = resource("gpu-from-zero", "Deployment", "qwen-node")
    assert node["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    (container,) = containers_of(node)
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert node["spec"]["replicas"] == 0


def test_a_group_of_hosts_is_one_node_whose_ranks_find_and_reach_their_leader() -> None:
    group = resource("gpu-two-hosts", "LeaderWorkerSet", "large-node")
    leader, worker = pods_of(group)
    variables = dict(variables_of("gpu-two-hosts", group))
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    assert int(variables["PENSTOCK_NODE_REMOTE_RANKS"]) == size - 1
    assert int(variables["PENSTOCK_NODE_TENSOR_PARALLEL_SIZE"]) == size
    # The leader waits for its ranks before it is ready.
    assert group["spec"]["startupPolicy"] == "LeaderCreated"
    words = worker["spec"]["containers"][0]["args"]
    port = words[words.index("--join") + 1].partition(":")[2]
    assert variables["PENSTOCK_NODE_RANK_ADDRESS"] == f"$(POD_IP):{port}"
    secrets = [variables[f"PENSTOCK_{part}_RANK_SECRET_FILE"] for part in ("NODE", "RANK")]
    mounted = [mount["mountPath"] for mount in worker["spec"]["containers"][0]["volumeMounts"]]
    assert secrets[0] == secrets[1] == f"{mounted[0]}/rank_secret"
    policy = resource("gpu-two-hosts", "NetworkPolicy", "large-ranks")["spec"]
    for pod in (leader, worker):
        labels = pod["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()
        assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_a_route_replaces_the_ingress_and_neither_buffers_or_cuts_streams() -> None:
    kinds = {one["kind"] for one in rendered("gpu-from-zero")}
    assert "HTTPRoute" in kinds and "Ingress" not in kinds
    (rule,) = resource("gpu-from-zero", "HTTPRoute", "gateway")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    notes = resource("cpu", "Ingress", "gateway")["metadata"]["annotations"]
    settings = {name.rpartition("/")[2]: value for name, value in notes.items()}
    assert settings["proxy-buffering"] == "off"
    assert int(settings["proxy-read-timeout"]) >= 3600


KUBECTL_STAND_IN = """#!/bin/sh
shift 2
case "$1 $2" in
"get deployments")
    case $4 in
    */component=node) echo deployment.apps/smollm-node; echo deployment.apps/new-node;;
    *) echo "deployment.apps/${4##*=}";;
    esac;;
"rollout history") echo "1 <none>"; [ "$3" = deployment.apps/new-node ] || echo "2 <none>";;
"get leaderworkersets"*) echo "$GROUPS_OF_HOSTS";;
*) echo "$*" >> "$0.log";;
esac
"""


@pytest.mark.parametrize(("groups", "status"), [("", 0), ("leaderworkerset/large-node", 1)])
def test_a_rollback_takes_back_worker_gateway_and_then_nodes(tmp_path: Path, groups: str, status: int) -> None:
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL_STAND_IN)
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GROUPS_OF_HOSTS": groups}
    done = subprocess.run([FOLDER / "rollback.sh"], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, groups in done.stderr) == (status, True), done.stderr
    parts = [f"deployment.apps/{part}" for part in ("worker", "gateway", "smollm-node")]
    wanted = [[f"rollout undo {part}", f"rollout status {part} --timeout 40m"] for part in parts]
    assert program.with_name("kubectl.log").read_text().splitlines() == [line for lines in wanted for line in lines]
    assert "new-node has one revision" in done.stdout


def test_another_release_changes_nothing_but_images(tmp_path: Path) -> None:
    copy = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, copy)
    for path in copy.glob("overlays/*/kustomization.yaml"):
        path.write_text(path.read_text().replace("newTag: 0.1.0", "newTag: 0.1.1"))
    for overlay in OVERLAYS:
        command = ["kubectl", "kustomize", str(copy / "overlays" / overlay)]
        later = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        assert ":0.1.0" not in later
        assert tuple(yaml.safe_load_all(later.replace(":0.1.1", ":0.1.0"))) == rendered(overlay)


def test_every_folder_of_the_page_exists_and_the_other_way_round() -> None:
    page = (FOLDER / "README.md").read_text()
    named = set(re.findall(r"^\| `([\w/-]+)` \|", page, re.MULTILINE))
    parts = (FOLDER.glob("components/*"), FOLDER.glob("overlays/*"), FOLDER.glob("base/*/"))
    assert named == {str(path.relative_to(FOLDER)) for found in parts for path in found if path.is_dir()}
    assert {path.name for path in FOLDER.glob("crds/*.json")} == set(
        re.findall(r"`(\w+\.json)`", (FOLDER / "crds/README.md").read_text())
    )
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (rule,) = yaml.safe_load(block)["rules"]
    (metric,) = resource("cpu", "HorizontalPodAutoscaler", "gateway")["spec"]["metrics"]
    assert rule["seriesQuery"].startswith(metric["pods"]["metric"]["name"])
