"""A further rank of a model, as a process: `python -m penstock.gpu_node.model.loading.rank_process CONFIG`.

Rank 0 starts it, with the memory to share as inherited descriptors. It has no torch, no Redis and no tokenizer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from penstock.contract.errors import PenstockError
from penstock.gpu_node.model.loading.load import find_model
from penstock.gpu_node.model.native.load import load_rank
from penstock.gpu_node.model.native.ranks import RankPlace, SharedWeights
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.ranks.control import GroupMemory
from penstock.gpu_node.model.ranks.member import end_without, serve
from penstock.gpu_node.model.ranks.processes import report
from penstock.runtime.logging import LogSettings, configure_logging

Report = Callable[[Mapping[str, Any]], None]


def run_rank(config: Mapping[str, Any], memory: GroupMemory, report: Report) -> None:
    """Load the rank that CONFIG describes, report that it is ready, and serve until the group ends."""
    options = RunnerOptions(**config["options"])
    place = RankPlace(config["rank"], config["size"])
    described = find_model(config["model"], options, lambda stage, fraction: None).described
    counts = {name: config[name] for name in ("num_blocks", "num_threads")}
    runner, facts, library = load_rank(described, options, place, SharedWeights(*config["weights"]), **counts)
    exchange = memory.exchange(library, *place)
    runner.use(memory, exchange)
    runner.bind_thread()
    held = {"weight_bytes": runner.held.weights, "kv_bytes": runner.held.kv_blocks}
    report({"ready": facts, "pid": os.getpid(), **held})
    try:
        serve(memory, exchange, runner)
    finally:
        runner.close()


def main() -> None:
    """Run the rank, and report an error in one line."""
    config = json.loads(sys.argv[1])
    configure_logging(LogSettings.load(), prefix=f"rank {config['rank']} | ", fields={"rank": config["rank"]})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends rank 0, which ends its ranks.
    os.sched_setaffinity(0, config["cores"])
    try:
        memory = GroupMemory.of(config["memory"])
        end_without(memory, config["options"]["lease_ms"] / 1000)
        run_rank(config, memory, lambda event: report(config["report"], event))
    except (PenstockError, MemoryError, OSError) as error:
        report(config["report"], {"error": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
