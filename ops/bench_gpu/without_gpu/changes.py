"""What a review of the GPU runner changed: bytes, operations, launches and host time of one step, before and after.

`before` is the runner that the review read, by the same formulas. Its parameters stand here, because its code is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bench_gpu import costs
from bench_gpu.costs import Heads
from bench_gpu.models import spec_of
from bench_gpu.without_gpu.estimates import HOST_US, MIXED, STEPS, Step, estimate
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.kernels.triton.decode_attention import MAX_SPLITS, MIN_SPAN
from penstock.kernels.triton.launches import padded

HOST_LAUNCH_US = 20.0
"""What Python takes to launch one Triton kernel outside of a graph; an estimate."""
BISECTIONS = 31
"""Passes of the former sampler over the logits, beside the two that find the largest and draw."""
FORMER_SPAN = 256
"""The former shortest split of decode attention, in tokens."""
FORMER_OUTSIDE = 20
"""Launches outside of layers before ids and embeddings had one kernel."""
FORMER_QUANTIZATIONS = 4
"""Launches of a layer that quantized activations for float8; one is left, behind attention."""
SCALE_READERS = 16
"""Rows of a tile that each loaded the same int4 scales."""


class BeforeAfter(NamedTuple):
    """One number of a step."""

    what: str
    unit: str
    before: float
    after: float


def changes() -> Iterator[BeforeAfter]:
    """Yield all numbers, in the order of the review."""
    steps = {step.name: step for step in STEPS}
    spec = spec_of("llama-8b")
    launches = estimate(MIXED).num_launches
    yield BeforeAfter(f"mixed step: launches by the host, {launches} kernels", "µs", launches * HOST_LAUNCH_US, HOST_US)
    yield from _prefill(spec, 8192)
    sampled = steps["… batch 64, context 1k, top-p"].num_samples
    read = [costs.sample(sampled, spec.vocab_size, passes=passes).num_bytes / 1e6 for passes in (BISECTIONS + 2, 3)]
    yield BeforeAfter(f"top-p of {sampled} rows: logits read", "MB", *read)
    yield from _quantized(spec, steps)
    yield from _decode(spec, 1024)
    bf16 = estimate(steps["Llama-3.1-8B bf16, batch 1"]).num_launches
    yield BeforeAfter("bf16 decode step: launches", "", spec.num_layers * 10 + FORMER_OUTSIDE, bf16)
    yield BeforeAfter("`submit` of 256 rows with top-p, measured", "µs", 386, 181)


def _prefill(spec: ModelSpec, prompt: int) -> Iterator[BeforeAfter]:
    heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    former, now = (costs.prefill_attention([prompt], [prompt], heads, rows=rows) for rows in (64, 128))
    name = f"prefill attention of {prompt} tokens, a layer"
    yield BeforeAfter(f"{name}: keys and values that tiles read", "GB", former.bytes_read / 1e9, now.bytes_read / 1e9)
    # Two groups of warps computed the same products of queries and keys: half of all operations twice.
    yield BeforeAfter(f"{name}: operations", "TFLOP", 1.5 * former.flops / 1e12, now.flops / 1e12)


def _quantized(spec: ModelSpec, steps: dict[str, Step]) -> Iterator[BeforeAfter]:
    fp8 = estimate(steps["… fp8 weights and head, batch 1"])
    head = [costs.linear(1, spec.vocab_size, spec.hidden_size, kept).bytes_read for kept in ("none", "fp8")]
    read = sum(cost.bytes_read for cost in fp8.kernels)
    yield BeforeAfter("fp8, batch 1: bytes read", "GB", (read + head[0] - head[1]) / 1e9, read / 1e9)
    former = spec.num_layers * (10 + FORMER_QUANTIZATIONS) + FORMER_OUTSIDE
    yield BeforeAfter("fp8, batch 1: launches", "", former, fp8.num_launches)
    outputs, columns = 2 * spec.intermediate_size, spec.hidden_size
    scales = costs.linear(0, outputs, columns, "int4").bytes_read - outputs * columns // 2
    yield BeforeAfter("int4, batch 1: scales loaded for `mlp_in`", "MB", SCALE_READERS * scales / 1e6, scales / 1e6)


def _decode(spec: ModelSpec, context: int) -> Iterator[BeforeAfter]:
    programs = [spec.num_kv_heads * min(MAX_SPLITS, padded(-(-context // span))) for span in (FORMER_SPAN, MIN_SPAN)]
    yield BeforeAfter(f"decode attention, batch 1 at {context} tokens: programs for 132 multiprocessors", "", *programs)


def main() -> None:
    """Print the table as Markdown."""
    print("| one step of Llama-3.1-8B | before | after |\n|---|---|---|")
    for change in changes():
        cells = [f"{value:,.4g} {change.unit}".strip() for value in (change.before, change.after)]
        print(f"| {change.what} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
