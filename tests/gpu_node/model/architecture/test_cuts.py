"""The rules by which a model is cut into ranks."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.hf_config import llama_attention, llama_layer, llama_mlp, llama_model
from penstock.gpu_node.model.architecture.rank_part import (
    PANEL_ROWS,
    CutRunner,
    Parallel,
    check_cuts,
    cut_problems,
    even_spans,
    head_spans,
    kv_head_spans,
    panel_spans,
    stage_layers,
)
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.kernels.cpu.structs import PANEL

_SMOLLM = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
_LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}


def _spec(sizes: dict[str, int], **changes: Any) -> ModelSpec:
    config = {"num_hidden_layers": 4, "vocab_size": 49152, **sizes, **changes}
    layer = llama_layer(llama_attention(config), llama_mlp(config))
    return llama_model(config, (layer,) * config["num_hidden_layers"])


def _problems(spec: ModelSpec, runner: CutRunner, tensor: int = 1, pipeline: int = 1, **group: int) -> list[str]:
    return [problem for _, problem in cut_problems(spec, Parallel(tensor, pipeline), runner, **group)]


def test_panels_are_those_of_the_kernels() -> None:
    assert PANEL_ROWS == PANEL


def test_native_cuts_unevenly_by_kv_head() -> None:
    spec = _spec(_SMOLLM)
    assert _problems(spec, "native", 2) == []
    assert kv_head_spans(spec.attentions[0], 2) == (range(2), range(2, 3))
    assert head_spans(spec.attentions[0], 2) == (range(6), range(6, 9))
    assert _problems(spec, "native", 4) == [
        "tensor_parallel_size 4: the native runner cuts by KV head, and the model has 3 (num_kv_heads)"
    ]


@pytest.mark.parametrize("runner", ["torch", "gpu"])
def test_other_runners_name_each_size_that_does_not_divide(runner: CutRunner) -> None:
    assert _problems(_spec(_SMOLLM), runner, 2) == [
        "tensor_parallel_size 2: num_kv_heads 3 is neither a multiple nor a divisor of it",
        "tensor_parallel_size 2: num_heads 9 is not a multiple of it",
    ]
    assert _problems(_spec(_LLAMA), runner, 8) == []


def test_ranks_beyond_the_kv_heads_share_them() -> None:
    spec = _spec(_LLAMA)
    assert _problems(spec, "gpu", 16) == []
    assert kv_head_spans(spec.attentions[0], 16)[:3] == (range(1), range(1), range(1, 2))
    assert head_spans(spec.attentions[0], 16)[:3] == (range(2), range(2, 4), range(4, 6))


def test_columns_are_cut_between_groups_that_share_a_scale() -> None:
    spec = _spec(_LLAMA, intermediate_size=14336 + 32)
    assert _problems(spec, "gpu", 2) == []
    expected = "tensor_parallel_size 2: intermediate_size 14368 leaves 7184 columns for a rank, no whole groups of 32"
    assert _problems(spec, "gpu", 2, column_group=32) == [expected]


def test_stages_are_for_torch_and_no_more_than_layers() -> None:
    spec = _spec(_LLAMA)
    assert _problems(spec, "torch", 2, 4) == []
    assert _problems(spec, "torch", 1, 5) == ["pipeline_parallel_size 5: the model has only 4 layers (num_layers)"]
    assert "GPU runner has no stages" in _problems(spec, "gpu", 1, 2)[0]
    assert "native runner has no stages" in _problems(spec, "native", 1, 2)[0]


def test_all_problems_are_one_error_under_the_setting_of_the_first() -> None:
    with pytest.raises(ConfigError, match="num_heads 9 is not a multiple") as raised:
        check_cuts(_spec(_SMOLLM), Parallel(tensor=9 * 3), "torch")
    assert raised.value.param == "tensor_parallel_size"
    with pytest.raises(ConfigError, match="must be at least 1") as raised:
        check_cuts(_spec(_SMOLLM), Parallel(pipeline=0), "torch")
    assert raised.value.param == "pipeline_parallel_size"


def test_spans_cover_everything_once_and_differ_by_one() -> None:
    assert even_spans(7, 3) == (range(3), range(3, 5), range(5, 7))
    assert panel_spans(100, 2) == (range(64), range(64, 100))
    assert [len(span) for span in panel_spans(1536, 5)] == [320, 320, 320, 288, 288]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_have_the_smallest_largest_stage(stages: int) -> None:
    layer_bytes, first, last = [5, 1, 7, 3, 3, 9, 2], 6, 4

    def largest(cuts: tuple[int, ...]) -> int:
        bounds = (0, *cuts, len(layer_bytes))
        sums = [sum(layer_bytes[start:end]) for start, end in pairwise(bounds)]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    found = stage_layers(layer_bytes, stages, first_bytes=first, last_bytes=last)
    assert [layer for span in found for layer in span] == list(range(len(layer_bytes)))
    assert all(found)
    best = min(map(largest, combinations(range(1, len(layer_bytes)), stages - 1)))
    assert largest(tuple(span.start for span in found[1:])) == best


def test_equal_layers_are_cut_equally() -> None:
    assert [len(span) for span in stage_layers([1] * 8, 3)] == [3, 3, 2]
    with pytest.raises(ConfigError, match="pipeline_parallel_size 3 must be from 1 to the model's 2 layers"):
        stage_layers([1, 1], 3)
