"""What `penstock serve` prints, and the settings that it passes to its parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes.command import call_command, run_command

from penstock.cli.processes import ChildCommand
from penstock.contract.errors import PenstockError
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.settings import NodeSettings
from penstock.runtime.embedded_redis import EmbeddedRedis
from penstock.runtime.settings import without_password


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:s3cret@host:1/2", "redis://:***@host:1/2"),
        ("rediss://me:s3cret@host", "rediss://me:***@host"),
        ("rediss://me:s3:c@r/et@host", "rediss://me:***@host"),
        ("redis://host/0?password=s3cret&db=1", "redis://host/0?password=***&db=1"),
        ("unix:///tmp/a:b@c/redis.sock", "unix:///tmp/a:b@c/redis.sock"),
        ("unix://me:s3cret@/tmp/redis.sock", "unix://me:***@/tmp/redis.sock"),
    ],
)
def test_passwords_of_redis_are_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_options_of_serve_reach_node_and_gateway_and_others_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[tuple[Sequence[str], Sequence[str]]] = []
    nodes: list[NodeSettings] = []
    gateways: list[GatewaySettings] = []

    async def start_all(
        _supervisor: object,
        _url: str,
        model: str,
        nodes: Sequence[ChildCommand],
        gateway: ChildCommand,
        _keeper: object,
    ) -> None:
        assert model == "m"
        (node,) = nodes
        started.append((node.argv[node.argv.index("m") + 1 :], gateway.argv[gateway.argv.index("gateway") + 1 :]))
        raise PenstockError("enough")

    async def run_node(settings: NodeSettings) -> None:
        nodes.append(settings)

    monkeypatch.setattr("penstock.cli.serve.start_all", start_all)
    monkeypatch.setattr("penstock.gpu_node.process.run_node", run_node)
    monkeypatch.setattr("penstock.gateway.app.run", gateways.append)
    environment = {
        "NODE_KV_CACHE_GIB": "4",
        "NODE_MAX_NUM_SEQS": "9",
        "GATEWAY_HOST": "127.0.0.2",
        "GATEWAY_PORT": "1234",
    }
    monkeypatch.setenv("PENSTOCK_NODE_MODEL", "m")
    for name, value in environment.items():
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    adapter = f"ours={tmp_path}"
    given = ["--kv-cache-gib", "0.25", "--kv-cache-dtype", "fp8", "--port", "18005", "--max-model-len", "99"]
    given += ["--alias", "a", "--served-model-name", "b", "--lora-modules", adapter, "--num-threads", "3"]
    given += ["--device", "cuda"]
    for options in ([], given):
        call_command("serve", "--redis-url", "unix://x", *options)
    for of_node, of_gateway in started:
        call_command("node", "m", "--redis-url", "unix://x", *of_node)
        call_command("gateway", "--redis-url", "unix://x", *of_gateway)

    assert [(one.kv_cache_gib, one.kv_cache_dtype, one.max_num_seqs) for one in nodes] == [
        (4, "auto", 9),
        (0.25, "fp8", 9),
    ]
    assert [(one.aliases, one.lora, one.max_model_len, one.num_threads, one.runner) for one in nodes] == [
        ((), (), None, None, "auto"),
        (("a", "b"), (adapter,), 99, 3, "gpu"),
    ]
    assert [(one.host, one.port) for one in gateways] == [("127.0.0.2", 1234), ("127.0.0.2", 18005)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-model-len", "1"), "--max-model-len: must be at least 2"),
        (("--num-threads", "0"), "--num-threads: must be at least 1"),
        (("--lora", "nothing"), "lora[0]: must match the pattern"),
        (("--lora", "one=/proc/none"), "lora: adapter one: there is no folder /proc/none"),
        (("--lora-modules", "a=x", "--lora-modules", "a=y"), "lora: names an adapter twice"),
        (("--port", "70000"), "port: must be at most 65535"),
        (("--ephemeral", "--data-dir", "x"), "ephemeral: --ephemeral keeps nothing in the folder of --data-dir"),
        (("--log-level", "loud"), "'loud' is not one of"),
    ],
)
def test_bad_values_are_refused_by_name_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(EmbeddedRedis, "start", lambda _: pytest.fail("started a server"))
    done = run_command("serve", "m", *options)
    assert done.returncode == 2
    assert said in done.stderr


def test_missing_packages_are_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmbeddedRedis, "start", lambda _: pytest.fail("started a server"))
    monkeypatch.setattr("penstock.cli.services.version_of", lambda name: None if name == "numpy" else "1")
    done = run_command("serve", "m")
    assert done.returncode == 2
    assert (
        done.stderr == "penstock: packages are missing: pip install 'penstock-llm[cpu,gateway]' ([cpu] lacks numpy)\n"
    )
