"""Steps of well-known shapes: their floor, an estimate by the kernels' formulas, and the fraction of the floor.

The estimate lets every kernel run at the GPU's ceiling, so it is a lower bound that a measurement can only miss. It
shows what passes over memory, beside those for weights and cache, and what launches cost.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from bench_gpu import costs
from bench_gpu.costs import Cost, Heads
from bench_gpu.models import parts_of, spec_of
from bench_gpu.without_gpu.launch_counts import MAX_NUM_SEQS, StepLaunches, record
from bench_gpu.without_gpu.recorder import H100, recording
from bench_gpu.without_gpu.setups import Setup
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.gpu.graphs import MIXED_TOKENS
from penstock.gpu_node.model.gpu.runner import FIXED_SPLITS
from penstock.kernels.triton.decode_attention import num_splits

LAUNCH_US = 0.42
"""From one kernel's end to the next one's start within a graph: the median of a step with 64 sequences on an H100."""
EAGER_LAUNCH_US = 2.0
"""The same outside of graphs, where the host is ahead."""
HOST_US = 190.0
"""`submit` and `result` at 256 rows, by `host_ceiling`. With two steps in flight it counts only where it is longer."""


class Ceiling(NamedTuple):
    """Measured rates of a GPU."""

    name: str
    gb_s: float
    tflop_s: float


CEILINGS = (Ceiling("H200", 4300, 785), Ceiling("H100", 3000, 798))


class Step(NamedTuple):
    """A step of a model: rows that decode behind contexts, and prompts that are computed whole."""

    name: str
    shape: str
    goal: str
    decoding: int = 0
    context: int = 0
    prompts: tuple[int, ...] = ()
    quantization: str = "none"
    passes: int = 1
    """The sampler's over the logits; 3 with top-p."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.decoding + sum(self.prompts)

    @property
    def num_samples(self) -> int:
        """Rows that sample."""
        return self.decoding + len(self.prompts)

    @property
    def parts(self) -> tuple[Step, Step]:
        """The step's decoding rows alone, and its prompts alone."""
        return self._replace(prompts=()), self._replace(decoding=0)

    def tokens_s(self, step_ms: float) -> float:
        """Return the sampled tokens per second; of prompts alone, the computed ones."""
        return (self.num_samples if self.decoding else self.num_tokens) / step_ms * 1e3


MIXED = Step("… mixed: 64 rows at 600, one prompt of 500", "llama-8b", "90 % of apart", 64, 600, (500,))
SHAREGPT = Step("… ShareGPT-like load: 256 rows at 317, 278 prompt tokens", "llama-8b", "", 256, 317, (139, 139))
"""The mean step of 256 requests at once, with prompts of 217 tokens and answers of 200. Each row is in the middle of
its answer, and 256 * 217 / 200 tokens of prompts join."""
STEPS = (
    Step("Llama-3.1-8B bf16, batch 1", "llama-8b", "88 %, 250 tok/s", 1, 128),
    Step("… batch 64, context 1k, top-p", "llama-8b", "85 %, 10,000 tok/s", 64, 1024, passes=3),
    Step("… fp8 weights and head, batch 1", "llama-8b", "85 %, 450 tok/s", 1, 128, quantization="fp8"),
    Step("… int8 weights, batch 1", "llama-8b", "–", 1, 128, quantization="int8"),
    Step("… int4 weights, batch 1", "llama-8b", "75 %", 1, 128, quantization="int4"),
    Step("… prefill 2k", "llama-8b", "62 %, 35,000 tok/s", prompts=(2048,)),
    Step("… prefill 8k, no graph", "llama-8b", "62 %, 35,000 tok/s", prompts=(8192,)),
    MIXED,
    SHAREGPT._replace(goal="16,000 tok/s on H100"),
    Step("Llama-1B bf16, batch 1", "llama-1b", "78 %", 1, 128),
    Step("Qwen3-0.6B, batch 256, context 840", "qwen3-0.6b", "80 %, 35,000 tok/s", 256, 840),
)


class Estimate(NamedTuple):
    """A step's parts, before they meet a GPU's rates."""

    needed: Cost
    """Weights and cached keys and values read once; the operations of products and attention."""
    kernels: list[Cost]
    num_launches: int
    launch_us: float

    @property
    def gaps_us(self) -> float:
        """Microseconds between kernels."""
        return self.num_launches * self.launch_us

    def floor_ms(self, ceiling: Ceiling) -> float:
        """Return what bytes or operations take at least."""
        return self.needed.floor_ms(ceiling.gb_s, ceiling.tflop_s)

    def step_ms(self, ceiling: Ceiling) -> float:
        """Return the sum of all kernels and launches, or the host's time if that is longer."""
        kernels = sum(cost.floor_ms(ceiling.gb_s, ceiling.tflop_s) for cost in self.kernels)
        return max(kernels + self.gaps_us / 1e3, HOST_US / 1e3)


def estimate(step: Step) -> Estimate:
    """Return the kernels and launches of a step."""
    spec, graph = spec_of(step.shape), graph_of(step)
    layer, outside = [*_products(spec, step), *_attention(spec, step)], _head(spec, step)
    # Inputs and outputs of products are not needed: a single kernel could keep them. Without rows, weights remain.
    nothing = step._replace(decoding=0, prompts=())
    weights = costs.total([*_products(spec, nothing) * spec.num_layers, _head(spec, nothing)]).bytes_read
    cached = step.decoding * step.context * _heads(spec).kv_token_bytes * spec.num_layers
    return Estimate(
        needed=Cost(weights + cached, 0, costs.total([*layer * spec.num_layers, outside]).flops),
        kernels=[*_layer(spec, step) * spec.num_layers, *_outside(spec, step)],
        num_launches=graph.num_launches(spec.num_layers),
        launch_us=LAUNCH_US if step.num_tokens <= MIXED_TOKENS[-1] else EAGER_LAUNCH_US,
    )


