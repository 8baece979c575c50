"""Mixers with a state of fixed size in place of attention: the gated delta rule, and the short convolution.

The state of a sequence after a token depends on all of its tokens so far, and takes the same memory for any number of
them. All states are float32. Names are those of a checkpoint's tensors, without `.weight` and `.bias`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from typing import TypeAlias

from penstock.contract.errors import ConfigError

LANES = 16
"""The rows of a state are padded to a multiple of this: the numbers that a vector register of the kernels holds."""
MAX_TAPS = 64
MAX_KEY_DIM = 1024

Parts: TypeAlias = tuple[tuple[str, int], ...]
"""Tensors of which a matrix consists: each name and its number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """The gated delta rule (arXiv:2412.06464), behind a convolution over the last `taps` tokens.

    Of each token, queries and keys of `num_key_heads` and values of `num_value_heads` heads are convolved, channel by
    channel. Each value head has a matrix [key_dim, value_dim] as its state. It decays, and then learns the value that
    belongs to the token's key.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm_eps: float
    inputs: tuple[str, ...]
    """The projection to queries, keys and values, one after another, and the projection to the gates of the outputs. Or
    one tensor that holds, per key head, the rows of its query, key, values and gates."""
    learning_gate: str
    """The matrix whose outputs say, by value head, how far a token's value replaces the old one."""
    decay_gate: str
    """The matrix whose outputs say, by value head, how far a token lets the state decay. If it is that of
    `learning_gate`, it holds, per key head, the rows of both gates of its value heads."""
    convolution: str
    decay_log: str
    """Logarithms of the value heads' rates of decay. The name is complete, as that of `decay_bias` is."""
    decay_bias: str
    """Added to the outputs of `decay_gate`."""
    norm: str
    """An RMS norm of the outputs of each value head, before they are gated."""
    out: str
    has_bias: bool = False
    has_convolution_bias: bool = False
    has_rates: bool = False
    """Whether `decay_log` are the rates themselves, which are negative, as in GGUF files."""
    tiles_values: bool = False
    """Whether value head h belongs to key head h modulo their number, as in GGUF files. Otherwise the value heads of a
    key head follow one another."""
    split_inputs: tuple[str, str] | None = None
    """What a GGUF file has in place of the one tensor of all inputs: queries, keys and values of all heads one after
    another, and the gates of the outputs."""

    def __post_init__(self) -> None:
        _check_sizes(self)
        if self.num_value_heads % self.num_key_heads:
            by = f"linear_num_key_heads, which is {self.num_key_heads}"
            raise ConfigError(f"linear_num_value_heads is {self.num_value_heads} but must be a multiple of {by}")
        if self.key_dim > MAX_KEY_DIM:
            raise ConfigError(f"linear_key_head_dim is {self.key_dim} but may be {MAX_KEY_DIM} at most")

    @property
    def keys(self) -> int:
        """The channels of all keys of a token; its queries have as many."""
        return self.num_key_heads * self.key_dim

    @property
    def outputs(self) -> int:
        """The channels of all values of a token, and of the mixer's outputs."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The channels that are convolved."""
        return 2 * self.keys + self.outputs

    @property
    def input_parts(self) -> Parts:
        """The parts of the mixer's first matrix."""
        if self.is_fused:
            return ((self.inputs[0], self.channels + self.outputs),)
        return tuple(zip(self.inputs, (self.channels, self.outputs), strict=True))

    @property
    def gate_parts(self) -> Parts:
        """The matrices of both gates, that of learning first, or one matrix that holds both."""
        heads = self.num_value_heads
        if self.learning_gate == self.decay_gate:
            return ((self.learning_gate, 2 * heads),)
        return (self.learning_gate, heads), (self.decay_gate, heads)

    @property
    def is_fused(self) -> bool:
        """Whether one tensor has all inputs."""
        return len(self.inputs) == 1

    @property
    def state_numbers(self) -> int:
        """The numbers of a state, with the padding of rows."""
        rows = self.num_value_heads * self.key_dim
        return (self.taps - 1) * padded(self.channels) + rows * padded(self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution:
    """A convolution over the last `taps` tokens, channel by channel, with a gate before it and one behind it."""

    channels: int
    taps: int
    has_bias: bool
    """Whether both projections have biases."""
    has_convolution_bias: bool
    inputs: str
    """The projection to the first gate, the second gate and the values, one after another."""
    convolution: str
    out: str

    def __post_init__(self) -> None:
        _check_sizes(self)

    @property
    def outputs(self) -> int:
        """The channels of the mixer's outputs."""
        return self.channels

    @property
    def input_parts(self) -> Parts:
        """The parts of the mixer's first matrix."""
        return ((self.inputs, 3 * self.channels),)

    @property
    def state_numbers(self) -> int:
        """The numbers of a state, with the padding of rows."""
        return (self.taps - 1) * padded(self.channels)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """The mixer of Mamba-2 (arXiv:2405.21060), behind a convolution over the last `taps` tokens.

    Of each token, the values of `num_heads` heads are convolved, and for each of `num_groups` groups of heads what
    writes to the state, and what reads it. Each head has a matrix [head_dim, state_size] as its state. How long a token
    lasts says how far that decays, and how much of the token is added to it.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    taps: int
    norm_eps: float
    has_bias: bool
    """Whether both projections have biases."""
    has_convolution_bias: bool
    inputs: str
    """The projection to gates, what is convolved, and the durations by head, one after another."""
    convolution: str
    duration_bias: str
    """Added to the durations. The name is complete, as those of `decay_log` and `skip` are."""
    decay_log: str
    """Logarithms of the heads' rates of decay."""
    skip: str
    """The share of a head's values that is added to what is read."""
    norm: str | None
    """An RMS norm of the gated outputs of each group; None: there is none."""
    out: str
    has_rates: bool = False
    """Whether `decay_log` are the rates themselves, which are negative, as in GGUF files."""
    input_factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """The factors of what the first projection returns: gates, values, what writes, what reads, and durations."""
    output_factor: float = 1.0
    """The factor of the outputs before the last projection."""

    def __post_init__(self) -> None:
        _check_sizes(self)
        for factor in (*self.input_factors, self.output_factor):
            if not isinstance(factor, int | float) or not 0 < factor < inf:
                found = f"ssm_multipliers (ssm_in_multiplier, ssm_out_multiplier) have {factor!r}"
                raise ConfigError(f"{found} but must be finite numbers above 0")
        if self.num_heads % self.num_groups:
            found = f"{_IN_FILES['num_heads']} is {self.num_heads}"
            raise ConfigError(f"{found} but must be a multiple of {self.num_groups} groups")

    @property
    def outputs(self) -> int:
        """The channels of all values of a token, and of the mixer's outputs."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """The channels that are convolved."""
        return self.outputs + 2 * self.num_groups * self.state_size

    @property
    def input_parts(self) -> Parts:
        """The parts of the mixer's first matrix."""
        return ((self.inputs, self.outputs + self.channels + self.num_heads),)

    @property
    def state_numbers(self) -> int:
        """The numbers of a state, with the padding of rows."""
        return (self.taps - 1) * padded(self.channels) + self.outputs * padded(self.state_size)


Recurrence: TypeAlias = DeltaRule | ShortConvolution | StateSpace

_IN_FILES = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim (conv_L_cache, mamba_d_conv, conv_kernel)",
    "channels": "hidden_size",
    "num_heads": "mamba_n_heads (mamba_num_heads)",
    "head_dim": "mamba_d_head (mamba_head_dim)",
    "num_groups": "mamba_n_groups (n_groups)",
    "state_size": "mamba_d_state (ssm_state_size)",
}
"""What fields are called in config.json, for a reader of an error."""


def padded(count: int) -> int:
    """Return the numbers of a row of a state that holds `count` of them."""
    return -(-count // LANES) * LANES


def _check_sizes(record: Recurrence) -> None:
    for field in fields(record):
        size = getattr(record, field.name)
        if field.type == "int" and (not isinstance(size, int) or size < 1):
            raise ConfigError(f"{_IN_FILES[field.name]} is {size!r} but must be a whole number of at least 1")
    if not 1 < record.taps <= MAX_TAPS:
        raise ConfigError(f"{_IN_FILES['taps']} is {record.taps} but must be from 2 to {MAX_TAPS}")
