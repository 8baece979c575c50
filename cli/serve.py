"""`penstock serve`: run Redis, a node and a gateway on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from penstock.cli.admin.doctor import check_extras
from penstock.cli.demo_model import ON_HUB, PACKAGE, REMEDY, SAMPLING, SIZE_MB, default_model
from penstock.cli.node import NODE_FLAGS
from penstock.cli.options import options_of, taken_for, takes, words_of
from penstock.cli.processes import (
    Event,
    LogSink,
    ProcessDiedError,
    Supervisor,
    gateway_command,
    node_command,
    run_until_stopped,
)
from penstock.cli.progress import LoadingProgress
from penstock.cli.restarting import keep_child, keep_redis, watch_joined_redis
from penstock.contract.errors import ConfigError
from penstock.gateway.http.listen_address import check_address
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.settings import NodeSettings, engine_config, pool_of_model
from penstock.runtime.cache_folders import state_folder
from penstock.runtime.embedded_redis import DEFAULT_MAXMEMORY_MIB, EmbeddedRedis, find_or_start_redis
from penstock.runtime.local_redis import RunningRedis
from penstock.runtime.logging import LogSettings, configure_logging, has_color
from penstock.runtime.settings import without_password

log = logging.getLogger(__name__)

GATEWAY_START_TIMEOUT_S = 60.0
PORT_TIMEOUT_S = 3.0
"""Seconds to wait for the port of an earlier `penstock serve` that is ending, such as one that was killed."""
_OF_NODE = (
    *("aliases", "lora", "max_model_len", "num_threads", "revision", "dtype", "quantization", "kv_cache_dtype"),
    *("runner", "load_format", "generation_config"),
    *("kv_cache_gib", "scheduling_policy", "speculative"),
)
_OF_GATEWAY = ("host", "port", "unknown_fields", "max_tokens_beyond_context")


@takes(
    *options_of(NodeSettings, _OF_NODE, flags=NODE_FLAGS),
    *options_of(GatewaySettings, _OF_GATEWAY),
    *options_of(LogSettings),
)
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            envvar="PENSTOCK_NODE_MODEL",
            help="Hugging Face id with optional :FILE.gguf and @revision, a folder, or a .gguf file. "
            "Default: the demo model.",
        ),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(help="URL of the Redis to use. Default: $PENSTOCK_REDIS_URL, or a Redis of this command."),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder in which that Redis keeps jobs across restarts. Default: in memory only."),
    ] = None,
    maxmemory_mib: Annotated[
        int, typer.Option(min=16, help="Memory limit of that Redis in MiB.")
    ] = DEFAULT_MAXMEMORY_MIB,
    **given: Any,
) -> None:
    """Serve a model on this machine with one command: Redis, a node and a gateway.

    Clients and commands of this user find its Redis by themselves. All other settings of `penstock node` and
    `penstock gateway` can be set with the environment variables PENSTOCK_NODE_<NAME> and PENSTOCK_GATEWAY_<NAME>.

    Examples:
        penstock serve
        penstock serve ORG/MODEL:FILE.gguf --port 8080
        penstock serve model.gguf --kv-cache-dtype int8 --quantization int8
    """
    logs = LogSettings.load(**taken_for(LogSettings, given))
    of_node, of_gateway = ({name: given[name] for name in names} for names in (_OF_NODE, _OF_GATEWAY))
    _check_packages()
    if model is None:
        model = default_model()
        if _node_settings(model, of_node).generation_config == "auto":
            of_node["generation_config"] = SAMPLING
    _check_settings(model, of_node, of_gateway)
    configure_logging(logs, prefix=_prefix("serve"))
    with find_or_start_redis(redis_url, data_dir=data_dir, maxmemory_mib=maxmemory_mib) as (url, server):
        of_gateway["keys_seen_file"] = keys_seen_file(str(data_dir.resolve()) if data_dir else without_password(url))
        words = (words_of(of_node, NODE_FLAGS), words_of(of_gateway))
        _log_start(model, url, server)
        try:
            run_until_stopped(_serve(url, server, model, *words, logs))
        except ProcessDiedError as error:
            # The log above has the last lines of the process.
            raise ProcessDiedError(f"{error.why}{_hint(model, error.why)}", error.why) from error


def _check_packages() -> None:
    """Raise ConfigError if a package is missing that the node or the gateway needs."""
    missing = [check.finding for check in check_extras(("node", "gateway")) if check.level != "ok"]
    if missing:
        raise ConfigError(f"packages are missing: pip install 'penstock[all]' ({'; '.join(missing)})")


def _check_settings(model: str, of_node: Mapping[str, Any], of_gateway: Mapping[str, Any]) -> None:
    """Raise ConfigError, which names the setting, for settings that the node or the gateway would refuse.

    A port that is in use is one of them.
    """
    gateway = GatewaySettings.load(**of_gateway)
    config = engine_config(_node_settings(model, of_node))
    for name, folder in config.lora.items():
        if not folder.expanduser().is_dir():
            raise ConfigError(f"lora: adapter {name}: there is no folder {folder}", param="lora")
    asyncio.run(check_address(gateway.host, gateway.port, wait_s=PORT_TIMEOUT_S))


def keys_seen_file(queue: str) -> Path:
    """Return the file in the state folder that notes that a queue has API keys. The queue is a folder or a URL."""
    name = hashlib.blake2b(queue.encode(), digest_size=8).hexdigest()
    return state_folder() / f"keys-seen-{name}"


def _node_settings(model: str, of_node: Mapping[str, Any]) -> NodeSettings:
    return NodeSettings.load(model=model, redis_url="unix://unused", **of_node)


def _hint(model: str, why: str) -> str:
    """Return what a user may do instead if the demo model could not be downloaded."""
    is_download = model == ON_HUB and any(word in why for word in ("download", "hub"))
    return f"; instead of the download: {REMEDY}" if is_download else ""


async def _serve(
    redis_url: str,
    server: EmbeddedRedis | RunningRedis | None,
    model: str,
    of_node: Sequence[str],
    of_gateway: Sequence[str],
    logs: LogSettings,
) -> None:
    async with Supervisor(_relay_of(logs), _log_variables(logs)) as supervisor:
        ready = await start_all(supervisor, redis_url, model, of_node, of_gateway)
        _print_ready(*ready, redis_url, is_local=server is not None)
        # A restarted gateway must use the same port, even if port 0 was requested, because callers know this one.
        port = str(urlsplit(ready[1]["url"]).port)
        commands = (
            node_command(model, redis_url, arguments=of_node),
            gateway_command(redis_url, arguments=(*of_gateway, "--port", port)),
        )
        async with asyncio.TaskGroup() as keepers:
            for child, command in zip(supervisor.children, commands, strict=True):
                keepers.create_task(keep_child(supervisor, child, command, log.warning))
            if isinstance(server, EmbeddedRedis):
                keepers.create_task(keep_redis(server, log.warning))
            elif server is not None:
                keepers.create_task(watch_joined_redis(server, log.warning))


async def start_all(
    supervisor: Supervisor, redis_url: str, model: str, of_node: Sequence[str], of_gateway: Sequence[str]
) -> tuple[Event, Event]:
    """Start a node and a gateway, show the progress, and return their ready events."""
    progress = LoadingProgress(log, pool_of_model(model))
    node = await supervisor.start(node_command(model, redis_url, arguments=of_node, on_progress=progress.update))
    # The gateway starts last and so stops first: no request arrives while the node returns its jobs to the queue.
    gateway = await supervisor.start(gateway_command(redis_url, arguments=of_gateway))
    async with progress.shown():
        return await asyncio.gather(node.ready(), gateway.ready(timeout_s=GATEWAY_START_TIMEOUT_S))


def _relay_of(logs: LogSettings) -> LogSink:
    """Return what writes a child's log line to stderr: after the child's name for people, as JSON for programs."""
    is_json = logs.format_for(sys.stderr) == "json"

    def relay(name: str, line: str) -> None:
        if is_json and not line.startswith("{"):
            log.info("output", extra={"part": name, "line": line})
        else:
            print(line if is_json else f"{_prefix(name)}{line}", file=sys.stderr, flush=True)

    return relay


def _prefix(name: str) -> str:
    return f"{name:8}| "


def _log_variables(logs: LogSettings) -> dict[str, str]:
    """Return the environment variables by which the children log as this process does."""
    log_format = logs.format_for(sys.stderr)
    variables = {"PENSTOCK_LOG_LEVEL": logs.log_level, "PENSTOCK_LOG_FORMAT": log_format}
    # The children write to a pipe, so they cannot see the terminal.
    return variables | ({"FORCE_COLOR": "1"} if log_format == "console" and has_color(sys.stderr) else {})


def _log_start(model: str, redis_url: str, server: EmbeddedRedis | RunningRedis | None) -> None:
    if isinstance(server, RunningRedis):
        log.warning("joins the Redis of another penstock serve", extra=asdict(server))
    if model == ON_HUB:
        facts = {"size_mb": SIZE_MB, "package": PACKAGE}
        log.info("the demo model's package is not installed; the model comes from the hub", extra=facts)
    log.info("starting", extra={"model": model, "redis": without_password(redis_url)})


def _print_ready(node: Event, gateway: Event, redis_url: str, *, is_local: bool) -> None:
    body = {"model": node["pool"], "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    data = shlex.quote(json.dumps(body))
    print(f"\nServing {node['pool']} at {gateway['url']}/v1   (page: {gateway['url']}/)")
    print(f"Redis: {without_password(redis_url)}\n")
    print(f"  curl -N {gateway['url']}/v1/chat/completions -H 'Content-Type: application/json' -d {data}")
    if is_local:
        print("  penstock submit 'Hello!'")
    print(flush=True)
