"""A node with the waiting GPU, which reports on request the CPU time of the parts of its steps."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import torch

from bench.queue_cost.cpu_parts import CpuParts
from bench.queue_cost.processes import POOL
from bench.queue_cost.waiting_gpu import make_engine
from penstock.cli.demo_model import demo_model
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.engine.scheduler.scheduler import Scheduler
from penstock.gpu_node.engine.worker import EngineWorker
from penstock.gpu_node.model.gpu.runner import GpuRunner
from penstock.gpu_node.process import serve_engine
from penstock.gpu_node.publishing.outbox import Outbox
from penstock.gpu_node.publishing.sending import QuickEmit
from penstock.gpu_node.settings import NodeSettings
from penstock.queue.broker.node import NodeBroker
from penstock.runtime.process_memory import freeze_gc

METHODS = (
    (Engine, "_complete_step", "commit"),
    (Scheduler, "schedule", "schedule"),
    (Scheduler, "schedule_ahead", "schedule"),
    (Scheduler, "plan", "plan"),
    (GpuRunner, "submit", "submit"),
    (Engine, "_outputs_of", "output"),
    (EngineWorker, "_run_commands", "commands"),
    (Outbox, "deliver", "deliver"),
    (Outbox, "_collect", "accept"),
    (QuickEmit, "start", "pack"),
    (NodeBroker, "start_emit", "send"),
    (Outbox, "_receive", "answers"),
)
"""What is timed: class, method, part."""


async def serve_gpu_node(redis_url: str, step_s: float, max_num_seqs: int) -> None:
    """Serve until SIGTERM. At SIGUSR1, write one line of JSON: steps, sends, and CPU microseconds by part."""
    torch.set_num_threads(1)
    parts = CpuParts()
    for owner, method, part in METHODS:
        parts.watch(owner, method, part)
    engine, gpu = await asyncio.to_thread(make_engine, str(demo_model()), step_s, max_num_seqs)

    def say() -> None:
        tokens = engine.stats().decode_tokens
        counts = {"steps": gpu.num_steps, "tokens": tokens, "waited": gpu.num_waited, "idle_us": gpu.idle_us}
        sys.stdout.write(json.dumps(counts | parts.spent_us) + "\n")
        sys.stdout.flush()

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, say)
    freeze_gc()
    settings = NodeSettings.load(
        redis_url=redis_url, model=POOL, pool=POOL, max_num_seqs=max_num_seqs, drain_s=0, log_jobs=False
    )
    await serve_engine(settings, engine)
