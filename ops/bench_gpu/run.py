"""The four stages. Each writes what it found as JSON after every part, so a run that is cut short keeps what it has."""

from __future__ import annotations

import gc
import json
import platform
import tarfile
import tempfile
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from bench_gpu import headline, kernels, model_checks, steps, tools
from bench_gpu.load import Driver, Lengths, make_requests, sharegpt_lengths, uniform_lengths
from bench_gpu.measure import Clock, ceilings
from bench_gpu.models import Model, Options, make_model, spec_of
from bench_gpu.shapes import CHECKED, DRY, FULL
from bench_gpu.suite import run_tests
from bench_gpu.truth import check_kernels
from bench_gpu.verdict import WrongResultError
from penstock.gpu_node.model.gpu.device import Device
from penstock.kernels.triton.launches import table_name

STAGE_S = 450.0
"""Of the eight minutes, so that a part that has begun can end."""
NUM_WORKERS = 12


class Run:
    """One run: its device, its ceilings, and what the stages have found so far."""

    def __init__(self, out: Path, *, dry: bool) -> None:
        self._out, self._dry = out, dry
        self._device = torch.device("cpu" if dry else "cuda")
        self._clock = Clock(self._device, STAGE_S)
        self._ceilings = ceilings(self._clock, dry=dry)
        # Traces and tables of launches; only the archive has them.
        self._further = tempfile.TemporaryDirectory(prefix="bench-gpu")
        self.failed: dict[str, str] = {}
        """Parts that did not come to their end, and why."""
        print(f"ceilings: {self._ceilings}", flush=True)

    def stage(self, name: str) -> None:
        """Run a stage. Raises WrongResultError if a result is wrong; other errors end only the part they are in."""
        print(f"== {name}", flush=True)
        self._clock.start(STAGE_S)
        self._name = name
        self._found: dict[str, Any] = {"dry": self._dry, "versions": _versions(), "ceilings": self._ceilings}
        stages: dict[str, Callable[[], None]] = {
            "truth": self._truth,
            "kernels": self._kernels,
            "steps": self._steps_and_profile,
            "headline": self._headline,
        }
        stages[name]()

    def pack(self) -> None:
        """Write everything into one archive."""
        with tarfile.open(self._out / "bench-gpu.tar.gz", "w:gz") as archive:
            for path in [*sorted(self._out.glob("*.json")), *self._out.glob("*.md")]:
                archive.add(path, path.name)
            archive.add(self._further.name, "further")
        self._further.cleanup()

    def _truth(self) -> None:
        files = ("test_launches.py",) if self._dry else ()
        tests = self._part("tests", lambda: run_tests(NUM_WORKERS, names=files))
        if bad := [row["file"] for row in tests or () if not row["is_ok"]]:
            raise WrongResultError(f"tests failed: {bad}; their output is in truth.json")
        self._rows("kernels in bfloat16", check_kernels(DRY if self._dry else CHECKED, self._device))
        self._rows("sanitizer", tools.sanitized(dry=self._dry))
        names, length = (("tiny",), 12) if self._dry else (("tiny", "llama-1b", "qwen3-0.6b"), 200)
        device = Device(self._device)
        for name in names:
            spec = spec_of(name)
            self._rows(f"{name} against float64", model_checks.check_logits(name, spec, device, torch.bfloat16, length))
        name, rows = ("tiny", 2) if self._dry else ("qwen3-0.6b", 64)
        for deterministic in (False, True):
            model = self._make(name, max_num_seqs=rows, max_model_len=512, deterministic=deterministic)
            title = f"{name}{' deterministic' if deterministic else ''}"
            self._rows(f"{title}: graph = eager", model_checks.check_graphs(model, 20))
            self._rows(f"{title}: two in flight = one", model_checks.check_in_flight(model, rows, 20))
            if deterministic:
                self._rows(f"{title}: alone = in a batch", model_checks.check_company(model, 20))

    def _kernels(self) -> None:
        sizes = DRY if self._dry else FULL
        found = kernels.cases(sizes, self._device, self._ceilings, dry=self._dry)
        self._rows("kernels", kernels.measure(found, self._clock, self._ceilings))
        self._rows("copies", [kernels.copy_ms(self._clock, dry=self._dry)])
        swept = self._rows("sweep", kernels.sweep(sizes, self._clock, dry=self._dry))
        if tuned := kernels.tuned(swept, sizes):
            # To be used, it goes to kernels/triton/tuned/.
            path = Path(self._further.name) / table_name(str(self._ceilings["device"]))
            path.write_text(json.dumps(tuned, indent=1) + "\n")

    def _steps_and_profile(self) -> None:
        self._steps()
        self._decode_by_layer()
        # The profiled kernels need the memory that the model's cache has.
        self._free()
        self._rows("profiler", tools.profiled(Path(self._further.name), dry=self._dry))

    def _steps(self) -> None:
        name, rows, grid = self._decode_grid()
        model = self._make(name, max_num_seqs=rows)
        ceilings, clock = self._ceilings, self._clock
        self._rows(f"{name} decode", steps.decode(model, clock, ceilings, grid))
        prompts = [(2, 9)] if self._dry else [(1, 512), (1, 2048), (1, 8192), (8, 1024)]
        self._rows(f"{name} prefill", steps.prefill(model, clock, ceilings, prompts))
        batch, context, chunk = (2, 10, 6) if self._dry else (64, 1024, 512)
        self._rows(f"{name} mixed", [steps.mixed(model, clock, batch, context, chunk)])
        self._rows(f"{name} host", [steps.submit_ms(model, clock, batch, context)])
        self._rows(f"{name} load", self._loads(model))
        further = Path(self._further.name)
        table = self._part(f"{name} trace", lambda: steps.trace(model, further / "trace.json", batch, context))
        (further / "trace.txt").write_text(str(table))

    def _decode_by_layer(self) -> None:
        """Measure the same decode steps with the other layout of the KV cache."""
        name, rows, grid = self._decode_grid()
        model = self._part(
            f"{name} by layer made", partial(self._make, name, by_layer=True, max_num_seqs=rows), keep=False
        )
        if model is not None:
            found = steps.decode(model, self._clock, self._ceilings, grid)
            self._rows(f"{name} decode, cache by layer", found)

    def _decode_grid(self) -> tuple[str, int, list[tuple[int, int]]]:
        """Return a model, the sequences that it takes, and the batches and contexts that are measured."""
        batches, contexts = ((1, 3), (17,)) if self._dry else ((1, 8, 32, 64, 128), (128, 1024, 8192))
        name, rows = ("tiny", 4) if self._dry else ("llama-8b", 128)
        return name, rows, [(batch, context) for context in contexts for batch in batches]

    def _headline(self) -> None:
        rows: list[dict[str, Any]] = []
        for (name, quantization), goals in headline.by_model(headline.DRY_GOALS if self._dry else headline.GOALS):
            title = f"{name} {quantization}"
            most = max(goal.batch for goal in goals) or 1
            make = partial(self._make, name, quantization=quantization, max_num_seqs=most)
            model = self._part(f"{title} made", make, keep=False)
            if model is None:
                rows += [{"shape": headline.named(goal), "error": "the model was not made"} for goal in goals]
                continue
            for goal in goals:
                shape = headline.named(goal)
                measured = self._part(shape, partial(self._measured, model, goal)) or {}
                rows.append(measured | {"shape": shape, "goal": goal.fraction})
            del model
        load = headline.DRY_LOAD if self._dry else headline.LOAD
        measured = self._part(load.name, partial(self._measured_load, load)) or {"error": "not measured"}
        rows.append(measured | {"shape": load.name, "goal": 1.0})
        self._found["table"] = rows
        self._write()
        (self._out / "headline.md").write_text(headline.table_of(rows) + "\n")
        print(headline.table_of(rows), flush=True)

    def _measured(self, model: Model, goal: headline.Goal) -> dict[str, Any]:
        if goal.batch:
            return next(steps.decode(model, self._clock, self._ceilings, [(goal.batch, goal.tokens)], **goal.rules))
        return next(steps.prefill(model, self._clock, self._ceilings, [(1, goal.tokens)]))

    def _loads(self, model: Model) -> Iterable[dict[str, Any]]:
        """The same requests with steps planned ahead and without, by the engine's scheduler."""
        count, shortest, longest, budget = (3, 3, 7, 16) if self._dry else (256, 100, 1024, 8192)
        for overlap in (True, False):
            yield self._load(model, uniform_lengths(count, shortest, longest), budget, overlap=overlap)

    def _load(self, model: Model, lengths: Lengths, budget: int, *, overlap: bool = True) -> dict[str, Any]:
        driver = Driver(model, make_requests(lengths), budget, overlap=overlap)
        ms = self._clock.wall_ms(driver.run)
        done = {"tokens": driver.num_tokens, "steps": driver.num_steps, "steps_ahead": driver.num_ahead}
        return {"overlap": overlap, "ms": ms, "tokens_s": driver.num_tokens / ms * 1e3, **done}

    def _measured_load(self, goal: headline.LoadGoal) -> dict[str, Any]:
        """Measure requests of ShareGPT's lengths that are all there at once; tokens per second are of outputs alone."""
        lengths = sharegpt_lengths(goal.count, divisor=goal.divisor)
        model = self._make(goal.model, max_num_seqs=goal.max_num_seqs)
        row = self._load(model, lengths, goal.budget)
        all_tokens_s = int(lengths.sum()) / row["ms"] * 1e3
        return row | {"all_tokens_s": all_tokens_s, "fraction": row["tokens_s"] / goal.tokens_s}

    def _free(self) -> None:
        """Return the GPU memory of models that nothing refers to."""
        gc.collect()
        if self._clock.is_gpu:
            torch.cuda.empty_cache()

    def _make(self, name: str, **options: Any) -> Model:
        self._free()
        usual: dict[str, Any] = {"dtype": torch.bfloat16}
        usual |= {"max_model_len": 96, "num_blocks": 80} if self._dry else {"max_model_len": 16_384}
        torch.manual_seed(0)
        return make_model(name, spec_of(name), Device(self._device), Options(**usual | options))

    def _rows(self, title: str, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Print, keep and return rows as they come, so that those before an error stay."""
        kept: list[dict[str, Any]] = []
        self._found[title] = kept

        def take() -> list[dict[str, Any]]:
            for row in rows:
                kept.append(row)
                print(f"{title}: {_line(row)}", flush=True)
            return kept

        self._part(title, take)
        return kept

    def _part(self, title: str, work: Callable[[], Any], *, keep: bool = True) -> Any:
        """Do it, and write down what it found; None, and why, if it fails. A wrong result is not caught."""
        result = None
        try:
            result = work()
            if keep:
                self._found[title] = result
        except WrongResultError as error:
            self._found["wrong"] = str(error)
            raise
        except Exception as error:
            traceback.print_exc()
            self.failed[title] = repr(error)
            self._found.setdefault("failed", {})[title] = repr(error)
        finally:
            self._write()
        return result

    def _write(self) -> None:
        part = self._out / f".{self._name}.part"
        part.write_text(json.dumps(self._found, indent=1) + "\n")
        part.rename(self._out / f"{self._name}.json")


def _line(row: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    return found | {"numpy": np.__version__, "cuda": str(torch.version.cuda)}
