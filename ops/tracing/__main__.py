"""`PYTHONPATH=ops python -m tracing FILE.svg`: record a request with a takeover, and draw its trace.

It starts Redis, a gateway, and a node with the demo model, and streams an answer. A second node starts. Then the first
one is killed, so that the second one continues the answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from fixtures.otlp_collector import CollectedSpan, OtlpCollector

from penstock.cli.demo_model import demo_model
from penstock.runtime.embedded_redis import EmbeddedRedis
from tracing.picture import svg_of

POOL = "demo"
LEASE_MS = "3000"
"""The shortest one, so that the picture shows more than waiting."""
BODY = {
    "model": POOL,
    "messages": [{"role": "user", "content": "Tell a long story about a dam."}],
    "max_tokens": 300,
    "temperature": 0.0,
    "stream": True,
}
NUM_LEASES = 2


@contextmanager
def process(command: list[str], env: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run a part of penstock. Return its output once it is ready."""
    argv = [sys.executable, "-m", "penstock", *command]
    with subprocess.Popen(argv, env=os.environ | env, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            events = (json.loads(line) for line in started.stdout)
            yield started, next(event for event in events if event["event"] == "ready")
        finally:
            started.kill()


def record() -> list[CollectedSpan]:
    """Return the spans of one request whose node was killed."""
    with ExitStack() as stack:
        redis, collector = stack.enter_context(EmbeddedRedis()), stack.enter_context(OtlpCollector())
        env = {"PENSTOCK_REDIS_URL": redis.url, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        env |= {"PENSTOCK_NODE_PROGRESS": "json", "PENSTOCK_GATEWAY_PROGRESS": "json"}
        node = ["node", str(demo_model()), "--pool", POOL, "--lease-ms", LEASE_MS]
        _, said = stack.enter_context(process(["gateway", "--port", "0"], env))
        first, _ = stack.enter_context(process([*node, "--name", "first"], env))
        with httpx.stream("POST", f"{said['url']}/v1/chat/completions", json=BODY, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            collector.wait_for(lambda spans: any(span.name == "prefill" for span in spans))
            stack.enter_context(process([*node, "--name", "second"], env))
            first.kill()
            assert "data: [DONE]" in list(lines)
        return collector.wait_for(
            lambda spans: (
                sum(span.kind == "consumer" for span in spans) == NUM_LEASES
                and any(span.kind == "server" for span in spans)
            )
        )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(svg_of(record()))
