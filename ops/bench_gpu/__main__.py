"""Runs the stages one after the other, each as far as its time goes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from bench_gpu import STAGE_S

STAGES = ("truth", "kernels", "steps", "headline")


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_gpu")
    parser.add_argument("--dry", action="store_true", help="on the CPU by Triton's interpreter; timings mean nothing")
    parser.add_argument("--out", type=Path, default=Path("build/bench-gpu"), help="where results go")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="default: all of them")
    parser.add_argument("--seconds", type=float, default=STAGE_S, help="a stage's time; what has begun still ends")
    arguments = parser.parse_args()
    # Triton and torch's allocator read these when they are first used.
    if arguments.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    import torch

    if arguments.dry:
        from fixtures.interpreter import mend

        mend()
    from bench_gpu.run import Run
    from bench_gpu.verdict import WrongResultError

    if not arguments.dry and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device; --dry runs all of it on the CPU, tiny")
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = Run(arguments.out, dry=arguments.dry, stage_s=arguments.seconds)
    try:
        for stage in arguments.stages:
            run.stage(stage)
    except WrongResultError as error:
        raise SystemExit(f"wrong result, nothing after it was measured: {error}") from error
    finally:
        run.pack()
    if run.failed:
        raise SystemExit(f"failed: {', '.join(run.failed)}")


if __name__ == "__main__":
    main()
