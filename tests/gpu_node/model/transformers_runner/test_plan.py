"""A plan of a module says what a loaded one takes, and why its runner was chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fakes.runners.runner_options import runner_options

from penstock.gpu_node.model.loading.load import find_model, load_found
from penstock.gpu_node.model.loading.plan import plan_model
from penstock.gpu_node.model.loading.state_slots import with_state_slots
from penstock.gpu_node.model.plan_records import Devices


def test_a_plan_counts_what_a_loaded_module_takes(class_folder: Callable[[str], Path]) -> None:
    options = runner_options(runner="transformers")
    found = find_model(str(class_folder("Gemma4ForCausalLM")), options, lambda *_: None)
    planned = plan_model(found, options, Devices("cpu", 2, None, 1 << 30), [(1, 1, 1), (2, 1, 1)])
    runner = load_found(found, options, lambda *_: None).runner
    assert planned.weight_bytes == runner.placement.weight_bytes
    assert planned.kv_token_bytes * options.block_size == runner.cache_sizes.block_bytes
    # Two of the four layers read the keys and values of the others.
    assert planned.kv_token_bytes == 2 * 4 * (2 * 8 + 2 * 16)
    assert planned.state_slots == 0
    whole, halves = planned.shapes
    assert not whole.problem
    assert "no ranks" in halves.problem
    assert "transformers computes Gemma4ForCausalLM" in planned.why


def test_a_plan_counts_the_states_of_recurrent_layers(class_folder: Callable[[str], Path]) -> None:
    options = runner_options(runner="auto", dtype="float32", max_num_seqs=3)
    found = find_model(str(class_folder("BambaForCausalLM")), options, lambda *_: None)
    planned = plan_model(found, options, Devices("cpu", 2, None, 1 << 30), [(1, 1, 1)])
    slots = with_state_slots(found, options)
    runner = load_found(found, slots, lambda *_: None).runner
    assert (planned.state_slots, planned.state_bytes) == (slots.state_slots, runner.state_sizes.slot_bytes)
    assert planned.state_slots == runner.state_sizes.num_slots == 6
    (alone,) = plan_model(found, options, Devices("cpu", 2, None, 1 << 10), [(1, 1, 1)]).shapes
    assert "KV cache and states" in alone.problem
