"""What `penstock plan` says of a model on given devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Devices:
    """What the ranks run on: GPUs, or the cores of one machine."""

    kind: str
    """gpu or cpu."""
    count: int
    """GPUs, or cores."""
    rank_bytes: int | None
    """Memory of each rank: of its GPU, or what its process may take. None: the ranks of a CPU share `shared_bytes`."""
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ShapeFit:
    """One way to divide devices among ranks and replicas."""

    tensor: int
    pipeline: int
    replicas: int
    problem: str = ""
    """Why it does not fit; empty: it fits."""
    weight_bytes: int = 0
    """Of the rank with the most; likewise `kv_bytes`."""
    kv_bytes: int = 0
    kv_tokens: int = 0
    """Tokens that the KV cache of one replica holds."""
    window_bytes: int = 0
    """The part of `kv_bytes` for blocks of windows, where layers with windows have blocks of their own."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What a model needs, and the shapes that were tried."""

    model: str
    runner: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    max_model_len: int
    layers: int
    heads: int
    kv_heads: int
    weight_bytes: int
    kv_token_bytes: int
    """Over all layers."""
    state_bytes: int
    """Of the state of recurrent layers of one sequence; 0 without such layers."""
    state_slots: int
    """States for which each replica has memory."""
    max_num_seqs: int
    """Sequences in a step, which may be fewer than configured because of their states."""
    shapes: tuple[ShapeFit, ...]
    why: str = ""
    """Why this runner was chosen and what it lacks, if it is not one of the usual ones."""
    window: int = 0
    """Tokens of which layers with windows keep keys and values, in blocks of their own; 0: all layers keep all."""
    window_token_bytes: int = 0
    """The part of `kv_token_bytes` in these layers."""

    @property
    def best(self) -> ShapeFit | None:
        """The shape with the fewest ranks that holds a sequence of full length, or else the one with the most tokens.

        Among equal numbers of ranks, fewer stages: one stream keeps all ranks of a layer busy, but one stage alone.
        Then as many replicas as there are GPUs, but one on a CPU, which uses all cores.
        """
        fitting = [shape for shape in self.shapes if not shape.problem]
        whole = [shape for shape in fitting if shape.kv_tokens >= self.max_model_len]
        if whole:
            sign = -1 if self.runner == "gpu" else 1
            return min(whole, key=lambda one: (one.tensor * one.pipeline, one.pipeline, sign * one.replicas))
        return max(fitting, key=lambda one: (one.kv_tokens, -one.pipeline), default=None)
