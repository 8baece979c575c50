"""`penstock serve`: Redis, a node and a gateway on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.demo_model import demo_model
from penstock.cli.options import options_of, takes, words_of
from penstock.cli.processes import Event, Supervisor, gateway_command, node_command, run_until_stopped
from penstock.cli.progress import LoadingBar
from penstock.contract.embedded import DEFAULT_MAXMEMORY_MIB, resolve_redis
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.settings import NodeSettings

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
            help="Hub id with optional :FILE.gguf and @revision, a folder, or a .gguf file; default: the demo model.",
        ),
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis to use; default: $PENSTOCK_REDIS_URL, else one is started.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder where the started Redis keeps jobs across restarts.")
    ] = None,
    maxmemory_mib: Annotated[
        int, typer.Option(min=16, help="Memory limit of the started Redis.")
    ] = DEFAULT_MAXMEMORY_MIB,
    **given: Any,
) -> None:
    """Serve a model on this machine, all in one.

    All settings of `penstock node` and `penstock gateway` are also read from PENSTOCK_NODE_<NAME> and
    PENSTOCK_GATEWAY_<NAME>.
    """
    of_node, of_gateway = (words_of({name: given[name] for name in names}) for names in (_OF_NODE, _OF_GATEWAY))
    with resolve_redis(redis_url, data_dir=data_dir, maxmemory_mib=maxmemory_mib) as url:
        run_until_stopped(_serve(url, model or str(demo_model()), of_node, of_gateway))


async def _serve(redis_url: str, model: str, of_node: Sequence[str], of_gateway: Sequence[str]) -> None:
    async with Supervisor(_log_to_stderr) as supervisor:
        node, gateway = await start_all(supervisor, redis_url, model, of_node, of_gateway)
        _say_ready(node, gateway, redis_url)
        await supervisor.until_one_dies()


async def start_all(
    supervisor: Supervisor, redis_url: str, model: str, of_node: Sequence[str], of_gateway: Sequence[str]
) -> tuple[Event, Event]:
    """Starts a node and a gateway with these arguments, and with a progress bar; their ready events."""
    bar = LoadingBar(model)
    node = await supervisor.start(node_command(model, redis_url, arguments=of_node, on_progress=bar.update))
    # Started last, so that it is stopped first: no request comes in while the node gives its jobs back.
    gateway = await supervisor.start(gateway_command(redis_url, arguments=of_gateway))
    with bar:
        return await asyncio.gather(node.ready(), gateway.ready(timeout_s=GATEWAY_START_TIMEOUT_S))


def _log_to_stderr(name: str, line: str) -> None:
    print(f"{name:8}| {line}", file=sys.stderr, flush=True)


def _say_ready(node: Event, gateway: Event, redis_url: str) -> None:
    body = {"model": node["pool"], "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    data = shlex.quote(json.dumps(body))
    print(f"\nServing {node['pool']} at {gateway['url']}/v1   (Redis: {without_password(redis_url)})\n")
    print(f"  curl -N {gateway['url']}/v1/chat/completions -H 'Content-Type: application/json' -d {data}\n", flush=True)


def without_password(redis_url: str) -> str:
    """The URL as it may be shown."""
    shown = re.sub(r"(://[^:/?#@]*):.*@", r"\1:***@", redis_url)
    return re.sub(r"([?&]password=)[^&#]*", r"\1***", shown)
