"""`penstock serve`: run Redis, a node and a gateway on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from penstock.cli.demo_model import demo_model
from penstock.cli.options import options_of, takes, words_of
from penstock.cli.processes import Event, Supervisor, gateway_command, node_command, run_until_stopped
from penstock.cli.progress import LoadingBar
from penstock.cli.restarting import keep_child, keep_redis
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.settings import NodeSettings
from penstock.runtime.embedded_redis import DEFAULT_MAXMEMORY_MIB, EmbeddedRedis, find_or_start_redis
from penstock.runtime.settings import without_password

GATEWAY_START_TIMEOUT_S = 60.0
_OF_NODE = (
    *("revision", "dtype", "quantization", "kv_cache_dtype", "kv_cache_gib"),
    *("scheduling_policy", "speculative"),
)
_OF_GATEWAY = ("host", "port")


@takes(*options_of(NodeSettings, _OF_NODE), *options_of(GatewaySettings, _OF_GATEWAY))
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
        str | None, typer.Option(help="URL of the Redis to use. Default: $PENSTOCK_REDIS_URL, or a new Redis.")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder in which the new Redis keeps jobs across restarts. Default: in memory only."),
    ] = None,
    maxmemory_mib: Annotated[
        int, typer.Option(min=16, help="Memory limit of the new Redis in MiB.")
    ] = DEFAULT_MAXMEMORY_MIB,
    **given: Any,
) -> None:
    """Serve a model on this machine with one command: Redis, a node and a gateway.

    All other settings of `penstock node` and `penstock gateway` can be set with the environment variables
    PENSTOCK_NODE_<NAME> and PENSTOCK_GATEWAY_<NAME>.

    Examples:
        penstock serve
        penstock serve ORG/MODEL:FILE.gguf --port 8080
        penstock serve model.gguf --kv-cache-dtype int8 --quantization int8
    """
    of_node, of_gateway = (words_of({name: given[name] for name in names}) for names in (_OF_NODE, _OF_GATEWAY))
    with find_or_start_redis(redis_url, data_dir=data_dir, maxmemory_mib=maxmemory_mib) as (url, server):
        run_until_stopped(_serve(url, server, model or str(demo_model()), of_node, of_gateway))


async def _serve(
    redis_url: str, server: EmbeddedRedis | None, model: str, of_node: Sequence[str], of_gateway: Sequence[str]
) -> None:
    async with Supervisor(_log_to_stderr) as supervisor:
        ready = await start_all(supervisor, redis_url, model, of_node, of_gateway)
        _say_ready(*ready, redis_url)
        # A restarted gateway must use the same port, even if port 0 was requested, because callers know this one.
        port = str(urlsplit(ready[1]["url"]).port)
        commands = (
            node_command(model, redis_url, arguments=of_node),
            gateway_command(redis_url, arguments=(*of_gateway, "--port", port)),
        )
        async with asyncio.TaskGroup() as keepers:
            for child, command in zip(supervisor.children, commands, strict=True):
                keepers.create_task(keep_child(supervisor, child, command, _say))
            if server is not None:
                keepers.create_task(keep_redis(server, _say))


async def start_all(
    supervisor: Supervisor, redis_url: str, model: str, of_node: Sequence[str], of_gateway: Sequence[str]
) -> tuple[Event, Event]:
    """Start a node and a gateway, show a progress bar, and return their ready events."""
    bar = LoadingBar(model)
    node = await supervisor.start(node_command(model, redis_url, arguments=of_node, on_progress=bar.update))
    # The gateway starts last and so stops first: no request arrives while the node returns its jobs to the queue.
    gateway = await supervisor.start(gateway_command(redis_url, arguments=of_gateway))
    with bar:
        return await asyncio.gather(node.ready(), gateway.ready(timeout_s=GATEWAY_START_TIMEOUT_S))


def _log_to_stderr(name: str, line: str) -> None:
    print(f"{name:8}| {line}", file=sys.stderr, flush=True)


def _say(line: str) -> None:
    _log_to_stderr("serve", line)


def _say_ready(node: Event, gateway: Event, redis_url: str) -> None:
    body = {"model": node["pool"], "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    data = shlex.quote(json.dumps(body))
    print(f"\nServing {node['pool']} at {gateway['url']}/v1   (Redis: {without_password(redis_url)})\n")
    print(f"  curl -N {gateway['url']}/v1/chat/completions -H 'Content-Type: application/json' -d {data}\n", flush=True)
