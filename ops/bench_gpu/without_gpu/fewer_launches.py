"""What dependent launches save of a decode step, and what fewer kernels would save with them and without.

    PYTHONPATH=.:ops python -m bench_gpu.without_gpu.fewer_launches     the table of README.md

Estimates: no constant of time was measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bench_gpu.models import spec_of
from bench_gpu.without_gpu.estimates import CEILINGS, LAUNCH_US, OVERLAPPED_US, STEPS, Step, estimate, graph_of
from bench_gpu.without_gpu.recorder import H100

ARRIVAL_US = 0.7
"""What an atomic counter adds to a program's end: its stores must have reached the L2 cache, and then the addition."""
L2_GB_S = 5500.0
"""What all multiprocessors together read from the L2 cache of an H100."""
DECODE_STEPS = (
    *("Llama-3.1-8B bf16, batch 1", "… batch 64, context 1k, top-p", "… fp8 weights and head, batch 1"),
    *("… int8 weights, batch 1", "… int4 weights, batch 1", "Llama-1B bf16, batch 1"),
)


class Saving(NamedTuple):
    """What one change saves of a step; less than 0 if it makes the step longer."""

    change: str
    num_launches: int
    num_bytes: int
    """Of GPU memory, read and written."""
    alone_us: float
    beside_us: float
    """With dependent launches."""


def savings(step: Step) -> Iterator[Saving]:
    """Yield what each change saves of a decode step on the first GPU of CEILINGS."""
    dependent = estimate(step, dependent=True)
    yield Saving("dependent launches", 0, 0, dependent.num_overlapped * (LAUNCH_US - OVERLAPPED_US), 0.0)
    yield _removed("merge by last arrival", step, "merge", 0, ARRIVAL_US)
    yield _removed("norms in the products behind them", step, "add_norm", *_norms(step))
    # Rows in 8 bits need the largest number of all columns, so their activation stays a kernel of its own.
    if step.quantization not in ("fp8", "int8"):
        spec = spec_of(step.shape)
        columns = (1 + spec.is_gated) * spec.intermediate_size
        # The product's outputs are neither written nor read.
        yield _removed("activation in the product ahead", step, "activate", 2 * 2 * step.num_tokens * columns, 0.0)


def _norms(step: Step) -> tuple[int, float]:
    """Return the bytes that a layer saves without kernels for its norms, and the microseconds that products lose.

    Every program of a product reads and norms all rows. At best there is one program per multiprocessor.
    """
    row = step.num_tokens * spec_of(step.shape).hidden_size
    read_again = 2 * H100.multiprocessors * row * (4 + 2)
    return 2 * 2 * 2 * row, read_again / L2_GB_S / 1e3


def _removed(change: str, step: Step, kernel: str, num_bytes: int, lost_us: float) -> Saving:
    """Return what a step saves without a kernel. num_bytes, lost_us: saved and lost by each layer."""
    num_layers = spec_of(step.shape).num_layers
    counts = graph_of(step, dependent=True).per_layer
    kinds = {kind: counts[f"{kind}:{kernel}"] for kind in ("dependent", "overlapped")}
    count = sum(kinds.values())
    if not count:
        return Saving(change, 0, 0, 0.0, 0.0)
    moved_us = num_bytes / CEILINGS[0].gb_s / 1e3
    alone_us = count * LAUNCH_US + moved_us - lost_us
    beside_us = kinds["dependent"] * LAUNCH_US + kinds["overlapped"] * OVERLAPPED_US + moved_us - lost_us
    return Saving(change, num_layers * count, num_layers * num_bytes, num_layers * alone_us, num_layers * beside_us)


def main() -> None:
    """Print the table as Markdown."""
    steps = {step.name: step for step in STEPS}
    name = CEILINGS[0].name
    print(f"| decode step on an {name} | change | fewer launches | fewer MB | saved alone | with dependent launches |")
    print("|---|---|---|---|---|---|")
    for title in DECODE_STEPS:
        step = steps[title]
        whole = [1e3 * estimate(step, dependent=dependent).step_ms(CEILINGS[0]) for dependent in (False, True)]
        dependent = estimate(step, dependent=True)
        what = f"{title}: {dependent.num_launches} launches, {dependent.num_overlapped} overlap"
        for saving in savings(step):
            if not saving.alone_us:
                continue
            cells = [
                f"{us:.0f} µs, {100 * us / all_us:.1f} %"
                for us, all_us in zip((saving.alone_us, saving.beside_us), whole, strict=True)
            ]
            if saving.change == "dependent launches":
                cells[1] = "–"
            fewer = f"{saving.num_launches} | {saving.num_bytes / 1e6:.1f}"
            print(f"| {what} | {saving.change} | {fewer} | {' | '.join(cells)} |", flush=True)
            what = ""


if __name__ == "__main__":
    main()
