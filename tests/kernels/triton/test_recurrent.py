"""Kernels with states: the naive reference's numbers, and the same bits for a text in one step, in parts, by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.kernels.arguments import StateRows
from penstock.kernels.reference import recurrent as reference
from penstock.kernels.triton import recurrent

from .conftest import TOLERANCES

NUM_SLOTS = 8
NO_STATE = -1


class Part(NamedTuple):
    """Some tokens of a sequence in a step."""

    count: int
    read: int
    write: int
    saves: tuple[tuple[int, int], ...] = ()
    """Tokens of the part, and slots."""


Mix = Callable[[ModuleType, Tensor, Tensor, StateRows], Tensor]
"""Calls a mixer of the reference or of the kernels: of inputs by token, with states, in steps."""


class Mixer(NamedTuple):
    """A mixer with random weights."""

    width: int
    """Numbers of a token's inputs."""
    state: tuple[int, ...]
    mix: Mix


def _rows(parts: Sequence[Part], device: torch.device, padding: int = 0) -> StateRows:
    """Return the rows of a step. padding: tokens and sequences of a graph that the step does not have."""
    counts = [part.count for part in parts]
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    saves = [(start + at, slot) for part, start in zip(parts, starts, strict=False) for at, slot in part.saves]
    save_starts = torch.tensor([0, *(len(part.saves) for part in parts)]).cumsum(0).tolist()
    owners = [seq for seq, count in enumerate(counts) for _ in range(count)]

    def ints(numbers: list[Any], value: int) -> Tensor:
        return torch.tensor(numbers + [value] * padding, dtype=torch.int32, device=device)

    return StateRows(
        owners=ints(owners, -1),
        starts=ints(starts, starts[-1]),
        reads=ints([part.read for part in parts], NO_STATE),
        writes=ints([part.write for part in parts], 0),
        save_starts=ints(save_starts, save_starts[-1]),
        saves=torch.tensor(saves, dtype=torch.int32, device=device).view(-1, 2),
    )


