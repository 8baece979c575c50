"""`penstock serve`: Redis, a node and a gateway on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.demo_model import demo_model
from penstock.cli.processes import Event, Supervisor, gateway_command, node_command, run_until_stopped
from penstock.cli.progress import LoadingBar
from penstock.contract.embedded import DEFAULT_MAXMEMORY_MIB, resolve_redis

GATEWAY_START_TIMEOUT_S = 60.0


def serve(
    model: Annotated[
        str | None, typer.Argument(help="Hub id[:FILE.gguf][@revision], folder or .gguf file; default: the demo model.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model of the hub.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, float16 or bfloat16.")] = None,
    quantization: Annotated[
        str | None, typer.Option(help="auto (as stored), none, int8, int8_group, int4, fp8.")
    ] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="auto, bfloat16 or int8.")] = None,
    kv_cache_gib: Annotated[float, typer.Option(help="Memory for the KV cache.")] = 1.0,
    scheduling_policy: Annotated[
        str | None, typer.Option(help="Who is served first: fcfs, priority, sjf or fair (the default).")
    ] = None,
    speculative: Annotated[
        str | None, typer.Option(help="ngram: compute ahead what a text will probably repeat; off (the default).")
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
) -> None:
    """Serve a model on this machine, all in one."""
    flags = {
        "--revision": revision,
        "--dtype": dtype,
        "--quantization": quantization,
        "--kv-cache-dtype": kv_cache_dtype,
        "--scheduling-policy": scheduling_policy,
        "--speculative": speculative,
        "--kv-cache-gib": f"{kv_cache_gib:g}",
    }
    arguments = tuple(word for flag, value in flags.items() if value is not None for word in (flag, value))
    with resolve_redis(redis_url, data_dir=data_dir, maxmemory_mib=maxmemory_mib) as url:
        run_until_stopped(_serve(url, model or str(demo_model()), arguments, host, port))


async def _serve(redis_url: str, model: str, arguments: tuple[str, ...], host: str, port: int) -> None:
    async with Supervisor(_log_to_stderr) as supervisor:
        node, gateway = await start_all(supervisor, redis_url, model, arguments, host, port)
        _say_ready(node, gateway, redis_url)
        await supervisor.until_one_dies()


async def start_all(
    supervisor: Supervisor, redis_url: str, model: str, arguments: tuple[str, ...], host: str, port: int
) -> tuple[Event, Event]:
    """Starts a node and a gateway, with a progress bar; their ready events."""
    bar = LoadingBar(model)
    node = await supervisor.start(node_command(model, redis_url, arguments=arguments, on_progress=bar.update))
    # Started last, so that it is stopped first: no request comes in while the node gives its jobs back.
    gateway = await supervisor.start(gateway_command(redis_url, host=host, port=port))
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
