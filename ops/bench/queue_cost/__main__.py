"""What the queue and the gateway cost: `PYTHONPATH=ops python -m bench.queue_cost [KIND…]`.

`idle`: the way of one job through an idle system. `load`, `http`: CPU per token of each process at 64 streams, read
from Redis and over HTTP. `share`: an engine whose steps keep two cores busy, bare and behind the queue. `model`: the
same of a real model, into results/queue.md; only where it is named, as it takes half an hour. `gaps`: the gaps between
a stream's events over HTTP, of the demo model or of `--model`; results/stream_gaps.md has its tables. `ceiling`: CPU
per step of each part of the host, around a real engine whose GPU only takes time; only where it is named.
`durability`: submissions a second, and how long one takes, by what they wait for; only where it is named, and with the
Redis that PENSTOCK_REDIS_SERVER names. Its files are in the folder that TMPDIR names, which must be on a disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

from bench.child import Spec
from bench.queue_cost.bare import serve_bare
from bench.queue_cost.ceiling import measure_ceiling
from bench.queue_cost.durability import measure_durability
from bench.queue_cost.gaps import measure_gaps
from bench.queue_cost.idle import measure_idle
from bench.queue_cost.model import measure_model
from bench.queue_cost.plain import serve_plain
from bench.queue_cost.processes import serve_node
from bench.queue_cost.share import measure_share
from bench.queue_cost.streams import measure_http, measure_load
from penstock.cli.demo_model import demo_model
from penstock.runtime import event_loop
from penstock.runtime.embedded_redis import EmbeddedRedis

KINDS = {"ceiling": measure_ceiling, "load": measure_load, "http": measure_http, "share": measure_share}


async def measure(what: Sequence[str], num_streams: int, num_tokens: int, steps_ms: Sequence[float]) -> None:
    """Takes the measurements that are named."""
    with EmbeddedRedis() as server:
        if "idle" in what:
            await measure_idle(server)
        for kind in (kind for kind in KINDS if kind in what):
            print(f"{kind}, {num_streams} streams of {num_tokens} tokens")
            for step_ms in steps_ms:
                await KINDS[kind](server, step_ms, num_streams, num_tokens)


def main() -> None:
    """Runs the measurements that are named, all by default."""
    if sys.argv[1:2] == ["bare"]:
        serve_bare(Spec(**json.loads(sys.argv[2])))
        return
    if sys.argv[1:2] == ["node"]:
        redis_url, step_s, num_busy, pool = sys.argv[2:]
        event_loop.run(serve_node(redis_url, float(step_s), int(num_busy), pool))
        return
    if sys.argv[1:2] == ["gpu-node"]:
        from bench.queue_cost.gpu_node import serve_gpu_node

        redis_url, step_s, max_num_seqs = sys.argv[2:]
        asyncio.run(serve_gpu_node(redis_url, float(step_s), int(max_num_seqs)))
        return
    if sys.argv[1:2] == ["plain"]:
        asyncio.run(serve_plain(sys.argv[2], float(sys.argv[3])))
        return
    parser = argparse.ArgumentParser(prog="bench.queue_cost", description=__doc__)
    parser.add_argument("what", nargs="*", default=["idle", "load", "http", "share"])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--step-ms", type=float, nargs="*", default=[10.0, 0.0])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--model", help="of gaps; default: the demo model")
    parser.add_argument("--settings", type=json.loads, default={}, help="of gaps: settings of the node, as JSON")
    options = parser.parse_args()
    if "gaps" in options.what:
        measure_gaps(options.model or str(demo_model()), options.settings)
    if "model" in options.what:
        measure_model(options.turns)
    if "durability" in options.what:
        asyncio.run(measure_durability())
    asyncio.run(measure(options.what, options.streams, options.tokens, options.step_ms))


if __name__ == "__main__":
    main()
