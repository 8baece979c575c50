"""Compile exactly the Triton launches that the GPU runner makes, and print what their machine code uses.

A process of its own, as `compile_all.py` is: `compile_recorded.py 90` prints one line of JSON for each program.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import triton
from bench_gpu.without_gpu.launch_counts import different_launches
from bench_gpu.without_gpu.recorder import A100, H100, TritonLaunch
from bench_gpu.without_gpu.setups import COMPILED, COUNTED
from triton.runtime.jit import JITFunction, MockTensor

from tests.kernels.triton.compile_all import NoCard, binary_facts


def _recorded(capability: int) -> list[TritonLaunch]:
    """Return the different launches of all setups that such a GPU supports, in a fixed order."""
    gpu = {gpu.capability: gpu for gpu in (A100, H100)}[capability]
    found: set[TritonLaunch] = set()
    for setup in (*COUNTED, *COMPILED):
        if capability >= 89 or not setup.needs_float8:
            found |= different_launches(setup, gpu)
    return sorted(found, key=lambda launch: (launch.name, str(launch.args), str(launch.options)))


def main() -> None:
    capability = int(sys.argv[1])
    launches = _recorded(capability)
    triton.runtime.driver.set_active(NoCard(capability))
    printed = set()
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
            "shared": kernel.metadata.shared,
            "warps": kernel.metadata.num_warps,
            "constants": {name: value for name, value in options.items() if name.isupper() and type(value) is int},
            **binary_facts(kernel.asm["cubin"]),
        }
        print(json.dumps(facts), flush=True)
    print(json.dumps({"num_launches": len(launches), "num_programs": len(printed)}), flush=True)


if __name__ == "__main__":
    main()
