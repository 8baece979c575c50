"""Rotary position embeddings, and how they are scaled for texts that are longer than those of the training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from penstock.contract.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """RoPE scaling that divides all angles by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's RoPE scaling: stretch long wavelengths by `factor`, keep short ones, and interpolate between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            ends = f"{self.high_freq_factor} for low_freq_factor {self.low_freq_factor}"
            raise ConfigError(f"high_freq_factor is {ends}, but must be above it")


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK-aware RoPE scaling: past the original length, theta grows with the position."""

    factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN RoPE scaling (arXiv:2309.00071).

    Channels with fewer than `beta_slow` rotations within the original length are stretched by `factor`. Channels with
    more than `beta_fast` rotations stay the same; those between are interpolated.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    magnitude: float
    """The factor that all cosines and sines are multiplied by."""
    whole_channels: bool
    """Whether the bounds of the interpolated range are rounded to whole channels."""


@dataclass(frozen=True, slots=True)
class FactorsScaling:
    """RoPE scaling that divides each frequency by its own factor."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE scaling (arXiv:2402.13753), which divides each frequency by its own factor from one of two tables.

    A model that serves more than `original_max_position` tokens uses the long table at all positions. The angles of a
    position therefore do not depend on how long its text has become.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    magnitude: float
    """The factor that all cosines and sines are multiplied by."""


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """RoPE that turns only the first `num_turned` pairs of channels, with the frequencies of all pairs.

    A pair is a channel of the first half and one of the second half. Angles are divided by `factor`.
    """

    num_turned: int
    factor: float = 1.0


Scaling: TypeAlias = (
    LinearScaling | Llama3Scaling | DynamicScaling | YarnScaling | FactorsScaling | LongScaling | ProportionalScaling
)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over the first `dim` channels of each head."""

    theta: float
    dim: int
    scaling: Scaling | None = None
