"""`python -m fakes.runners.limited_ranks MODEL RANKS NUM_TOKENS [GROUP…]`: ranks of which each is in a control group.

It prints the tokens of an answer, and the major page faults of each rank while it decoded.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.model.native import ranks as native_ranks
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.ranks.processes import RankProcess

PROMPT = [5, *range(3, 43)]


def _join(group: str) -> None:
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))


class LimitedRank(RankProcess):
    """A rank that starts in the group of its number: a process is in that of the one that starts it."""

    groups: Sequence[str] = ()

    def __init__(self, module: str, config: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        _join(self.groups[config["rank"]])
        try:
            super().__init__(module, config, descriptors)
        finally:
            _join(self.groups[0])


def _major_faults(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[9])


def main() -> None:
    """Run the model."""
    model, num_ranks, num_tokens, *LimitedRank.groups = sys.argv[1:]
    if LimitedRank.groups:
        _join(LimitedRank.groups[0])
    sizes: dict[str, Any] = {"num_threads": int(num_ranks), "tensor_parallel_size": int(num_ranks), "num_kv_blocks": 16}
    with mock.patch.object(native_ranks, "RankProcess", LimitedRank) if LimitedRank.groups else nullcontext():
        engine = Engine(model, runner="native", dtype="bfloat16", **sizes)
    runner = engine._runner
    assert isinstance(runner, NativeRunner)
    runner.wait_until_packed()
    processes = os.getpid(), *runner.rank_pids

    def run(count: int) -> tuple[int, ...]:
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=count, ignore_eos=True)
        return engine.generate([PROMPT], params)[0].choices[0].token_ids

    run(2)
    before = [_major_faults(pid) for pid in processes]
    tokens = run(int(num_tokens))
    faults = [_major_faults(pid) - first for pid, first in zip(processes, before, strict=True)]
    print(json.dumps({"tokens": tokens, "faults": faults}))
    runner.close()


if __name__ == "__main__":
    main()
