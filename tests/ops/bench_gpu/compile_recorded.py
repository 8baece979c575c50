"""Compile exactly the Triton launches that the GPU runner makes, and print what their machine code uses.

A process of its own, as `compile_all.py` is. `compile_recorded.py 90 8` records the launches of such a GPU, prints one
line of JSON about them, and deals them out to 8 shards. Then it reads the numbers of shards from standard input. For
each shard it prints one line for each program, and one with their number.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import triton
from bench_gpu.without_gpu.launch_counts import different_launches
from bench_gpu.without_gpu.recorder import A100, H100, TritonLaunch
from bench_gpu.without_gpu.setups import COMPILED, COUNTED
from triton.runtime.jit import JITFunction, MockTensor

from tests.kernels.triton.compile_all import NoCard, binary_facts
from tests.kernels.triton.known_programs import waits_first


def _recorded(capability: int) -> list[TritonLaunch]:
    """Return the different launches of all setups that such a GPU supports, in a fixed order."""
    gpu = {gpu.capability: gpu for gpu in (A100, H100)}[capability]
    found: set[TritonLaunch] = set()
    for setup in (*COUNTED, *COMPILED):
        if capability >= 89 or not setup.needs_float8:
            found |= different_launches(setup, gpu)
    return sorted(found, key=lambda launch: (launch.name, str(launch.args), str(launch.options)))


def _shards(launches: list[TritonLaunch], count: int) -> list[list[TritonLaunch]]:
    """Deal out the launches. Those that Triton compiles to one program stay together, or it would be compiled twice."""
    groups: dict[str, list[TritonLaunch]] = {}
    for launch in launches:
        args = tuple(_specialized(arg) for arg in launch.args)
        groups.setdefault(str((launch.name, args, launch.options)), []).append(launch)
    dealt = [list(groups.values())[i::count] for i in range(count)]
    return [[launch for group in some for launch in group] for some in dealt]


def _specialized(arg: Any) -> Any:
    """Return what Triton compiles an argument for: 1, multiples of 16, or any number."""
    return (arg == 1, arg % 16 == 0) if type(arg) is int else type(arg) if type(arg) is float else arg


def _compile(launches: list[TritonLaunch], capability: int, printed: set[str]) -> int:
    """Print the facts of each program that was not printed before; return their number."""
    before = len(printed)
    for launch in launches:
        args = [MockTensor.wrap_dtype(arg) for arg in launch.args]
        kernel = JITFunction.run(launch.function, *args, grid=(1,), warmup=True, **dict(launch.options))
        if kernel.hash in printed:
            continue
        printed.add(kernel.hash)
        options = dict(launch.options)
        facts = {
            "kernel": launch.name,
            "module": Path(launch.function.fn.__code__.co_filename).stem,
            "dtype": str(launch.args[0]),
            "sm": capability,
            "is_dependent": kernel.metadata.launch_pdl,
            "waits_first": waits_first(kernel.asm["ptx"]),
            "shared": kernel.metadata.shared,
            "warps": kernel.metadata.num_warps,
            "constants": {name: value for name, value in options.items() if name.isupper() and type(value) is int},
            **binary_facts(kernel.asm["cubin"]),
        }
        print(json.dumps(facts), flush=True)
    return len(printed) - before


def main() -> None:
    capability, num_shards = map(int, sys.argv[1:])
    launches = _recorded(capability)
    triton.runtime.driver.set_active(NoCard(capability))
    print(json.dumps({"num_launches": len(launches), "kernels": sorted({one.name for one in launches})}), flush=True)
    shards, printed = _shards(launches, num_shards), set[str]()
    for line in sys.stdin:
        for shard in map(int, line.split()):
            num_programs = _compile(shards[shard], capability, printed)
            print(json.dumps({"shard": shard, "num_programs": num_programs}), flush=True)


if __name__ == "__main__":
    main()
