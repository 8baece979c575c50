"""How the attention kernels are launched: as was measured on the GPU, else by rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock.kernels.triton import launches
from penstock.kernels.triton.launches import Launch, attention_launch, prefill_rows, shape_name, table_name

CARD, CPU = torch.device("cuda", 0), torch.device("cpu")
SHORT = torch.bfloat16


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of tables, empty, for a GPU that is called `Some Card 80GB`."""
    (folder := tmp_path / "tuned").mkdir()
    monkeypatch.setattr(launches, "files", lambda _: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some Card 80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    launches._table.cache_clear()
    return folder


def test_tuned_launch_of_a_gpu_goes_before_the_rule(tuned: Path) -> None:
    by_rule = attention_launch("decode_attention", 128, 8, SHORT, CARD)
    launches._table.cache_clear()
    table = {"decode_attention": {shape_name(128, 4, SHORT): [32, 8, 4]}}
    (tuned / table_name("Some Card 80GB")).write_text(json.dumps(table))
    assert attention_launch("decode_attention", 128, 4, SHORT, CARD) == Launch(32, 8, 4) != by_rule
    assert attention_launch("decode_attention", 128, 8, SHORT, CARD) == by_rule, "another shape was not measured"
    long = attention_launch("decode_attention", 128, 4, torch.float32, CARD)
    assert long == attention_launch("decode_attention", 128, 8, torch.float32, CARD), "nor were longer numbers"
    prefill = [attention_launch("prefill_attention", 128, group, SHORT, CARD) for group in (4, 8)]
    assert prefill[0] == prefill[1]


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_gpu_without_a_tuned_table_uses_the_rule(head_dim: int) -> None:
    for kernel in ("decode_attention", "prefill_attention"):
        tile, warps, stages = launch = attention_launch(kernel, head_dim, 4, SHORT, CARD)
        assert launch == attention_launch(kernel, head_dim, 4, SHORT, CPU)
        assert tile & (tile - 1) == warps & (warps - 1) == 0 and tile >= 16 and 1 <= warps <= 16 and stages >= 1


@pytest.mark.parametrize(("capability", "most_kib"), [((8, 0), 163), ((8, 9), 99), ((9, 0), 227)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_of_queries_fill_the_warps_and_fit_into_shared_memory(
    capability: tuple[int, int], most_kib: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Untuned")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    rows = prefill_rows(head_dim, SHORT, CARD)
    assert rows == (64 if head_dim == 256 and capability < (9, 0) else 128)
    tile, num_warps, num_stages = attention_launch("prefill_attention", head_dim, 4, SHORT, CARD, rows)
    assert num_warps * 16 == rows and num_stages == 3
    assert (rows + 2 * 2 * tile) * head_dim * 2 <= most_kib * 1024
