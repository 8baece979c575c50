"""The four stages. Each writes what it found as JSON after every part, so a run that is cut short keeps what it has."""

from __future__ import annotations

import gc
import json
import platform
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from bench_gpu import STAGE_S, headline, kernels, model_checks, ranks, steps, tools
from bench_gpu.load import sharegpt_lengths, timed_load, uniform_lengths
from bench_gpu.measure import Clock, ceilings
from bench_gpu.models import Model, Options, make_model, spec_of
from bench_gpu.shapes import CHECKED, DRY, FULL
from bench_gpu.suite import failed_files, run_tests
from bench_gpu.truth import check_kernels
from bench_gpu.verdict import WrongResultError
from penstock.gpu_node.model.gpu.device import Device
from penstock.kernels.triton.launches import table_name

NUM_WORKERS = 12
_WRITES_EVERY_S = 2.0
"""So a process that is killed loses few rows."""


class Run:
    """One run: its device, its ceilings, and what the stages have found so far."""

    def __init__(self, out: Path, *, dry: bool, stage_s: float = STAGE_S) -> None:
        self._out, self._dry, self._stage_s = out, dry, stage_s
        self._device = torch.device("cpu" if dry else "cuda")
        self._clock = Clock(self._device, stage_s)
        self._ceilings = ceilings(self._clock, dry=dry)
        # Traces and tables of launches; only the archive has them.
        self._further = tempfile.TemporaryDirectory(prefix="bench-gpu")
        self.failed: dict[str, str] = {}
        """Parts that did not come to their end, and why."""
        print(f"ceilings: {self._ceilings}", flush=True)

    def stage(self, name: str) -> None:
        """Run a stage. Raises WrongResultError if a result is wrong; other errors end only the part they are in."""
        print(f"== {name}", flush=True)
        self._clock.start(self._stage_s)
        self._free()
        self._name, self._wrong, self._written_s = name, dict[str, str](), 0.0
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
        """Run the tests beside the other checks: they compile for minutes, and need little of the GPU.

        All checks run as far as the stage's time goes. Raises WrongResultError with all wrong results.
        """
        files = ("test_launches.py",) if self._dry else ()
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(run_tests, NUM_WORKERS, names=files, limit_s=self._clock.left_s)
            self._checks()
            tests = self._part("tests", running.result)
        failed, unfinished = failed_files(tests or ())
        if unfinished:
            self._fail("tests", f"no end in the stage's time: {unfinished}")
        if failed:
            self._wrong["tests"] = f"tests failed: {failed}; their output is in truth.json"
        if self._wrong:
            raise WrongResultError("; ".join(self._wrong.values()))

    def _checks(self) -> None:
        self._check("kernels in bfloat16", lambda: check_kernels(DRY if self._dry else CHECKED, self._device))
        names, length = (("tiny",), 12) if self._dry else (("tiny", "llama-1b", "qwen3-0.6b"), 200)
        device = Device(self._device)
        for name in names:
            given = name, spec_of(name), device, torch.bfloat16, length
            self._check(f"{name} against float64", partial(model_checks.check_logits, *given))
        name, rows = ("tiny", 2) if self._dry else ("qwen3-0.6b", 64)
        self._check_steps(name, rows)
        self._check_steps(name, rows, " deterministic", deterministic=True)
        self._check_steps(name, min(rows, 8), " independent launches", dependent_launches=False)
        self._check_steps("tiny", 2, " offloaded", num_layers=4, num_offloaded=3)
        self._check("ranks", lambda: ranks.check(name, spec_of(name), device, rows))
        self._check("sanitizer", lambda: tools.sanitized(self._clock, dry=self._dry))

    def _check_steps(self, name: str, rows: int, more: str = "", **options: Any) -> None:
        """Check a model's steps with and without graphs and company; `more` names the options."""
        usual: dict[str, Any] = {"max_num_seqs": rows, "max_model_len": 512, "num_blocks": 40 * rows}
        model = self._part(f"{name}{more} made", partial(self._make, name, **usual | options), keep=False)
        if model is None:
            return
        self._check(f"{name}{more}: graph = eager", lambda: model_checks.check_graphs(model, 20))
        self._check(f"{name}{more}: two in flight = one", lambda: model_checks.check_in_flight(model, rows, 20))
        if options.get("deterministic"):
            self._check(f"{name}{more}: alone = in a batch", lambda: model_checks.check_company(model, 20))

    def _check(self, title: str, rows: Callable[[], Iterable[dict[str, Any]]]) -> None:
        """As `_rows`, while the stage has time; a wrong result ends the part only, until the stage ends."""

        def in_time() -> Iterator[dict[str, Any]]:
            coming: Iterator[dict[str, Any]] | None = None
            while self._clock.left_s > 0:
                coming = iter(rows()) if coming is None else coming
                row = next(coming, None)
                if row is None:
                    return
                yield row
            raise TimeoutError("the stage's time is over")

        try:
            self._rows(title, in_time())
        except WrongResultError as error:
            self._wrong[title] = str(error)

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
        self._decode_otherwise()
        # The profiled kernels need the memory that the model's cache has.
        self._free()
        self._rows("profiler", tools.profiled(Path(self._further.name), self._clock, dry=self._dry))

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

    def _decode_otherwise(self) -> None:
        """Measure the same decode steps with each option that a measurement decides about."""
        name, rows, grid = self._decode_grid()
        for title, options in (
            ("cache by layer", {"by_layer": True}),
            ("independent launches", {"dependent_launches": False}),
        ):
            make = partial(self._make, name, max_num_seqs=rows, **options)
            model = self._part(f"{name}, {title}: made", make, keep=False)
            if model is not None:
                self._rows(f"{name} decode, {title}", steps.decode(model, self._clock, self._ceilings, grid))
            del model

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
            yield timed_load(model, self._clock, uniform_lengths(count, shortest, longest), budget, overlap=overlap)

    def _measured_load(self, goal: headline.LoadGoal) -> dict[str, Any]:
        """Measure requests of ShareGPT's lengths that are all there at once; tokens per second are of outputs alone."""
        lengths = sharegpt_lengths(goal.count, divisor=goal.divisor)
        model = self._make(goal.model, max_num_seqs=goal.max_num_seqs)
        row = timed_load(model, self._clock, lengths, goal.budget)
        all_tokens_s = int(lengths.sum()) / row["ms"] * 1e3
        return row | {"all_tokens_s": all_tokens_s, "fraction": row["tokens_s"] / goal.tokens_s}

    def _free(self) -> None:
        """Return the GPU memory of models that nothing refers to."""
        gc.collect()
        if self._clock.is_gpu:
            torch.cuda.empty_cache()

    def _make(self, name: str, *, num_layers: int | None = None, **options: Any) -> Model:
        """num_layers: None for the shape's own."""
        self._free()
        usual: dict[str, Any] = {"dtype": torch.bfloat16}
        usual |= {"max_model_len": 96, "num_blocks": 80} if self._dry else {"max_model_len": 16_384}
        spec = spec_of(name)
        if num_layers is not None:
            spec = replace(spec, layers=spec.layers[:1] * num_layers)
        torch.manual_seed(0)
        return make_model(name, spec, Device(self._device), Options(**usual | options))

    def _rows(self, title: str, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Print, keep and return rows as they come, so that those before an error stay."""
        kept: list[dict[str, Any]] = []
        self._found[title] = kept

        def take() -> list[dict[str, Any]]:
            for row in rows:
                kept.append(row)
                print(f"{title}: {_line(row)}", flush=True)
                if time.monotonic() > self._written_s + _WRITES_EVERY_S:
                    self._write()
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
            self._found.setdefault("wrong", []).append(str(error))
            raise
        except Exception as error:
            traceback.print_exc()
            self._fail(title, repr(error))
        finally:
            self._write()
        return result

    def _fail(self, title: str, why: str) -> None:
        self.failed[title] = why
        self._found.setdefault("failed", {})[title] = why
        self._write()

    def _write(self) -> None:
        self._written_s = time.monotonic()
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
