"""docker-compose.yml without Docker: its commands, environments and healthchecks, run as local processes.

Only what a container changes is translated: host names, ports, and paths inside the images and volumes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml
from fakes.acl_users import refusals_in
from fakes.command import run_command
from faults.tools.redis_process import free_port
from fixtures.otlp_collector import OtlpCollector
from fixtures.tiny_model import make_tiny_model

from penstock.gpu_node.settings import NodeSettings, engine_config
from penstock.runtime.embedded_redis import find_redis_server
from penstock.runtime.tracing.export import Tracing
from penstock.runtime.tracing.setup import tracing_of
from tests.source_tree import ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "ops/Dockerfile").read_text()
VARIABLE = re.compile(r"\$\{(\w+):[-?]([^}]*)\}")
ACL_SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "ops/acl/compose.yml").read_text())["services"]
START_TIMEOUT_S = 60


class Host:
    """This machine in place of the containers."""

    def __init__(
        self, folder: Path, variables: Mapping[str, str], services: Mapping[str, dict[str, Any]] = SERVICES
    ) -> None:
        self._folder = folder
        self._services = services
        self._variables = variables
        self.gateway_port, self.redis_port = free_port(), free_port()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.data = folder / "data"
        self.first_key = folder / "first-key"
        self.bin = folder / "bin"
        for made in (self.data, self.bin, folder / "redis", folder / "home"):
            made.mkdir()
        server = find_redis_server()
        said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout
        self._knows_read_only_keys = "v=6." not in said
        client = server.with_name(server.name.replace("-server", "-cli"))
        (self.bin / "redis-server").symlink_to(server)
        entry = self.bin / "docker-entrypoint.sh"
        entry.write_text('#!/bin/sh\nexec "$@"\n')
        entry.chmod(0o700)
        (self.bin / "redis-cli").symlink_to(client if client.exists() else str(shutil.which("redis-cli")))

    def start(self, service: str) -> None:
        words = [self._translate(word) for word in self._services[service]["command"]]
        if service == "redis":
            words += ["--bind", "127.0.0.1", "--port", str(self.redis_port)]
        with (self._folder / f"{service}.log").open("wb") as log:
            self._running[service] = subprocess.Popen(
                words, env=self._env(service), cwd=self._workdir(service), stdout=log, stderr=log, process_group=0
            )

    def wait_until_healthy(self, service: str) -> None:
        kind, *words = self._services[service]["healthcheck"]["test"]
        assert kind in ("CMD", "CMD-SHELL")
        words = [self._translate(word) for word in words]
        command = ["sh", "-c", *words] if kind == "CMD-SHELL" else words
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            checked = subprocess.run(command, env=self._env(service), cwd=self.data, capture_output=True, timeout=30)
            if checked.returncode == 0:
                return
            assert self._running[service].poll() is None, self.log(service)
            assert time.monotonic() < deadline, f"{checked.stdout!r} {checked.stderr!r} {self.log(service)}"
            # A check is a process that imports penstock, for half a second of CPU time.
            time.sleep(1.5)

    def stop(self, service: str) -> int:
        """Stop a service as Docker does: SIGTERM, and after the grace period SIGKILL."""
        running = self._running[service]
        running.send_signal(signal.SIGTERM)
        return running.wait(int(str(self._services[service]["stop_grace_period"]).removesuffix("s")))

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

    def _workdir(self, service: str) -> Path:
        return self._folder / "redis" if service == "redis" else self.data

    def _env(self, service: str) -> dict[str, str]:
        path = os.pathsep.join((str(self.bin), str(Path(sys.executable).parent), os.environ["PATH"]))
        own = {name: self._translate(value) for name, value in self._services[service].get("environment", {}).items()}
        image = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        # A container has a host name of its own; here other tests' nodes have this machine's.
        image["PENSTOCK_NODE_NAME"] = f"{service}-{self.gateway_port}"
        # With kernels that are compiled already, the native runner is there in a tenth of a second, torch in three.
        image |= {"PENSTOCK_NODE_DTYPE": "bfloat16", "PENSTOCK_CACHE": os.environ["PENSTOCK_CACHE"]}
        return {"PATH": path, "HOME": str(self._folder / "home"), **image, **own}

    def _translate(self, word: str) -> str:
        word = VARIABLE.sub(lambda m: self._variables.get(m[1]) or m[2], word).replace("$$", "$")
        for theirs, ours in (
            ("redis://redis:", "redis://127.0.0.1:"),
            ("@redis:", "@127.0.0.1:"),
            ("0.0.0.0", "127.0.0.1"),
            ("/tmp/first-key", str(self.first_key)),
            ("6379", str(self.redis_port)),
            ("8000", str(self.gateway_port)),
            ("/etc/penstock/", f"{ROOT}/ops/"),
            ("/files", f"{self._folder}/files"),
            ("/run/secrets/", f"{self._folder}/secrets/"),
            ("/opt/penstock/ops/", f"{ROOT}/ops/"),
            *(() if self._knows_read_only_keys else (("%R~", "~"),)),
        ):
            word = word.replace(theirs, ours)
        return word


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    model = make_tiny_model(tmp_path / "tiny")
    host = Host(tmp_path, {"MODEL": str(model), "KV_CACHE_GIB": "0.01"})
    yield host
    host.kill_all()


@pytest.mark.timeout(150)
def test_the_services_serve_a_stream_and_a_batch(host: Host) -> None:
    host.start("redis")
    host.wait_until_healthy("redis")
    for service in ("gateway", "gpu_node-cpu", "worker"):
        host.start(service)
    for service in ("gateway", "worker", "gpu_node-cpu"):
        host.wait_until_healthy(service)

    assert_redis_keeps_what_it_accepted(host.redis_port)
    assert_stream_over_http(host)
    assert_batch(host)

    for service in ("worker", "gpu_node-cpu", "gateway", "redis"):
        assert host.stop(service) in (0, -signal.SIGTERM), host.log(service)


def test_one_service_has_all_gpus_and_a_node_on_each() -> None:
    gpu, cpu = SERVICES["gpu_node"], SERVICES["gpu_node-cpu"]
    assert gpu["command"] == [*cpu["command"], "--replicas", "auto"]
    (devices,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (devices["driver"], devices["count"]) == ("nvidia", "all")
    # The worker's metrics are on 9101 of another container.
    assert gpu["environment"] == cpu["environment"] and gpu["healthcheck"] == cpu["healthcheck"]


def make_secrets(folder: Path, redis_address: str = "redis:6379") -> dict[str, str]:
    """Run the commands in the overlay's head. Return each secret by the name of its file."""
    head = (ROOT / "ops/acl/compose.yml").read_text().partition("\n#   echo COMPOSE_FILE")[0]
    commands = [line.removeprefix("#   ") for line in head.splitlines() if line.startswith("#   ")]
    subprocess.run(["sh", "-ec", "umask 077\n" + "\n".join(commands)], cwd=folder, check=True)
    secrets = sorted((folder / "secrets").iterdir())
    for path in secrets:
        assert path.stat().st_mode & 0o777 == 0o644, "the containers' users read it"
        path.write_text(path.read_text().replace("redis:6379", redis_address))
    assert (folder / "secrets").stat().st_mode & 0o777 == 0o700
    return {path.name: path.read_text().strip() for path in secrets}


