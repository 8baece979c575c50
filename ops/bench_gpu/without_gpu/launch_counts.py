"""Launches of the GPU runner's steps: per layer, and per step outside of the layers."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from bench_gpu.models import Options, make_model
from bench_gpu.without_gpu.recorder import H100, Gpu, RecordingDevice, TritonLaunch, recording
from bench_gpu.without_gpu.setups import COUNTED, FAMILIES, Setup
from penstock.gpu_node.model.gpu.graphs import GraphShapes, StepShape

MAX_NUM_SEQS = 256
_FEW_SEQS = 2
"""For setups that are only compiled: larger batches differ in nothing but the splits of contexts."""
_MAX_TOKENS = 8192
"""`Limits.max_num_batched_tokens` of the models that `make_model` makes."""


@dataclass(frozen=True)
class StepLaunches:
    """The launches of one graph."""

    shape: StepShape
    per_layer: Counter[str]
    outside: Counter[str]
    """Those of a step that has no layers."""

    @property
    def kind(self) -> str:
        """`decode` or `mixed`, ` few` rows of at most 16 or ` many`: products choose their kernel by that."""
        return f"{'mixed' if self.shape.num_tiles else 'decode'} {'few' if self.shape.num_tokens <= 16 else 'many'}"

    def num_launches(self, num_layers: int, kind: str = "") -> int:
        """Return the launches of a step with so many layers, or of those whose names begin with `kind`."""
        counts = ((name, num_layers * count) for name, count in self.per_layer.items())
        return sum(count for name, count in (*counts, *self.outside.items()) if name.startswith(kind))


class Recorded(NamedTuple):
    """All graphs of a setup, and the different launches of Triton kernels in them."""

    steps: list[StepLaunches]
    triton: set[TritonLaunch]


def record(setup: Setup, gpu: Gpu = H100, *, max_num_seqs: int = MAX_NUM_SEQS) -> Recorded:
    """Build a runner of 2 layers and one of 3, and count the launches of all of their graphs.

    The difference is one layer's. The last layer computes only sampling rows, so its gathers count as `outside`.
    """
    has_adapters = setup.num_adapters > 0
    shapes = GraphShapes(max_num_seqs, _MAX_TOKENS, has_adapters=has_adapters).all
    two, _ = _captured(setup, gpu, 2, max_num_seqs)
    three, triton = _captured(setup, gpu, 3, max_num_seqs)
    steps = []
    for shape, fewer, more in zip(shapes, two, three, strict=True):
        layer = Counter({name: count - fewer[name] for name, count in more.items() if count > fewer[name]})
        # Negative where the first or last layer launches a kernel in another way than those between them.
        outside = Counter({name: fewer[name] - 2 * layer[name] for name in fewer.keys() | layer.keys()})
        steps.append(StepLaunches(shape, layer, outside))
    return Recorded(steps, triton)


def different_launches(setup: Setup, gpu: Gpu) -> set[TritonLaunch]:
    """Return the different launches of Triton kernels that a runner makes, outside of graphs too."""
    if setup in COUNTED:
        return record(setup, gpu).triton
    return _captured(setup, gpu, None if setup.shape in FAMILIES else 2, _FEW_SEQS)[1]


def _captured(
    setup: Setup, gpu: Gpu, num_layers: int | None, max_num_seqs: int
) -> tuple[list[Counter[str]], set[TritonLaunch]]:
    spec = setup.spec
    if num_layers is not None:
        spec = replace(spec, layers=spec.layers[:num_layers])
    options = Options(
        quantization=setup.quantization,
        kv_dtype=setup.kv_dtype,
        max_num_seqs=max_num_seqs,
        num_blocks=64,
        num_adapters=setup.num_adapters,
        max_lora_rank=setup.max_lora_rank,
        dtype=setup.dtype,
        deterministic=setup.deterministic,
        dependent_launches=setup.dependent,
    )
    with recording(gpu) as recorder:
        device = RecordingDevice(recorder)
        recorder.triton_launches.clear()
        runner = make_model(setup.shape, spec, device, options).runner
        runner.compile_eager_steps()
        runner.compile_rest()
    return device.captured, recorder.triton_launches


def by_kind(steps: list[StepLaunches]) -> dict[str, StepLaunches]:
    """Return for each kind of step the graph with the most launches."""
    worst: dict[str, StepLaunches] = {}
    for step in steps:
        kind = f"{step.kind}{' adapters' if step.shape.num_adapter_tiles else ''}"
        if kind not in worst or _weight(step) > _weight(worst[kind]):
            worst[kind] = step
    return worst


def _weight(step: StepLaunches) -> tuple[int, int]:
    return step.per_layer.total(), step.outside.total()


def main() -> None:
    """Print the launches of all setups, or of those whose name contains the argument."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="", help="part of a setup's name")
    parser.add_argument("--json", action="store_true", help="print one JSON object per setup instead of Markdown")
    given = parser.parse_args()
    if not given.json:
        print("| setup | step | per layer | outside of layers | the layer's | the others |\n|---|---|---|---|---|---|")
    for setup in COUNTED:
        if given.part in str(setup):
            kinds = dict(sorted(by_kind(record(setup).steps).items()))
            if given.json:
                counts = {kind: (step.per_layer.total(), step.outside.total()) for kind, step in kinds.items()}
                plain = sum(step.num_launches(1, "triton:") for kind, step in kinds.items() if "decode" in kind)
                print(json.dumps({"setup": str(setup), "counts": counts, "plain": plain}), flush=True)
                continue
            for kind, step in kinds.items():
                totals = f"{step.per_layer.total()} | {step.outside.total()}"
                print(
                    f"| {setup} | {kind} | {totals} | {_names(step.per_layer)} | {_names(step.outside)} |", flush=True
                )


def _names(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count)


if __name__ == "__main__":
    main()
