"""Runs the stages one after the other, each as far as its share of the time goes."""

from __future__ import annotations

import argparse
import gc
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench_gpu.models import Model

LIMIT_S = 570.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_gpu")
    parser.add_argument("--dry", action="store_true", help="on the CPU by Triton's interpreter; timings mean nothing")
    parser.add_argument("--out", type=Path, default=Path("build/bench-gpu"), help="where results go")
    arguments = parser.parse_args()
    if arguments.dry:
        # Triton reads it when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = Run(arguments.out, dry=arguments.dry)
    run.all()
    if run.failed:
        raise SystemExit(f"failed: {', '.join(run.failed)}")


class Run:
    """One run, and what it has found so far."""

    def __init__(self, out: Path, *, dry: bool) -> None:
        import torch

        from bench_gpu.measure import Clock

        if not dry and not torch.cuda.is_available():
            raise SystemExit("torch sees no CUDA device; --dry runs all of it on the CPU, tiny")
        self._out, self._dry = out, dry
        self._device = torch.device("cpu" if dry else "cuda")
        self._clock = Clock(self._device, LIMIT_S)
        self._found: dict[str, Any] = {"dry": dry}
        self.failed: dict[str, str] = {}
        """Stages that did not come to their end, and why."""

    def all(self) -> None:
        from bench_gpu import kernels, measure

        sizes = kernels.DRY if self._dry else kernels.FULL
        limits = self._stage("limits", lambda: measure.limits(self._clock, dry=self._dry))
        if limits is None:
            return
        self._stage("errors", lambda: kernels.check(sizes, self._device))
        rows = self._stage("kernels", lambda: kernels.measure(sizes, self._clock, limits))
        self._plot("kernels", [(row["kernel"], row["fraction"]) for row in rows or ()])
        self._model("tiny" if self._dry else "llama-3.1-8b", limits, max_num_seqs=4 if self._dry else 128)
        if not self._dry:
            self._model("qwen3-0.6b", limits, max_num_seqs=256)
        name = "tiny" if self._dry else "llama-3.1-8b"
        if short := self._made(name, 4 if self._dry else 64, "fp8"):
            self._decode(short, f"{name} fp8", limits)
            del short
        tuned = self._stage("tuned", lambda: kernels.tune(sizes, self._clock, dry=self._dry))
        from penstock.kernels.triton.launches import table_name

        if tuned:
            # To be kept, it goes to kernels/triton/tuned/.
            (self._out / table_name(limits["card"])).write_text(json.dumps(tuned, indent=1) + "\n")

    def _made(self, name: str, max_num_seqs: int, quantization: str = "none") -> Model | None:
        """A model, if that came to its end; how long its graphs took to capture is part of what was found."""
        made: list[Model] = []
        title = name if quantization == "none" else f"{name} {quantization}"

        def make() -> dict[str, float]:
            ms = self._clock.wall_ms(lambda: made.append(self._make(name, max_num_seqs, quantization)))
            return {"ms": ms, "blocks": made[0].sizes.num_device_blocks}

        self._stage(f"{title} model", make)
        return made.pop() if made else None

    def _make(self, name: str, max_num_seqs: int, quantization: str) -> Model:
        import torch

        from bench_gpu import models
        from penstock.gpu_node.model.gpu.device import Device

        # The previous model's GPU memory is free again.
        gc.collect()
        torch.cuda.empty_cache()
        dtype, length = (torch.float32, 96) if self._dry else (torch.bfloat16, 16_384)
        limits = {"max_num_seqs": max_num_seqs, "max_model_len": length}
        return models.make_model(name, Device(self._device), dtype=dtype, quantization=quantization, **limits)

    def _model(self, name: str, limits: dict[str, Any], max_num_seqs: int) -> None:
        from bench_gpu import steps

        if (model := self._made(name, max_num_seqs)) is None:
            return
        self._decode(model, name, limits)
        prompts = [(2, 9)] if self._dry else [(1, 512), (1, 2048), (1, 8192), (8, 1024)]
        rows = self._stage(
            f"{name} prefill", lambda: steps.prefill(model, self._clock, limits["product_tflop_s"], prompts)
        )
        self._plot(f"{name} prefill", [(f"{row['count']} x {row['tokens']}", row["fraction"]) for row in rows or ()])
        self._stage(f"{name} load", lambda: self._loads(model))
        batch, context = (2, 20) if self._dry else (32, 1024)
        table = self._stage(
            f"{name} trace", lambda: steps.trace(model, self._out / f"{name}-trace.json", batch, context)
        )
        (self._out / f"{name}-trace.txt").write_text(table or "")

    def _decode(self, model: Model, name: str, limits: dict[str, Any]) -> None:
        from bench_gpu import steps

        batches, contexts = ([1, 3], [17, 40]) if self._dry else ([1, 8, 32, 64, 128, 256], [128, 1024, 2048, 8192])
        grid = [(batch, context) for context in contexts for batch in batches]
        rows = self._stage(f"{name} decode", lambda: steps.decode(model, self._clock, limits["copy_gb_s"], grid))
        self._plot(f"{name} decode", [(f"{row['batch']} x {row['context']}", row["fraction"]) for row in rows or ()])

    def _loads(self, model: Model) -> list[dict[str, float]]:
        """The same requests with steps planned ahead and without, by the engine's scheduler."""
        from bench_gpu.load import Driver, make_requests

        count, shortest, longest, budget = (3, 3, 7, 16) if self._dry else (256, 100, 1024, 8192)
        rows = []
        for overlap in (True, False):
            driver = Driver(model, make_requests(count, shortest, longest), budget, overlap=overlap)
            ms = self._clock.wall_ms(driver.run)
            done = {"tokens": driver.num_tokens, "steps": driver.num_steps, "steps_ahead": driver.num_ahead}
            rows.append({"overlap": overlap, "ms": ms, "tokens_s": driver.num_tokens / ms * 1e3, **done})
        return rows

    def _stage(self, name: str, work: Callable[[], Any]) -> Any:
        """Do it, and write down what it found together with all before it; None, and why, if it fails."""
        print(f"{name} ({self._clock.left_s:.0f} s left)", flush=True)
        try:
            self._found[name] = work()
        except Exception as error:
            traceback.print_exc()
            self.failed[name] = repr(error)
            self._found["failed"] = self.failed
        whole = json.dumps(self._found, indent=1)
        part = self._out / ".results.json"
        part.write_text(whole + "\n")
        part.rename(self._out / "results.json")
        return self._found.get(name)

    def _plot(self, name: str, bars: list[tuple[str, float]]) -> None:
        from bench_gpu.plots import plot_fractions

        plot_fractions(self._out / f"{name.replace(' ', '-')}.svg", f"{name}: fraction of the limit", bars)


if __name__ == "__main__":
    main()