@pytest.fixture
def host_with_users(tmp_path: Path) -> Iterator[Host]:
    """The same host with the users of ops/acl."""
    services = {name: {**service} for name, service in SERVICES.items()}
    for name, ours in ACL_SERVICES.items():
        base = services.get(name, {})
        environment = {**base.get("environment", {}), **ours.get("environment", {})}
        services[name] = {**base, **ours, "environment": environment}
    model = make_tiny_model(tmp_path / "tiny")
    host = Host(tmp_path, {"MODEL": str(model), "KV_CACHE_GIB": "0.01"}, services)
    make_secrets(tmp_path, f"127.0.0.1:{host.redis_port}")
    yield host
    host.kill_all()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_services_do_their_work_each_as_its_own_user_of_redis(host_with_users: Host) -> None:
    host = host_with_users
    host.start("redis")
    host.wait_until_healthy("redis")
    with redis.Redis(port=host.redis_port) as client, pytest.raises(redis.exceptions.AuthenticationError):
        client.get("penstock:pools")
    for service in ("gateway", "gpu_node-cpu", "worker"):
        host.start(service)
    for service in ("gateway", "worker", "gpu_node-cpu"):
        host.wait_until_healthy(service)
    assert_stream_over_http(host)
    assert_batch(host)
    assert_only_the_admin_may_list_keys(host)
    for service in ("worker", "gpu_node-cpu", "gateway", "redis"):
        assert refusals_in(host.log(service)) == []
        assert host.stop(service) in (0, -signal.SIGTERM), host.log(service)