def _heads(spec: ModelSpec) -> Heads:
    attention, _ = parts_of(spec.layers[0])
    return Heads(attention.num_heads, attention.num_kv_heads, attention.head_dim)


def _products(spec: ModelSpec, step: Step) -> list[Cost]:
    rows, quantization, hidden = step.num_tokens, step.quantization, spec.hidden_size
    attention, mlp = parts_of(spec.layers[0])
    queries, keys, inner = attention.queries, attention.keys, mlp.intermediate_size
    sizes = (queries + 2 * keys, hidden), (hidden, queries), ((1 + mlp.is_gated) * inner, hidden), (hidden, inner)
    return [costs.linear(rows, outputs, columns, quantization) for outputs, columns in sizes]


def _head(spec: ModelSpec, step: Step) -> Cost:
    quantization = "fp8" if step.quantization == "fp8" else "none"
    return costs.linear(step.num_samples, spec.vocab_size, spec.hidden_size, quantization)


def _attention(spec: ModelSpec, step: Step) -> list[Cost]:
    heads, found = _heads(spec), []
    if step.decoding:
        with recording(H100):
            splits = num_splits(step.decoding, heads.num_kv_heads, torch.device("cpu"))
        splits = FIXED_SPLITS if step.prompts else splits
        found.append(costs.decode_attention([step.context] * step.decoding, heads, splits=splits))
    # Each prompt as one tile: caches serve what later tiles read again.
    return found + [costs.prefill_attention([prompt], [prompt], heads, rows=prompt) for prompt in step.prompts]


def _layer(spec: ModelSpec, step: Step) -> list[Cost]:
    rows, is_scaled = step.num_tokens, step.quantization in ("fp8", "int8")
    attention, mlp = parts_of(spec.layers[0])
    norm = costs.add_norm(rows, spec.hidden_size, quantized=is_scaled)
    found = [norm, norm, costs.rotate_and_store(rows, _heads(spec)), *_products(spec, step), *_attention(spec, step)]
    found.append(costs.activation(rows, mlp.intermediate_size, gated=mlp.is_gated, quantized=is_scaled))
    if is_scaled:
        found.append(costs.quantize(rows, attention.queries))
    return found


def _outside(spec: ModelSpec, step: Step) -> list[Cost]:
    rows, hidden = step.num_tokens, spec.hidden_size
    sampler = costs.sample(step.num_samples, spec.vocab_size, passes=step.passes)
    # The logits are copied out of the graphs' memory.
    logits = 2 * step.num_samples * spec.vocab_size
    return [
        costs.embed(rows, hidden),
        costs.add_norm(step.num_samples, hidden),
        _head(spec, step),
        Cost(logits, logits),
        sampler,
    ]


def graph_of(step: Step) -> StepLaunches:
    """Return the launches of the smallest graph that holds a step, or of the largest one."""
    most = MAX_NUM_SEQS if step.num_tokens > 1 else 1
    recorded, has_prompts = _graphs(step.shape, step.quantization, most), bool(step.prompts)
    graphs = [graph for graph in recorded if bool(graph.shape.num_tiles) == has_prompts]
    graphs.sort(key=lambda graph: graph.shape.num_tokens)
    return next((graph for graph in graphs if graph.shape.num_tokens >= step.num_tokens), graphs[-1])


@cache
def _graphs(shape: str, quantization: str, max_num_seqs: int) -> list[StepLaunches]:
    return record(Setup(shape, quantization), max_num_seqs=max_num_seqs).steps


def main() -> None:
    """Print the table as Markdown."""
    columns = [
        f"{ceiling.name} {part}" for ceiling in CEILINGS for part in ("floor ms", "estimate ms", "fraction", "tok/s")
    ]
    print(f"| step | needed | launches | {' | '.join(columns)} | goal |\n|---|---|---{'|---' * len(columns)}|---|")
    for step in STEPS:
        found = estimate(step)
        is_bytes = found.needed.num_bytes / CEILINGS[0].gb_s > found.needed.flops / CEILINGS[0].tflop_s / 1e3
        needed = f"{found.needed.num_bytes / 1e9:.1f} GB" if is_bytes else f"{found.needed.flops / 1e12:.1f} TFLOP"
        cells = []
        for ceiling in CEILINGS:
            floor, taken = found.floor_ms(ceiling), found.step_ms(ceiling)
            cells += [f"{floor:.2f}", f"{taken:.2f}", f"{100 * floor / taken:.0f} %", f"{step.tokens_s(taken):,.0f}"]
        print(f"| {step.name} | {needed} | {found.num_launches} | {' | '.join(cells)} | {step.goal} |", flush=True)
    for ceiling in CEILINGS:
        mixed, apart = estimate(MIXED).step_ms(ceiling), sum(estimate(part).step_ms(ceiling) for part in MIXED.parts)
        share = f"{100 * apart / mixed:.0f} % of the rate apart"
        print(f"\n{ceiling.name}: the mixed step takes {mixed:.2f} ms, its two parts {apart:.2f} ms, so {share}.")


if __name__ == "__main__":
    main()
