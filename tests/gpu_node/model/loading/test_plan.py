"""A plan says what a loaded model takes, without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.runners.runner_options import runner_options
from fixtures.gguf_file import write_gguf
from fixtures.random_families import make_family_model

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.loading.load import FoundModel, find_model, load_found
from penstock.gpu_node.model.loading.plan import plan_model, sizes_of
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.plan_records import Devices, ModelPlan, ShapeFit
from tests.gpu_node.model.conftest import Quantized

GIB = 1 << 30
NATIVE = {"runner": "native", "dtype": "bfloat16", "num_threads": 1, "num_kv_blocks": 8, "weight_cache": False}


def found_with(folder: Path | str, **options: Any) -> tuple[FoundModel, RunnerOptions]:
    given = runner_options(**options)
    return find_model(str(folder), given, lambda *_: None), given


def check_native(folder: Path, **options: Any) -> None:
    """The runner's own count of its packed matrices and of a KV block is the plan's."""
    found, given = found_with(folder, **NATIVE, **options)
    sizes = sizes_of(found.described, given, "native")
    spec, runner = found.described.spec, load_found(found, given, lambda *_: None).runner
    assert sizes.weight_bytes == runner.placement.weight_bytes
    token_bytes = sizes.kv_token_bytes(spec, range(spec.num_layers))
    assert token_bytes * given.block_size == runner.cache_sizes.block_bytes


@pytest.mark.parametrize("quantization", ["auto", "int8", "int8_group", "int4"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_sizes_are_those_of_the_native_runner(tiny_model: Path, quantization: str, kv_cache_dtype: str) -> None:
    check_native(tiny_model, quantization=quantization, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("family", ["qwen3 moe", "gemma2", "gemma4 small", "gemma4 moe", "gpt2", "phi3"])
def test_sizes_of_other_families(tmp_path: Path, family: str) -> None:
    check_native(make_family_model(tmp_path, family, "bfloat16"))


@pytest.mark.parametrize("kind", ["q4_k", "q6_k", "q8_0", "q5_1"])
def test_sizes_of_gguf_formats(tmp_path: Path, kind: str) -> None:
    folder = make_family_model(tmp_path / "model", "llama", "bfloat16", hidden_size=256, intermediate_size=256)
    write_gguf(folder, tmp_path / "model.gguf", "llama", kind)
    check_native(tmp_path / "model.gguf")


@pytest.mark.parametrize("layout", ["gptq int4 groups of 32", "awq", "int8 by row", "fp8 by matrix", "nvfp4"])
def test_sizes_of_quantized_checkpoints(quantized: Quantized, layout: str) -> None:
    check_native(quantized("llama", layout)[0])


# --- what fits


def planned(model: str, devices: Devices, shapes: list[tuple[int, int, int]], **options: Any) -> ModelPlan:
    given: dict[str, Any] = {"load_format": "dummy", "runner": "auto", "dtype": "auto", "num_kv_blocks": None}
    found, chosen = found_with(model, **given | {"kv_cache_gib": None} | options)
    return plan_model(found, chosen, devices, shapes)


def test_the_plan_divides_the_memory_as_the_native_runner_does(tmp_path: Path) -> None:
    folder = make_family_model(tmp_path, "gemma3", "bfloat16")
    options: dict[str, Any] = {"kv_cache_gib": 0.002, "max_num_seqs": 3, "max_num_batched_tokens": 64}
    options |= {"num_kv_blocks": None, "max_model_len": 4096}
    found, given = found_with(folder, **NATIVE | options)
    runner = load_found(found, given, lambda *_: None).runner
    plan = planned(str(folder), Devices("cpu", 1, None, GIB), [(1, 1, 1), (2, 1, 1)], **NATIVE | options)
    sizes, (fit, ranks) = runner.cache_sizes, plan.shapes
    assert (fit.kv_tokens, fit.window_bytes) == (sizes.num_device_blocks * 16, sizes.windows.num_bytes)
    assert fit.kv_bytes == sizes.num_device_blocks * sizes.block_bytes + sizes.windows.num_bytes <= 0.002 * GIB
    assert sizes.windows.num_blocks == 3 * 7 + 4
    assert plan.window == 32 and fit.kv_tokens > 0.002 * GIB / plan.kv_token_bytes
    assert not ranks.window_bytes


def gpus(count: int, gib: int) -> Devices:
    return Devices("gpu", count, gib * GIB)


def test_a_model_larger_than_one_gpu_is_refused_on_one_and_fits_on_two() -> None:
    found = planned("llama-8b", gpus(2, 12), [(1, 1, 2), (2, 1, 1), (1, 2, 1)])
    one, tensor, stages = found.shapes
    assert "weights and steps take 16" in one.problem and "of the 10.8 GiB" in one.problem
    assert tensor.problem == ""
    assert stages.problem == "pipeline_parallel_size 2: the GPU runner has no stages; use tensor_parallel_size"
    assert tensor.weight_bytes == found.weight_bytes // 2
    assert found.best == tensor


def test_the_best_shape_has_few_ranks_and_on_gpus_many_replicas() -> None:
    found = planned("llama-8b", gpus(8, 80), [(1, 1, 8), (2, 1, 4), (8, 1, 1)])
    assert found.best == found.shapes[0] and found.best.replicas == 8
    assert all(shape.kv_tokens > 131_072 for shape in found.shapes)
    halves = planned("llama-8b", gpus(8, 34), [(1, 1, 8), (2, 1, 4), (8, 1, 1)])
    # One GPU holds the weights, but not a sequence of full length beside them.
    assert halves.shapes[0].problem == "" and halves.best == halves.shapes[1]


def test_kv_cache_is_cut_by_kv_head() -> None:
    found = planned("llama-8b", gpus(16, 80), [(8, 1, 2), (16, 1, 1)], kv_cache_gib=1)
    by_head, shared = found.shapes
    assert found.kv_token_bytes == 2 * 32 * 8 * 128 * 2
    assert by_head.kv_tokens == 8 * GIB // found.kv_token_bytes
    assert shared.kv_tokens == by_head.kv_tokens, "two ranks hold each KV head"


def test_stages_of_torch_divide_the_layers() -> None:
    devices = Devices("cpu", 4, None, shared_bytes=64 * GIB)
    one, stages = planned("llama-1b", devices, [(1, 1, 1), (1, 4, 1)], runner="torch", kv_cache_gib=1).shapes
    assert one.problem == stages.problem == ""
    assert stages.kv_tokens == one.kv_tokens
    # The stages in the middle have 6 of 16 layers, because the first has the embedding and the last the head.
    assert stages.kv_bytes == one.kv_bytes * 6 // 16


def test_sizes_that_do_not_divide_are_named(demo_gguf: Path) -> None:
    found = planned(str(demo_gguf), gpus(4, 8), [(2, 1, 2), (1, 40, 1)], load_format="auto", dtype="auto")
    assert "num_kv_heads 3 is neither a multiple nor a divisor" in found.shapes[0].problem
    assert "num_heads 9 is not a multiple" in found.shapes[0].problem
    assert "the GPU runner has no stages" in found.shapes[1].problem
    assert found.best is None
    int4 = planned("tiny", gpus(4, 8), [(4, 1, 1)], quantization="int4")
    assert int4.shapes[0].problem.endswith("no whole groups of 32")


def test_a_process_on_the_cpu_has_its_memory_and_ranks_divide_it() -> None:
    shapes = [(1, 1, 1), (2, 1, 1), (1, 1, 2), (9, 1, 1), (1, 2, 1)]
    devices = Devices("cpu", 4, int(2.2 * GIB))
    one, two, replicas, nine, stages = planned("llama-1b", devices, shapes, dtype="bfloat16", kv_cache_gib=1).shapes
    assert one.problem.startswith("a rank's weights take 2.3") and one.problem.endswith("2.2 GiB of memory")
    assert two.problem == "" and two.weight_bytes < 1.2 * GIB and two.kv_bytes == GIB // 2
    assert replicas.problem.startswith("a rank's weights")
    assert "cuts by KV head, and the model has 8" in nine.problem and "no stages" in stages.problem


def test_replicas_on_the_cpu_share_the_weights_and_divide_the_default_kv_cache() -> None:
    devices = Devices("cpu", 4, None, shared_bytes=int(3.6 * GIB))
    shapes = [(1, 1, 1), (1, 1, 2), (1, 1, 8)]
    one, two, eight = planned("llama-1b", devices, shapes, dtype="bfloat16").shapes
    assert (one.problem, two.problem) == ("", "")
    assert one.kv_tokens == 2 * two.kv_tokens and one.weight_bytes == two.weight_bytes
    assert eight.problem == "8 ranks need a core each, there are 4"
    small = Devices("cpu", 4, None, shared_bytes=3 * GIB)
    (refused,) = planned("llama-1b", small, [(1, 1, 1)], dtype="bfloat16").shapes
    assert refused.problem.endswith("of memory; a smaller kv_cache_gib would fit")


def test_a_kv_cache_of_fp8_is_planned_as_int8_on_a_cpu() -> None:
    devices = Devices("cpu", 1, None, 4 * GIB)
    plans = [
        planned("llama-1b", devices, [(1, 1, 1)], dtype="bfloat16", kv_cache_dtype=name)
        for name in ("fp8_e4m3", "int8", "auto")
    ]
    assert [one.kv_cache_dtype for one in plans] == ["int8", "int8", "bfloat16"]
    assert plans[0].shapes == plans[1].shapes and plans[0].kv_token_bytes < plans[2].kv_token_bytes


def test_states_count_in_the_memory_of_a_gpu(tmp_path: Path) -> None:
    folder = make_family_model(tmp_path, "qwen3.5")
    plain, small = (
        planned(str(folder), gpus(1, 2), [(1, 1, 1)], load_format="auto", dtype="auto", state_cache_gib=gib)
        for gib in (0.2, 0.1)
    )
    assert plain.runner == "gpu"
    difference = (plain.state_slots - small.state_slots) * plain.state_bytes
    kv_bytes = [one.shapes[0].kv_bytes for one in (plain, small)]
    assert abs(kv_bytes[1] - kv_bytes[0] - difference) < 16 * plain.kv_token_bytes
    full = planned(str(folder), gpus(1, 2), [(1, 1, 1)], load_format="auto", dtype="auto", state_cache_gib=1.9)
    assert "weights, steps and states take" in full.shapes[0].problem


def test_what_a_gpu_cannot_compute_is_refused(tmp_path: Path) -> None:
    folder = make_family_model(tmp_path / "shared keys", "gemma4 small", "bfloat16")
    with pytest.raises(ConfigError, match="not supported on a GPU, which has no layers that read"):
        planned(str(folder), gpus(1, 80), [(1, 1, 1)], load_format="auto")
    folder = make_family_model(tmp_path / "experts", "qwen3 moe", "bfloat16")
    with pytest.raises(ConfigError, match=r"runner native: .* not float32"):
        planned(str(folder), Devices("cpu", 1, None), [(1, 1, 1)], runner="native", dtype="float32")
    torch = planned(str(folder), Devices("cpu", 1, None, GIB), [(1, 1, 1)], runner="torch", dtype="float32")
    assert torch.runner == "torch" and torch.best == ShapeFit(1, 1, 1, "", torch.weight_bytes, *_kv(torch))


def _kv(found: ModelPlan) -> tuple[int, int]:
    tokens = found.shapes[0].kv_tokens
    return tokens * found.kv_token_bytes, tokens
