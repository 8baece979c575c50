"""A further rank of the torch or the GPU runner: `python -m penstock.gpu_node.model.loading.torch_rank_process CONFIG`.

Rank 0 starts it, with the memory to share as inherited descriptors; or `penstock rank` does on another host, with its
connection to rank 0. It has no Redis and no tokenizer.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from penstock.contract.errors import EXIT_WRONG_USE, ConfigError, PenstockError
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.ranks.connection import RankConnection
from penstock.gpu_node.model.ranks.control import GroupMemory
from penstock.gpu_node.model.ranks.hosts import CopiedMemory
from penstock.gpu_node.model.ranks.member import end_without
from penstock.gpu_node.model.ranks.plain_exchange import PlainExchange
from penstock.gpu_node.model.ranks.processes import report
from penstock.runtime.logging import LogSettings, configure_logging, tell_end

Report = Callable[[Mapping[str, Any]], None]

_GRACE_S = 1.0


def run_rank(config: Mapping[str, Any], memory: GroupMemory, exchange: PlainExchange, report: Report) -> None:
    """Find the model, report that this rank can join, load its part, and follow rank 0 until the group ends.

    Raises ConnectionError if other ranks are gone.
    """
    # They import torch, which takes seconds. The lease is watched meanwhile.
    from penstock.gpu_node.model.loading.load import find_model, load_part
    from penstock.gpu_node.model.loading.rank_host import facts_of, join_others
    from penstock.gpu_node.model.torch_common.rank_member import follow
    from penstock.gpu_node.model.torch_common.ranked_runner import check_arithmetic
    from penstock.gpu_node.model.torch_common.ranks import BrokenExchangeError, Joining

    options = RunnerOptions(**config["options"])
    found = find_model(config["model"], options, lambda stage, fraction: None, revision=config.get("revision"))
    facts, expected = facts_of(found.described), config["facts"]
    for name in facts:
        if facts[name] != expected[name]:
            raise ConfigError(f"it has another {name}: {facts[name]}, and rank 0 has {expected[name]}")
    report({"ready": facts, "pid": os.getpid()})
    try:
        links = join_others(options, Joining(**config["joining"]), exchange)
        part, arithmetic, adapters = load_part(found, options, links)
        report({"weight_bytes": part.held.weights, "kv_bytes": part.held.kv_blocks})
        check_arithmetic(links.world, arithmetic)
        follow(memory, exchange, part, adapters)
    except BrokenExchangeError as error:
        raise ConnectionError(str(error)) from error


def _views_of(config: Mapping[str, Any]) -> tuple[GroupMemory, PlainExchange, Report]:
    """Return the memory of the group, this rank's words in it, and how it reports to rank 0."""
    if "connection" not in config:
        memory = GroupMemory.of(config["memory"])
        return memory, PlainExchange(memory, config["rank"]), partial(report, config["report"])
    connection = RankConnection(socket.socket(fileno=config["connection"]))
    # Other ranks connect to the address of this host by which it reaches rank 0.
    config["joining"].update(address=connection.own_address, num_here=1)
    copied = CopiedMemory(connection, config["rank"], _end_soon)
    copied.start()
    return copied.memory, copied.exchange, copied.report


def _end_soon() -> None:
    """End this process, unless it ends by itself: it may wait for ranks that are gone, or report an error."""
    time.sleep(_GRACE_S)
    os._exit(1)


def main() -> None:
    """Run the rank, and report an error in one line."""
    config = json.loads(sys.argv[1])
    configure_logging(LogSettings.load(), prefix=f"rank {config['rank']} | ", fields={"rank": config["rank"]})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends rank 0, which ends its ranks.
    os.sched_setaffinity(0, config["cores"])
    tell: Report = lambda event: None  # noqa: E731
    try:
        memory, exchange, tell = _views_of(config)
        end_without(memory, config["options"]["lease_ms"] / 1000, rank=config["rank"])
        run_rank(config, memory, exchange, tell)
    except PenstockError as error:
        _end(tell, error, EXIT_WRONG_USE)
    except (MemoryError, OSError) as error:
        _end(tell, error, 1)


def _end(tell: Report, error: Exception, status: int) -> NoReturn:
    tell({"error": str(error)})
    tell_end(str(error))
    # Threads of gloo may wait for ranks that are gone.
    os._exit(status)


if __name__ == "__main__":
    main()
