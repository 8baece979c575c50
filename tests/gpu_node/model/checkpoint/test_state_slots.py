"""How many states fit into memory, and how many sequences they allow."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.runners.runner_options import runner_options
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint import state_slots
from penstock.gpu_node.model.checkpoint.state_slots import StateFit, fit_states

MIB = 1 << 20
STATE = 20 * MIB


def fit(slot_bytes: int = STATE, **options: Any) -> StateFit:
    return fit_states(runner_options(**options), slot_bytes, lambda: 192 * 1024)


def with_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(state_slots, "available_bytes", lambda: num_bytes)


def test_a_model_without_recurrent_layers_has_no_slots() -> None:
    assert fit(0, max_num_seqs=64, state_cache_gib=0.001) == StateFit(0, 0, 64)


def test_by_default_there_are_two_slots_for_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 64 << 30)
    assert fit(max_num_seqs=64) == StateFit(STATE, 128, 64)


def test_unknown_free_memory_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 0)
    assert fit(max_num_seqs=64).num_slots == 128


def test_by_default_slots_take_a_quarter_of_the_free_memory_and_sequences_are_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_free(monkeypatch, 4 * 51 * STATE)
    assert fit(max_num_seqs=64) == StateFit(STATE, 51, 25)


def test_a_set_size_holds_more_snapshots_or_fewer_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 1)
    assert fit(max_num_seqs=8, state_cache_gib=100 * STATE / 2**30) == StateFit(STATE, 100, 8)
    assert fit(max_num_seqs=8, state_cache_gib=7 * STATE / 2**30) == StateFit(STATE, 7, 3)


def test_a_size_that_holds_no_sequence_is_refused_with_the_sizes() -> None:
    with pytest.raises(ConfigError) as refused:
        fit(max_num_seqs=8, state_cache_gib=0.03)
    message = refused.value.message
    assert refused.value.param == "state_cache_gib"
    assert message.startswith("state_cache_gib 0.03 holds 1 states of recurrent layers, but a sequence needs 2.")
    assert (
        "A state takes 20 MiB, a KV block of 16 tokens 0.1875 MiB. Set state_cache_gib to at least 0.03906" in message
    )


def test_on_a_gpu_slots_take_a_quarter_of_what_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 1 << 40)

    def on_gpu(free: int, **options: Any) -> StateFit:
        return fit_states(runner_options(max_num_seqs=64, **options), STATE, lambda: 192 * 1024, free_on_gpu=free)

    assert on_gpu(4 * 51 * STATE) == StateFit(STATE, 51, 25)
    assert on_gpu(1 << 40) == StateFit(STATE, 128, 64)
    assert on_gpu(0, state_cache_gib=7 * STATE / 2**30) == StateFit(STATE, 7, 3)
    for free in (100 * MIB, 0, -MIB):
        with pytest.raises(ConfigError, match=r"25% of the GPU memory that weights leave, .* GiB, holds [01] states"):
            on_gpu(free)


def test_too_little_free_memory_is_refused_with_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 100 * MIB)
    with pytest.raises(ConfigError, match=r"25% of the free memory, 0\.02441 GiB, holds 1 states"):
        fit(max_num_seqs=8)


@given(slot_bytes=st.integers(1, 1 << 34), gib=st.floats(2**-30, 1000.0), wanted=st.integers(1, 512))
def test_slots_never_exceed_the_memory_and_always_allow_the_sequences(slot_bytes: int, gib: float, wanted: int) -> None:
    try:
        found = fit(slot_bytes, state_cache_gib=gib, max_num_seqs=wanted)
    except ConfigError:
        assert 2 * slot_bytes > gib * 2**30 - 1
        return
    assert found.num_bytes <= gib * 2**30
    assert 1 <= found.max_num_seqs <= wanted and 2 * found.max_num_seqs <= found.num_slots
