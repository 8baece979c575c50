"""`penstock node`: a worker that runs one model, in this process."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from penstock.contract.errors import ConfigError
from penstock.contract.logs import configure_logging
from penstock.contract.settings import redis_url_of


def node(
    model: Annotated[
        str | None, typer.Argument(help="Hub id[@revision], folder or .gguf file; default: $PENSTOCK_NODE_MODEL.")
    ] = None,
    redis_url: Annotated[str | None, typer.Option(help="Redis of the pool; default: $PENSTOCK_REDIS_URL.")] = None,
    pool: Annotated[str | None, typer.Option(help="Pool to work for; default: the model's name.")] = None,
    name: Annotated[str | None, typer.Option(help="This node's name in logs and records.")] = None,
    alias: Annotated[list[str] | None, typer.Option(help="Further name for the model; may be repeated.")] = None,
    runner: Annotated[str | None, typer.Option(help="auto, native or torch.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, float16 or bfloat16.")] = None,
    quantization: Annotated[
        str | None, typer.Option(help="auto (as stored), none, int8, int8_group or int4; native runner.")
    ] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="auto, bfloat16 or int8; native runner.")] = None,
    kv_cache_gib: Annotated[float | None, typer.Option(help="Memory for the KV cache.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of prompt and answer together.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sequences in one step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Most tokens in one step.")] = None,
    scheduling_policy: Annotated[
        str | None, typer.Option(help="Who is served first in the pool: fcfs, priority, sjf or fair (the default).")
    ] = None,
    lease_ms: Annotated[int | None, typer.Option(help="Silence after which another node takes the jobs.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve figures for Prometheus here; 0: a free port.")] = None,
) -> None:
    """Load a model and work for its pool until SIGTERM, which gives unfinished jobs back."""
    try:
        from penstock.gpu_node.process import run_node
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'penstock[node]'") from error
    from penstock.gpu_node.settings import NodeSettings

    settings = NodeSettings.load(
        model=model,
        redis_url=redis_url_of(redis_url),
        pool=pool,
        name=name,
        aliases=tuple(alias) if alias else None,
        runner=runner,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_gib=kv_cache_gib,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        scheduling_policy=scheduling_policy,
        lease_ms=lease_ms,
        metrics_port=metrics_port,
    )
    configure_logging()
    asyncio.run(run_node(settings))
