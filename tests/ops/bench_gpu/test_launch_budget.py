"""The GPU runner launches no more kernels than it did; counted without a GPU, in a process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.source_tree import ROOT

LAYER = {"bf16": 10, "int8": 11, "fp8": 11, "int4": 14}
"""Launches of a layer in decode steps, by the format of its matrices. Sums of int4 are split; another kernel adds them.
On an H100, one kernel took up to five times as long, because it did not fill the GPU."""
WIDENED = {"llama-8b int4": {"decode many": 19, "mixed many": 20}}
"""What more than 64 rows add to each layer in int4: pieces of a matrix are widened and then multiplied, in turn."""
OUTSIDE = {"bf16": 12, "int8": 12, "fp8": 13, "int4": 12}
"""Launches of a step outside of its layers: embedding, last layer's gathers, final norm, head, sampler, results."""
PREFILL_ATTENTION = 1
"""What a mixed step adds to each layer."""
ADAPTERS = 8
"""What adapters add to each layer: two launches for each of its four matrices."""


def _counts(part: str) -> dict[str, dict[str, tuple[int, int]]]:
    """Return by setup and kind of step: launches per layer, launches outside of layers.

    Where launches are dependent, a decode step has no other ones of Triton.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'ops'}"
    command = [sys.executable, "-m", "bench_gpu.without_gpu.launch_counts", part, "--json"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all((line["plain"] == 0) == line["setup"].endswith("dependent") for line in lines), lines
    return {line["setup"]: {kind: tuple(count) for kind, count in line["counts"].items()} for line in lines}


def _assert_within_budget(counts: dict[str, dict[str, tuple[int, int]]]) -> None:
    for setup, kinds in counts.items():
        matrices = setup.split()[1]
        widened = WIDENED.get(" ".join(setup.split()[:2]), {})
        for kind, (layer, outside) in kinds.items():
            layer_budget = LAYER[matrices] + PREFILL_ATTENTION * ("mixed" in kind) + ADAPTERS * ("adapters" in kind)
            layer_budget += widened.get(kind, 0)
            for part, found, budget in (
                ("per layer", layer, layer_budget),
                ("outside of layers", outside, OUTSIDE[matrices]),
            ):
                where = f"{setup}, {kind} step: {found} launches {part}"
                assert found <= budget, f"{where}, {budget} before: fuse them, or say in this file why more are faster"
                assert found >= budget, f"{where}, {budget} before: lower the constant, so that the gain stays"


def test_llamas_steps_launch_no_more_than_their_budget() -> None:
    """With adapters: such a runner has graphs without them too. Dependent launches are as many as others."""
    setup, kinds = "llama-8b bf16 kv-bf16 adapters dependent", {"decode few", "decode many", "mixed few", "mixed many"}
    counts = _counts(setup)
    assert set(counts[setup]) == kinds | {f"{kind} adapters" for kind in kinds}
    _assert_within_budget(counts)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_models_and_formats_steps_launch_no_more_than_their_budget() -> None:
    counts = _counts("")
    assert len(counts) == 18
    assert {setup.split()[1] for setup in counts} == set(LAYER)
    _assert_within_budget(counts)
