"""The overlays of ops/deploy/kubernetes as `kubectl kustomize` renders them, and their schemas."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any

import yaml

from tests.source_tree import ROOT

FOLDER = ROOT / "ops/deploy/kubernetes"
OVERLAYS = sorted(path.parent.name for path in FOLDER.glob("overlays/*/kustomization.yaml"))
KUBECTL = shutil.which("kubectl")
Resource = dict[str, Any]
Schema = dict[str, Any]


@cache
def rendered(overlay: str) -> tuple[Resource, ...]:
    """Return the resources of an overlay."""
    assert KUBECTL is not None
    run = subprocess.run(
        [KUBECTL, "kustomize", str(FOLDER / "overlays" / overlay)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return tuple(yaml.safe_load_all(run.stdout))


def resource(overlay: str, kind: str, name: str) -> Resource:
    """Return one resource."""
    (found,) = [one for one in rendered(overlay) if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


@cache
def definitions() -> dict[tuple[str, str], Schema]:
    """Return the vendored schemas by version and kind, which refuse unknown fields."""
    found = {}
    for path in FOLDER.glob("crds/*.json"):
        spec = json.loads(path.read_text())["spec"]
        for version in spec["versions"]:
            schema = _strict(version["schema"]["openAPIV3Schema"])
            # Kubernetes checks the metadata of all resources alike.
            schema["properties"]["metadata"] = {"type": "object"}
            found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _strict(value) for name, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not open_ended:
        made["additionalProperties"] = False
    return made


def pods_of(one: Resource) -> Iterator[Resource]:
    """Yield the templates of the pods of a workload, none for another resource."""
    spec = one.get("spec", {})
    groups = spec.get("leaderWorkerTemplate", {})
    for template in (spec.get("template"), groups.get("leaderTemplate"), groups.get("workerTemplate")):
        if isinstance(template, dict) and "spec" in template:
            yield template


def containers_of(one: Resource) -> Iterator[Resource]:
    """Yield the containers of a workload."""
    for pod in pods_of(one):
        yield from pod["spec"]["containers"]