def _random(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def _convolution(dtype: torch.dtype, device: torch.device, *, gated: bool, channels: int = 300, taps: int = 4) -> Mixer:
    weight, bias = _random(taps, channels, device=device), _random(channels, device=device) if gated else None
    width = 3 * channels if gated else channels + 10

    def mix(module: ModuleType, inputs: Tensor, states: Tensor, rows: StateRows) -> Tensor:
        out: Tensor = module.convolve(inputs.to(dtype), states, weight, bias, rows, dtype, gated=gated)
        return out

    return Mixer(width, (taps - 1, channels), mix)


def _delta_rule(device: torch.device, key_heads: int, heads: int, dims: tuple[int, int], *, tiled: bool) -> Mixer:
    channels = 2 * key_heads * dims[0] + heads * dims[1]
    rates, biases = -_random(heads, device=device).exp(), _random(heads, device=device)

    def mix(module: ModuleType, inputs: Tensor, states: Tensor, rows: StateRows) -> Tensor:
        mixed, gates = (part.contiguous() for part in inputs.split([channels, 2 * heads], dim=1))
        given = mixed, gates, rates, biases, states, rows
        out: Tensor = module.delta_rule(*given, num_key_heads=key_heads, tiled=tiled)
        return out

    return Mixer(channels + 2 * heads, (heads, *dims), mix)


def _scan(dtype: torch.dtype, device: torch.device, groups: int, heads: int, dims: tuple[int, int]) -> Mixer:
    channels = heads * dims[0] + 2 * groups * dims[1]
    biases, rates, skips = (_random(heads, device=device) for _ in range(3))

    def mix(module: ModuleType, inputs: Tensor, states: Tensor, rows: StateRows) -> Tensor:
        durations = inputs.to(dtype)[:, channels:]
        given = inputs[:, :channels].contiguous(), durations, biases, -rates.exp(), skips, states, rows
        out: Tensor = module.scan(*given, num_groups=groups, duration_factor=0.7)
        return out

    return Mixer(channels + heads, (heads, *dims), mix)


MIXERS: dict[str, Callable[[torch.dtype, torch.device], Mixer]] = {
    "convolution": partial(_convolution, gated=False),
    "two taps": partial(_convolution, gated=False, channels=20, taps=2),
    "short convolution": partial(_convolution, gated=True),
    "delta rule": lambda _, device: _delta_rule(device, 2, 4, (16, 24), tiled=False),
    "delta rule, odd": lambda _, device: _delta_rule(device, 3, 6, (5, 3), tiled=True),
    "scan": lambda dtype, device: _scan(dtype, device, 2, 4, (16, 24)),
    "scan, odd": lambda dtype, device: _scan(dtype, device, 1, 3, (5, 3)),
}


@pytest.fixture(params=list(MIXERS))
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def _mixer(name: str, dtype: torch.dtype, device: torch.device) -> Mixer:
    torch.manual_seed(0)
    return MIXERS[name](dtype, device)


STEP = (Part(9, NO_STATE, 2, ((0, 4), (8, 6))), Part(3, 7, 0, ((1, 5),)), Part(1, 7, 1), Part(2, 3, 3))
"""From zeros, two sequences from one slot, and in place."""


def test_a_mixed_step_has_the_numbers_of_the_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    mixer = _mixer(name, dtype, device)
    inputs, states = _random(15, mixer.width, device=device), _random(NUM_SLOTS, *mixer.state, device=device)
    rows, kept, found = _rows(STEP, device), [], []
    for module in (reference, recurrent):
        kept.append(states.clone())
        found.append(mixer.mix(module, inputs, kept[-1], rows))
    tolerance = max(TOLERANCES[dtype], 5e-5)
    torch.testing.assert_close(found[1], found[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(kept[1], kept[0], atol=5e-5, rtol=5e-5)


def _in_parts(mixer: Mixer, inputs: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the outputs of a text in steps of so many tokens, each beside another sequence, and its last state."""
    states, found, done = _poison(mixer, inputs.device), [], 0
    other = torch.flip(inputs, (0,))
    for count in counts:
        read = 2 if done else NO_STATE
        rows = _rows([Part(2, NO_STATE, 4), Part(count, read, 2)], inputs.device)
        step = torch.cat((other[:2], inputs[done : done + count]))
        found.append(mixer.mix(recurrent, step, states, rows)[2:])
        done += count
    return torch.cat(found), states[2]


def _poison(mixer: Mixer, device: torch.device) -> Tensor:
    return torch.full((NUM_SLOTS, *mixer.state), torch.nan, device=device)


@pytest.mark.parametrize("counts", [[1] * 12, [1, 5, 1, 2, 3], [11, 1]], ids=str)
def test_a_text_in_parts_has_the_same_bits(name: str, counts: list[int], device: torch.device) -> None:
    for dtype in (torch.float32, torch.float16):
        mixer = _mixer(name, dtype, device)
        inputs, states = _random(12, mixer.width, device=device), _poison(mixer, device)
        want = mixer.mix(recurrent, inputs, states, _rows([Part(12, NO_STATE, 0)], device))
        got, state = _in_parts(mixer, inputs, counts)
        assert torch.equal(got, want)
        assert torch.equal(state, states[0])
        assert not want.isnan().any()


def test_saved_states_are_those_of_shorter_texts(name: str, device: torch.device) -> None:
    """Also where the slot that is read is the one that is written."""
    mixer = _mixer(name, torch.float32, device)
    inputs, states = _random(9, mixer.width, device=device), _random(NUM_SLOTS, *mixer.state, device=device)
    before = states.clone()
    mixer.mix(recurrent, inputs, states, _rows([Part(9, 3, 3, ((0, 4), (1, 5), (8, 6)))], device))
    for count, slot in ((1, 4), (2, 5), (9, 6), (9, 3)):
        shorter = before.clone()
        mixer.mix(recurrent, inputs[:count], shorter, _rows([Part(count, 3, 0)], device))
        assert torch.equal(states[slot], shorter[0])
    for slot in (0, 1, 2, 7):
        assert torch.equal(states[slot], before[slot])


def test_padding_of_a_graph_writes_nothing(name: str, device: torch.device) -> None:
    mixer = _mixer(name, torch.float32, device)
    inputs, states = _random(9, mixer.width, device=device), _random(NUM_SLOTS, *mixer.state, device=device)
    parts, padded = [Part(4, 1, 2), Part(1, 3, 3, ((0, 5),))], states.clone()
    want = mixer.mix(recurrent, inputs[:5], states, _rows(parts, device))
    got = mixer.mix(recurrent, inputs, padded, _rows(parts, device, padding=4))
    assert torch.equal(got[:5], want)
    assert torch.equal(padded, states)


def test_extreme_gates_are_finite(dtype: torch.dtype, device: torch.device) -> None:
    """Where the exponential of a gate overflows, and where 1 and it are 1."""
    mixer, extremes = _mixer("scan", dtype, device), [-90.0, -20.0, 0.0, 90.0]
    inputs, states = _random(3, mixer.width, device=device), torch.zeros(NUM_SLOTS, *mixer.state, device=device)
    inputs[:, -4:] = torch.tensor(extremes, device=device)
    rows, kept = _rows([Part(3, NO_STATE, 0)], device), states.clone()
    want = mixer.mix(reference, inputs, states, rows)
    torch.testing.assert_close(mixer.mix(recurrent, inputs, kept, rows), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("norm", ["first", "last", "none"])
def test_outputs_are_gated_and_normed(norm: str, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x, gates = _random(5, 60, device=device), _random(5, 75, dtype=dtype, device=device)[:, 10:70]
    weight = None if norm == "none" else _random(20 if norm == "first" else 60, device=device)
    rules = {"width": 20, "eps": 1e-5, "norm_first": norm == "first", "gate_factor": 0.8, "factor": 1.3}
    want, got = (one.gate_outputs(x, gates, weight, dtype, **rules) for one in (reference, recurrent))
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
