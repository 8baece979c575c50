"""The MLP of a layer, also as an expert of a mixture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.record_checks import check_factors, check_sizes

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu2"]


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """An MLP that is computed for each token beside the chosen experts, as so many further experts of their size."""

    count: int
    mlp_in: tuple[str, ...]
    mlp_out: str
    gate: str | None = None
    """The vector whose product with a token's hidden state, as a sigmoid, is the weight of the output; None: 1."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: a router chooses a few MLPs for each token, and their weighted outputs are added."""

    count: int
    per_token: int
    normalized: bool
    """Whether the weights of a token's experts are divided by their sum."""
    router: str
    """The matrix that scores the experts."""
    router_bias: bool = False
    by_sigmoid: bool = False
    """Whether an expert's share is the sigmoid of its score, instead of a softmax over all experts."""
    choice_bias: str | None = None
    """What is added to shares to choose experts, but not to their weights. The name is complete."""
    scale: float = 1.0
    """The factor of the weights of experts that were chosen by sigmoid."""
    shared: SharedExperts | None = None
    router_norm: str | None = None
    """The weights of an RMS norm through which the router reads the hidden state; None: it reads what the experts read.
    The name is complete."""
    router_factor: float = 1.0
    """The factor of these weights."""
    factors: str | None = None
    """A factor of each expert's weights once it is chosen. The name is complete."""

    @property
    def num_shared(self) -> int:
        """The experts that every token has."""
        return 0 if self.shared is None else self.shared.count

    def __post_init__(self) -> None:
        if self.choice_bias is not None and not self.by_sigmoid:
            raise ConfigError("experts are chosen with a bias, but not by the sigmoid of scores")
        if not 1 <= self.per_token <= self.count:
            raise ConfigError(f"num_experts_per_tok is {self.per_token} but must be from 1 to {self.count} experts")


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """A gate g that is clamped, as is what it multiplies: min(g, limit) * sigmoid(slope * min(g, limit)) * (u + 1).

    u is the up projection within -limit and limit.
    """

    limit: float
    slope: float

    def __post_init__(self) -> None:
        check_factors(self, "limit", "slope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """The MLP of a layer, or each expert of its mixture. Names are those of a checkpoint's tensors."""

    intermediate_size: int
    activation: Activation = "silu"
    clamped_gate: ClampedGate | None = None
    """What a gate is instead of its activation times the up projection."""
    bias: bool = False
    out_bias: bool = False
    """Whether the output projection has a bias, though the others have none."""
    fused_gate: bool = False
    up_first: bool = False
    """Whether a fused tensor has the up projection before the gate."""
    experts: Experts | None = None
    mlp_in: tuple[str, ...]
    """Gate and up projections of a gated MLP, else the single input projection; `{expert}` stands for the index of an
    expert. A gated MLP with a single tensor has both in it, the gate first (`fused_gate`)."""
    mlp_out: str
    gate_factor: float = 1.0
    """The factor of a gate before its activation."""
    output_factor: float = 1.0
    """The factor of the outputs."""
    split_gate: tuple[str, str] | None = None
    """What a GGUF file has in place of the one tensor of gate and up projections."""

    def __post_init__(self) -> None:
        check_sizes(self)
        check_factors(self, "gate_factor", "output_factor")
        if self.gate_factor != 1 and not self.is_gated:
            raise ConfigError("an MLP has a factor of its gate, but no gate")
        if self.clamped_gate is not None and not self.is_gated:
            raise ConfigError("an MLP has a clamped gate, but no gate")

    @property
    def is_gated(self) -> bool:
        """Whether the activation applies to a gate, which multiplies the up projection."""
        return self.fused_gate or len(self.mlp_in) > 1

    @property
    def num_experts(self) -> int:
        """The experts, shared ones last, each with the matrices of an MLP; 1 without a mixture."""
        return 1 if self.experts is None else self.experts.count + self.experts.num_shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A mixture of experts beside a layer's MLP. Each reads the hidden state through a norm of its own.

    The outputs of both are normed and added, and the layer's norm of the MLP's output is one of this sum.
    """

    mlp: Mlp
    norm: str
    """Of the hidden state that the experts read."""
    output_norm: str
    dense_norm: str
    """Of the output of the layer's MLP."""

    def __post_init__(self) -> None:
        if self.mlp.experts is None or self.mlp.experts.shared is not None:
            raise ConfigError("a mixture beside an MLP has no experts, or some that every token has")
