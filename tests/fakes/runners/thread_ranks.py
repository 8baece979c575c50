"""Ranks as threads of the test's process: what they compute is the same, and a test of arithmetic starts in no time."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from penstock.gpu_node.model.loading import rank_process
from penstock.gpu_node.model.native import ranks as native_ranks
from penstock.gpu_node.model.ranks.control import GroupMemory

Report = Callable[[Mapping[str, Any]], None]


class ThreadRank:
    """A rank on a thread. It ends when its group is aborted, as all groups are."""

    def __init__(self, module: str, config: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        self._reports, self._report = os.pipe()
        own = json.loads(json.dumps(dict(config)))
        memory = GroupMemory.of([os.dup(descriptor) for descriptor in own["memory"]])
        self._thread = threading.Thread(target=self._run, args=(own, memory), name=f"rank-{own['rank']}")
        self._thread.start()

    def fileno(self) -> int:
        return self._reports

    def is_stopped(self) -> bool:
        return False

    def kill(self) -> None:
        """The abort of the group ends it."""

    def close(self) -> None:
        self._thread.join()
        os.close(self._reports)

    def compute(self, config: Mapping[str, Any], memory: GroupMemory, report: Report) -> None:
        """Do what the process does."""
        rank_process.run_rank(config, memory, report)

    def _run(self, config: Mapping[str, Any], memory: GroupMemory) -> None:
        try:
            self.compute(config, memory, self._write)
        except Exception as error:
            self._write({"error": str(error)})
        finally:
            memory.close()
            os.close(self._report)

    def _write(self, event: Mapping[str, Any]) -> None:
        os.write(self._report, json.dumps(event).encode() + b"\n")


@contextmanager
def ranks_as_threads() -> Iterator[None]:
    """Start further ranks of the native runner as threads."""
    with mock.patch.object(native_ranks, "RankProcess", ThreadRank):
        yield


@contextmanager
def torch_group_as_threads() -> Iterator[None]:
    """Start further ranks of the torch and the GPU runner as threads, which follow messages and exchange by gloo."""
    from penstock.gpu_node.model.loading import rank_host, torch_rank_process
    from penstock.gpu_node.model.ranks.plain_exchange import PlainExchange

    class TorchThread(ThreadRank):
        def compute(self, config: Mapping[str, Any], memory: GroupMemory, report: Report) -> None:
            torch_rank_process.run_rank(config, memory, PlainExchange(memory, config["rank"]), report)

    with mock.patch.object(rank_host, "RankProcess", TorchThread):
        yield
