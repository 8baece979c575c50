"""Recurrent layers on the native kernels: close to transformers, and the same bits however a text is computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fakes.runners.runner_options import runner_options
from fakes.transformers_logits import bfloat16_model, error_of, logits_of
from fixtures.matrices import kept
from fixtures.plans import Track, logits_alone, logits_of_step, tokens_of_step
from fixtures.random_adapters import make_adapter, merge
from fixtures.random_families import RECURRENT_FAMILIES
from fixtures.sampling import rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.loading.load import find_model, load_model
from penstock.gpu_node.model.lora.library import AdapterLibrary
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.kernels.cpu.structs import Format

Family = Callable[..., Path]
LoadNative = Callable[..., NativeRunner]
NUM_SLOTS, NUM_BLOCKS = 12, 160
TOKEN_IDS = [(7919 * i) % 384 for i in range(1, 131)]
OTHER_IDS = TOKEN_IDS[::-1]

NATIVE = tuple(RECURRENT_FAMILIES)
ADAPTED = (
    *("q_proj", "v_proj", "o_proj", "in_proj", "out_proj", "mlp.up_proj", "feed_forward.up_proj", "w1", "w2"),
    *("in_proj_qkv", "in_proj_qkvz", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_ba"),
)
QUANTIZED = {"int8": Format.INT8_GROUP, "int4": Format.INT4_GROUP}
PRECISE = (
    *("conv1d.weight", "conv.weight", "in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight"),
    *("gate.weight", "g_proj.weight"),
)


@pytest.mark.parametrize("name", NATIVE)
def test_logits_err_no_more_than_transformers_bfloat16(family: Family, load_native: LoadNative, name: str) -> None:
    import torch

    model = bfloat16_model(family(name), torch.float32)
    want = logits_of(model, TOKEN_IDS)
    theirs = logits_of(model.to(torch.bfloat16), TOKEN_IDS)
    got = logits_alone(load_native(family(name), state_slots=NUM_SLOTS), TOKEN_IDS)
    assert error_of(got, want) <= error_of(theirs, want)


@pytest.mark.parametrize(("quantization", "kv_cache_dtype"), [("int8", "int8"), ("int4", "float16")])
@pytest.mark.parametrize("name", NATIVE)
def test_quantized_weights_agree_with_the_references(
    family: Family, load_native: LoadNative, name: str, quantization: str, kv_cache_dtype: str
) -> None:
    """The small tensors of recurrent mixers and the routers of experts keep their precision."""
    import torch

    folder, rounded = family(name, initializer_range=0.1), QUANTIZED[quantization]
    model = bfloat16_model(folder, torch.float32)
    with torch.inference_mode():
        for path, weight in model.named_parameters():
            matrices = {2: [weight], 3: weight}.get(weight.ndim, [])
            for matrix in () if path.endswith(PRECISE) else matrices:
                matrix.copy_(torch.from_numpy(kept(rounded, matrix.numpy())))
    options = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype, "state_slots": NUM_SLOTS}
    got = logits_alone(load_native(folder, **options), TOKEN_IDS)
    want = logits_of(model, TOKEN_IDS)
    # Where a router's scores nearly tie, rounding chooses another expert, and the states of later tokens tell.
    errors = np.sqrt(np.square(got - want).mean(axis=1) / want.var())
    assert np.median(errors) < 0.1


@pytest.mark.parametrize("name", NATIVE)
@settings(max_examples=12)
@given(
    seed=st.integers(0, 1 << 32),
    length=st.integers(1, 90),
    chunk=st.sampled_from([1, 1, 2, 5, 16, 33, 90]),
    num_others=st.sampled_from([0, 1, 4, 9]),
    num_threads=st.sampled_from([1, 2, 3]),
    quantization=st.sampled_from(["none", "int8"]),
)
def test_bits_do_not_depend_on_parts_company_slots_or_threads(
    family: Family,
    load_native: LoadNative,
    name: str,
    seed: int,
    length: int,
    chunk: int,
    num_others: int,
    num_threads: int,
    quantization: str,
) -> None:
    rng, options = random.Random(seed), {"quantization": quantization, "state_slots": NUM_SLOTS}
    sequences = [
        rng.choices(range(384), k=count) for count in (length, *(rng.randint(1, 90) for _ in range(num_others)))
    ]
    want = logits_alone(load_native(family(name), **options), sequences[0])
    runner = load_native(family(name), **options, num_threads=num_threads)
    blocks, slots = (
        rng.sample(range(first, count), count - first) for first, count in ((1, NUM_BLOCKS), (0, NUM_SLOTS))
    )
    tracks = [Track(ids, [blocks.pop() for _ in range(-(-len(ids) // 16))], state=slots.pop()) for ids in sequences]
    parts = []
    while tracks[0].left:
        step = [(track, rng.randint(1, min(chunk, track.left))) for track in tracks if track.left]
        step = [part for part in step if part[0] is tracks[0] or rng.random() < 0.8]
        rng.shuffle(step)
        own = next(i for i, (track, _) in enumerate(step) if track is tracks[0])
        # A sequence may write to another slot than it reads.
        if rng.random() < 0.3 and tracks[0].done:
            tracks[0].read, tracks[0].state = tracks[0].state, slots[0]
            slots[0] = tracks[0].read
        parts.append(logits_of_step(runner, step)[own])
    np.testing.assert_array_equal(np.concatenate(parts), want)


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_sequences_that_continue_a_saved_state_get_the_same_bits(
    family: Family, load_native: LoadNative, name: str, num_threads: int
) -> None:
    runner = load_native(family(name), state_slots=NUM_SLOTS, num_threads=num_threads)
    branches = TOKEN_IDS[:70], TOKEN_IDS[:64] + OTHER_IDS[:6]
    want = [logits_alone(runner, ids) for ids in (TOKEN_IDS, *branches)]
    saves = {0: 4, 1: 5, 31: 6, 39: 7, 40: 8, 63: 9}
    first = Track(TOKEN_IDS, range(1, 10), state=0, saves=saves)
    got = [logits_of_step(runner, [(first, count)])[0] for count in (40, 1, 60, 29)]
    np.testing.assert_array_equal(np.concatenate(got), want[0])
    tracks = [
        Track(ids, [1, 2, 3, 4, 20 + slot], done=64, state=slot, read=9)
        for slot, ids in zip((1, 2), branches, strict=True)
    ]
    for branch, logits in enumerate(logits_of_step(runner, [(track, 6) for track in tracks]), start=1):
        np.testing.assert_array_equal(logits, want[branch][64:])
    # The last one first: a step that begins a page clears what lies behind its last token there.
    for token, slot in reversed(saves.items()):
        track = Track(TOKEN_IDS, range(1, 10), done=token + 1, state=3, read=slot)
        np.testing.assert_array_equal(logits_of_step(runner, [(track, 5)])[0], want[0][token + 1 : token + 6])


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_each_of_several_prompts_of_a_step_saves_its_own_states(
    family: Family, load_native: LoadNative, name: str, num_threads: int
) -> None:
    """No prompt but the first begins at a multiple of a block in the step."""
    runner = load_native(family(name), state_slots=NUM_SLOTS, num_threads=num_threads)
    texts = TOKEN_IDS[:71], OTHER_IDS[:33], TOKEN_IDS[20:101]
    want = [logits_alone(runner, ids) for ids in texts]
    tracks = [
        Track(ids, range(1 + 10 * i, 11 + 10 * i), state=i, saves=dict(zip((0, 15, len(ids) - 2), slots, strict=True)))
        for i, (ids, slots) in enumerate(zip(texts, ((3, 4, 5), (6, 7, 8), (9, 10, 11)), strict=True))
    ]
    for logits, own in zip(logits_of_step(runner, [(one, one.left) for one in tracks]), want, strict=True):
        np.testing.assert_array_equal(logits, own)
    for track, own in zip(tracks, want, strict=True):
        for token, slot in reversed(track.saves.items()):
            again = Track(track.token_ids, track.blocks, done=token + 1, state=track.state, read=slot)
            (logits,) = logits_of_step(runner, [(again, again.left)])
            np.testing.assert_array_equal(logits, own[token + 1 :])


@pytest.mark.parametrize("name", NATIVE)
def test_a_step_may_be_repeated_from_the_slot_that_it_read(family: Family, load_native: LoadNative, name: str) -> None:
    """As after a late mask, or a step that failed: the slot that was read is as it was."""
    runner = load_native(family(name), state_slots=NUM_SLOTS)
    want = logits_alone(runner, TOKEN_IDS)
    track = Track(TOKEN_IDS, range(1, 10), state=0)
    logits_of_step(runner, [(track, 50)])
    for _ in range(3):
        track.done, track.read, track.state = 50, 0, 1
        np.testing.assert_array_equal(logits_of_step(runner, [(track, 7)])[0], want[50:57])


@pytest.mark.parametrize("name", ["falcon h1", "lfm3", "qwen3.5", "qwen3 next"])
def test_an_adapter_changes_all_mixers_and_gives_the_same_bits_in_parts(
    family: Family, load_native: LoadNative, tmp_path: Path, name: str
) -> None:
    import torch

    folder, ids = family(name, initializer_range=0.1), TOKEN_IDS
    adapter = make_adapter(tmp_path / "adapter", bfloat16_model(folder, torch.float32), seed=1, only=ADAPTED)
    merged = merge(bfloat16_model(folder, torch.float32), adapter)
    want = logits_of(merged, ids)
    theirs = logits_of(merged.to(torch.bfloat16), ids)
    runner = load_native(folder, state_slots=NUM_SLOTS, max_loras=1)
    spec = find_model(str(folder), runner_options(), lambda stage, done: None).described.spec
    runner.set_adapter(0, AdapterLibrary(spec, {"adapter": adapter}, None, 16).find(AdapterRef(name="adapter")))
    whole = Track(ids, range(1, 10), state=0, adapter=0)
    got = logits_of_step(runner, [(whole, len(ids))])[0]
    parts = Track(ids, range(11, 20), state=1, adapter=0)
    found = [logits_of_step(runner, [(parts, count)])[0] for count in (33, 1, 2, 94)]
    np.testing.assert_array_equal(np.concatenate(found), got)
    assert error_of(got, want) <= error_of(theirs, want)


@pytest.mark.parametrize("name", NATIVE)
def test_the_runner_samples_and_says_its_slots(family: Family, load_native: LoadNative, name: str) -> None:
    runner = load_native(family(name), state_slots=NUM_SLOTS)
    assert (runner.state_sizes.num_slots, runner.verifies_drafts) == (NUM_SLOTS, False)
    want = logits_alone(runner, TOKEN_IDS).argmax(-1)
    track = Track(TOKEN_IDS, range(1, 10), state=1)
    for count in (128, 1, 1):
        (token,) = tokens_of_step(runner, [(track, count)], rows_of(1, temperature=0.0))
        assert token == want[track.done - 1]


@pytest.mark.parametrize("name", ["qwen3.5 moe", "lfm2 with biases"])
def test_weights_of_the_cache_and_rows_of_the_file_give_the_same_bits(
    family: Family, load: LoadNative, name: str
) -> None:
    """A second node maps what the first one packed; until then a node reads the rows of the checkpoint."""
    options = {"state_slots": 2, "num_kv_blocks": 64}
    logits = [logits_alone(load(family(name), waits=waits, **options), TOKEN_IDS) for waits in (False, True, True)]
    np.testing.assert_array_equal(logits[1], logits[0])
    np.testing.assert_array_equal(logits[2], logits[0])


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3.5", {"linear_key_head_dim": 24}),
        ("qwen3.5", {"linear_value_head_dim": 48}),
        ("nemotron h", {"mamba_head_dim": 24}),
        ("nemotron h", {"ssm_state_size": 24}),
    ],
    ids=str,
)
def test_heads_that_do_not_fill_vectors_are_refused_by_their_sizes(
    family: Family, name: str, sizes: dict[str, int]
) -> None:
    options = runner_options(runner="native", dtype="bfloat16", num_kv_blocks=64, state_slots=2)
    refused = r"heads (with keys of \d+ and values of \d+ channels|of \d+ channels with states of \d+): multiples of"
    with pytest.raises(ConfigError, match=refused):
        load_model(str(family(name, **sizes)), options, lambda stage, done: None)