def assert_redis_keeps_what_it_accepted(port: int) -> None:
    with redis.Redis(port=port, decode_responses=True) as client:
        config = client.config_get("*")
    assert (config["appendonly"], config["maxmemory-policy"]) == ("yes", "noeviction")
    assert int(config["maxmemory"]) == 1 << 30


def assert_stream_over_http(host: Host) -> None:
    url, headers = f"http://127.0.0.1:{host.gateway_port}/v1/completions", {}
    assert httpx.post(url, json={"prompt": "the gate"}).status_code == 401
    headers["Authorization"] = f"Bearer {host.first_key.read_text().strip()}"
    assert host.first_key.stat().st_mode & 0o777 == 0o600
    body = {"model": "tiny", "prompt": "the gate", "max_tokens": 8, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=30) as answer:
        assert answer.status_code == 200, answer.read()
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert "".join(choice["text"] for choice in choices)
    assert choices[-1]["finish_reason"] == "length"


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
    assert "NOPERM" in host.exec("gateway", "penstock", "audit").stderr


def test_each_service_has_the_secrets_of_its_role_and_none_is_a_variable() -> None:
    given = {name: service.get("secrets", []) for name, service in ACL_SERVICES.items()}
    urls = {name: [secret for secret in secrets if secret.endswith("_url")] for name, secrets in given.items()}
    assert urls.pop("redis") == ["gateway_url", "node_url", "worker_url", "admin_url"]
    assert urls == {
        "gateway": ["gateway_url"],
        "gpu_node": ["node_url"],
        "gpu_node-cpu": ["node_url"],
        "worker": ["worker_url"],
        "admin": ["admin_url"],
    }
    for name, service in ACL_SERVICES.items():
        inherited = SERVICES.get(name, {}).get("environment", {})
        secret = {
            variable for variable in inherited if re.search(r"^PENSTOCK_(REDIS_URL|KEY_PEPPER)$|^HF_TOKEN$", variable)
        }
        own = service["environment"]
        assert {variable: own.get(variable) for variable in secret} == dict.fromkeys(secret, ""), name
        files = {value.removeprefix("/run/secrets/") for value in own.values() if value.startswith("/run/secrets/")}
        assert name == "redis" or files == set(given[name])


def test_every_secret_has_a_file_that_the_documented_commands_make(tmp_path: Path) -> None:
    declared = yaml.safe_load((ROOT / "ops/acl/compose.yml").read_text())["secrets"]
    assert {name: one["file"] for name, one in declared.items()} == {name: f"./secrets/{name}" for name in declared}
    made = make_secrets(tmp_path)
    assert made.keys() == declared.keys()
    assert [name for name, secret in made.items() if not secret] == ["hf_token"]
    assert len(set(made.values())) == len(made)


def test_commands_of_the_admin_run_apart_from_the_services_in_the_gateways_image() -> None:
    admin = ACL_SERVICES["admin"]
    assert (admin["profiles"], admin["image"]) == (["admin"], "${COMPOSE_PROJECT_NAME:-penstock}-gateway")
    assert COMPOSE["name"] == "penstock"
    assert "image" not in SERVICES["gateway"]
    for protection in ("read_only", "security_opt", "cap_drop", "tmpfs", "depends_on"):
        assert admin[protection] == SERVICES["gateway"][protection]


