"""`penstock demo`: start the whole system on this machine and stream the answer to one question."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.audit import audit_lines, audit_pools
from penstock.cli.chat import Speed
from penstock.cli.demo_model import default_model
from penstock.cli.output import write_line, write_text
from penstock.cli.processes import Supervisor, gateway_command, node_command, run_until_stopped
from penstock.cli.serve import start_all
from penstock.contract.errors import PenstockError
from penstock.runtime.embedded_redis import resolve_redis
from penstock.runtime.logging import LogSettings, configure_logging

if TYPE_CHECKING:
    from httpx import AsyncClient

PROMPT = "What does a water turbine do?"


def demo(
    model: Annotated[
        str | None, typer.Option(help="Hugging Face id, folder or .gguf file. Default: the demo model.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="The question to ask.")] = PROMPT,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature. 0 always picks the most likely token.")
    ] = 0.0,
    redis_url: Annotated[
        str | None, typer.Option(help="URL of the Redis to use. Default: $PENSTOCK_REDIS_URL, or a new Redis.")
    ] = None,
) -> None:
    """Start Redis, a node and a gateway, ask one question over HTTP, stream the answer, and stop everything.

    At the end, the demo checks the queue as `penstock audit` does.
    """
    options: dict[str, object] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    logs = LogSettings.load()
    # The log of a demo is for people even if its output is no terminal.
    configure_logging(
        LogSettings.load(log_format="console") if logs.log_format == "auto" else logs, prefix="demo    | "
    )
    with resolve_redis(redis_url) as url:
        run_until_stopped(_demo(url, model or default_model(), prompt, options))


async def _demo(redis_url: str, model: str, question: str, options: dict[str, object]) -> None:
    async with Supervisor(lambda _name, _line: None) as supervisor:
        started = time.perf_counter()
        nodes = [node_command(model, redis_url)]
        command = gateway_command(redis_url, arguments=("--host", "127.0.0.1", "--port", "0"))
        node, gateway = await start_all(supervisor, redis_url, model, nodes, command)
        write_line(f"Redis, a node with {node['pool']} and a gateway: ready in {time.perf_counter() - started:.1f} s\n")
        # Imported late, because every other command would wait for it, but before the measurement starts.
        import httpx

        messages = [{"role": "user", "content": question}]
        write_line(f"> {question}\n")
        body = {"model": node["pool"], "messages": messages, **options}
        # A proxy of the environment does not reach this machine.
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            events = ask(client, f"{gateway['url']}/v1/chat/completions", body)
            speed = await supervisor.unless_one_dies(_show(events))
        write_line(f"\n\n{speed}")
        async for audited in audit_pools(redis_url, [node["pool"]]):
            write_line("\n".join(audit_lines(audited, repair=False)))
            if audited.left:
                raise PenstockError("the audit found keys in Redis that do not match the jobs")


async def _show(events: AsyncIterator[dict[str, Any]]) -> Speed:
    started = time.perf_counter()
    ttft_s, num_tokens = 0.0, 0
    async for event in events:
        for choice in event["choices"]:
            text = choice["delta"].get("content") or ""
            if text and not ttft_s:
                ttft_s = time.perf_counter() - started
            write_text(text)
        if usage := event.get("usage"):
            num_tokens = usage["completion_tokens"]
    return Speed(ttft_s, time.perf_counter() - started, num_tokens)


async def ask(client: AsyncClient, url: str, body: dict[str, object]) -> AsyncIterator[dict[str, Any]]:
    """Post a streaming request and yield the JSON of each event in the answer. Raises PenstockError for an error."""
    async with client.stream("POST", url, json=body) as answer:
        if answer.status_code != HTTPStatus.OK:
            raise PenstockError(f"the gateway refused the request: {(await answer.aread()).decode(errors='replace')}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise PenstockError(event["error"]["message"])
                yield event
