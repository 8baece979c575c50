"""A few launches for the tools of the CUDA toolkit, which make each of them many times slower.

python -m bench_gpu.small_run kernels|steps|profiled [--dry]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace

PROFILED = ("_decode", "_prefill", "_multiply_row", "_multiply_row_int4", "_add_norm", "draw_tokens")
"""The kernels of the part `profiled`, whose time matters most in a step."""


def main() -> None:
    parts: dict[str, Callable[[bool], None]] = {"kernels": _kernels, "steps": _steps, "profiled": _profiled}
    parser = argparse.ArgumentParser(prog="bench_gpu.small_run")
    parser.add_argument("part", choices=parts)
    parser.add_argument("--dry", action="store_true", help="on the CPU by Triton's interpreter")
    arguments = parser.parse_args()
    # Triton reads it when it is first imported.
    if arguments.dry:
        os.environ["TRITON_INTERPRET"] = "1"
        from fixtures.interpreter import mend

        mend()
    parts[arguments.part](arguments.dry)


def _kernels(is_dry: bool) -> None:
    """Check each kernel once against float64, on sizes that fill no tile."""
    import torch

    from bench_gpu.shapes import DRY
    from bench_gpu.truth import check_kernels

    device = torch.device("cpu" if is_dry else "cuda")
    sizes = DRY if is_dry else replace(DRY, head_dim=64, hidden=256, inter=288, vocab=4099, rows=5, context=150)
    for row in check_kernels(sizes, device):
        print(row["check"], flush=True)


def _steps(is_dry: bool) -> None:
    """Replay graphs of decode steps, and compare them with the same steps without graphs."""
    import torch

    from bench_gpu import model_checks
    from bench_gpu.models import Options, make_model, spec_of
    from penstock.gpu_node.model.gpu.device import Device

    options = Options(max_num_seqs=2, max_model_len=96, num_blocks=40)
    model = make_model("tiny", spec_of("tiny"), Device(torch.device("cpu" if is_dry else "cuda")), options)
    for row in [*model_checks.check_graphs(model, 20), *model_checks.check_in_flight(model, 2, 20)]:
        print(row["check"], flush=True)


def _profiled(is_dry: bool) -> None:
    """Run each kernel of PROFILED twice at the sizes of Llama-3.1-8B."""
    import torch

    from bench_gpu import kernels
    from bench_gpu.shapes import DRY, FULL

    sizes, device = DRY if is_dry else replace(FULL, prompt=2048), torch.device("cpu" if is_dry else "cuda")
    for case in kernels.profiled_cases(sizes, device):
        work = case.make()
        work()
        work()
        print(case.name, flush=True)


if __name__ == "__main__":
    main()