def test_documented_commands_have_no_password_among_their_arguments() -> None:
    page = (ROOT / "ops/acl/README.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("    ") and "PASSWORD" in line] == []


def test_docker_cannot_hide_a_variable_of_the_user() -> None:
    """Docker's command line sets OTEL_RESOURCE_ATTRIBUTES, and its environment comes before the file `.env`."""
    assert "OTEL_RESOURCE_ATTRIBUTES" not in {
        name for name, _ in VARIABLE.findall((ROOT / "docker-compose.yml").read_text())
    }


def users_made_from(secrets: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the part of the command of Redis that writes the file of its users."""
    command = ACL_SERVICES["redis"]["command"][2].replace("$$", "$").replace("/etc/penstock", str(ROOT / "ops"))
    made, _, started = command.partition("&& exec ")
    assert "_url" not in started
    made = made.replace("/run/secrets", str(secrets))
    return subprocess.run(["sh", "-c", made], cwd=folder, capture_output=True, text=True, check=False)


def test_passwords_of_redis_users_come_from_files(tmp_path: Path) -> None:
    passwords = {
        name: url.split(":")[2].split("@")[0] for name, url in make_secrets(tmp_path).items() if name.endswith("_url")
    }
    made = users_made_from(tmp_path / "secrets", tmp_path)
    assert made.returncode == 0, made.stderr
    users = (tmp_path / "users.acl").read_text()
    for name, password in passwords.items():
        assert re.search(rf"^user {name.removesuffix('_url')} on >{password} ", users, re.MULTILINE), name
    assert "_PASSWORD" not in users
    assert (tmp_path / "users.acl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("url", ["", "redis://redis:6379/0", "redis://worker:a%40b@redis:6379/0"])
def test_redis_does_not_start_without_a_password_that_it_can_read(url: str, tmp_path: Path) -> None:
    make_secrets(tmp_path)
    (tmp_path / "secrets/worker_url").write_text(url)
    made = users_made_from(tmp_path / "secrets", tmp_path)
    assert made.returncode == 1
    assert made.stderr.startswith("the secret worker_url must be redis://ROLE:PASSWORD@redis:6379/0")


def test_worker_keeps_unfinished_batches_on_its_volume() -> None:
    assert SERVICES["worker"]["environment"]["XDG_STATE_HOME"].startswith(f"{SERVICES['worker']['working_dir']}/")


def test_gateways_the_worker_and_the_admin_see_the_same_stored_files() -> None:
    services = [SERVICES["gateway"], SERVICES["worker"], ACL_SERVICES["admin"]]
    assert {service["environment"]["PENSTOCK_FILES_URL"] for service in services} == {"${FILES_URL:-/files}"}
    for service in services:
        assert "${FILES_DIR:-files}:/files" in service["volumes"]
    # A new volume gets the owner that the folder has in the image.
    assert re.search(r"install --directory --owner penstock --group penstock .* /files$", DOCKERFILE, re.MULTILINE)
    assert "[gateway,batch,s3,tracing]" in DOCKERFILE
    assert "files" in COMPOSE["volumes"]


def test_the_worker_runs_many_tasks_in_one_process() -> None:
    words = SERVICES["worker"]["command"]
    assert words[words.index("--pool") + 1] == "threads"
    assert int(words[words.index("--concurrency") + 1]) >= 16


def test_both_profiles_run_the_same_node() -> None:
    gpu, cpu = SERVICES["gpu_node"], SERVICES["gpu_node-cpu"]
    assert (gpu["profiles"], cpu["profiles"]) == (["gpu"], ["cpu"])
    for same in ("environment", "volumes", "healthcheck"):
        assert gpu[same] == cpu[same]
    assert gpu["command"] == [*cpu["command"], "--replicas", "auto"]
    assert "nvidia" in str(gpu["deploy"])
    assert "deploy" not in cpu


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_is_watched_restarted_and_given_time_to_stop(service: str) -> None:
    described = SERVICES[service]
    assert described["healthcheck"]["test"]
    assert described["restart"] == "unless-stopped"
    assert described["stop_grace_period"]
    assert "nofile" not in described.get("ulimits", {})
    if service != "redis":
        assert described["depends_on"] == {"redis": {"condition": "service_healthy"}}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_that_is_taken_over_can_change_nothing_but_its_data(service: str) -> None:
    described = SERVICES[service]
    assert described["read_only"] is True
    assert "no-new-privileges:true" in described["security_opt"]
    assert described["logging"]["driver"] == "local"
    assert described.get("cap_drop") == (None if service == "redis" else ["ALL"])
    if service == "redis":  # Its image starts as root, and gives that up for commands that its entry point knows.
        assert described["command"][0] == "redis-server"
        assert "exec docker-entrypoint.sh redis-server " in ACL_SERVICES["redis"]["command"][2]


def test_nothing_is_reachable_from_other_machines_unless_asked_for() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"gateway": ["${GATEWAY_BIND:-127.0.0.1}:${GATEWAY_PORT:-8000}:8000"]}


def test_every_variable_has_a_default_and_is_explained() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    head, _, rest = text.partition("name: penstock")
    used = set(VARIABLE.findall(rest))
    assert len(used) == len({name for name, _ in used})
    assert [name for name, _ in used if not re.search(rf"^#   {name}\b", head, re.MULTILINE)] == []
    assert "$" not in VARIABLE.sub("", rest).replace("$$", "")


def test_traces_are_off_unless_a_collector_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in ("gateway", "gpu_node", "worker"):
        assert tracing_with(monkeypatch, service) is None


@pytest.mark.parametrize("service", ["gateway", "gpu_node", "gpu_node-cpu", "worker"])
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
    for name, value in SERVICES[service]["environment"].items():
        if name.startswith("OTEL_"):
            monkeypatch.setenv(name, VARIABLE.sub(lambda m: variables.get(m[1]) or m[2], value))
    return tracing_of(None, service)


def test_volumes_and_build_targets_exist() -> None:
    targets = set(re.findall(r"^FROM .* AS (\S+)$", DOCKERFILE, re.MULTILINE))
    for service in SERVICES.values():
        if "build" in service:
            assert service["build"]["target"] in targets
            assert (ROOT / service["build"]["dockerfile"]).exists()
        for volume in service.get("volumes", ()):
            source = VARIABLE.sub(lambda m: m[2], volume).partition(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in COMPOSE["volumes"]


def test_images_run_unprivileged_with_a_safe_path() -> None:
    stages = {stage.split()[0]: stage for stage in re.split(r"^FROM .* AS ", DOCKERFILE, flags=re.MULTILINE)[1:]}
    for target in ("gateway", "node"):
        assert "USER penstock" in stages[target]
    assert "PYTHONSAFEPATH=1" in stages["base"]
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / name).exists() for name in source.split())


def test_what_a_node_fetches_or_converts_outlives_its_container() -> None:
    [volume] = [v for v in SERVICES["gpu_node"]["volumes"] if v.startswith("model-cache:")]
    mounted = volume.partition(":")[2]
    for variable in ("HF_HOME", "PENSTOCK_CACHE", "TRITON_CACHE_DIR"):
        assert f"{variable}={mounted}/" in DOCKERFILE


def test_builds_fetch_no_other_frontend() -> None:
    """A `# syntax=` line makes every build load an image from the network."""
    assert "syntax=" not in DOCKERFILE


@pytest.mark.parametrize("given", ["", "20"])
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_nodes_environment_is_one_that_its_settings_accept(
    profile: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without KV_CACHE_GIB, the cache of a GPU takes what the model leaves; with it, that size is honored."""
    (service,) = (one for one in SERVICES.values() if one.get("profiles") == [profile])
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, VARIABLE.sub(lambda m: {"KV_CACHE_GIB": given}.get(m[1]) or m[2], value))
    url, runner = service["environment"]["PENSTOCK_REDIS_URL"], "gpu" if profile == "gpu" else "auto"
    settings = NodeSettings.load(model=service["command"][-1], redis_url=url, runner=runner)
    config = engine_config(settings)
    assert config.kv_cache_gib == (float(given) if given else None)
    if profile == "gpu":
        limits = config.max_num_seqs, config.max_num_batched_tokens, config.max_prefill_beside_decode
        assert limits == (256, 8192, 2048)
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        # The default build of torch has CUDA; only the other profile names an index of CPU builds.
        assert "args" not in service["build"]
