"""`penstock plan` on a machine without a GPU, and on ones that a stand-in for the driver's tool describes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.command import run_command

from penstock.cli.demo_model import demo_model
from penstock.cli.machine import plan
from penstock.contract.errors import ConfigError
from penstock.gpu_node.gpus import GpuDevice, GpuMachine
from penstock.gpu_node.plan import ModelPlan, ShapeFit

DUMMY = ("--load-format", "dummy")
ANY_GPU: Any = object()


def planned(*words: str) -> tuple[int, str, str]:
    done = run_command("plan", *words)
    return done.returncode, done.stdout, done.stderr


def test_a_model_is_planned_for_gpus_that_are_not_there() -> None:
    status, said, _ = planned("llama-8b", *DUMMY, "--devices", "2", "--memory", "12")
    lines = said.splitlines()
    assert status == 0
    assert lines[0] == "llama-8b: runner gpu, bfloat16, quantization auto"
    assert lines[1].startswith("32 layers, 32 heads, 8 KV heads; weights 14.96 GiB; KV cache 128.0 KiB per token")
    table = [line.split() for line in lines[4:6]]
    assert table[0][:4] == ["1", "1", "2", "does"] and "of the 10.8 GiB that it may use" in lines[4]
    assert table[1][:4] == ["*", "2", "1", "1"]
    assert lines[-1].startswith("llama-8b fits as 1 replica of 2 ranks (TP 2 x PP 1): 7.48 GiB of weights")


def test_json_has_what_the_table_has() -> None:
    status, said, _ = planned("llama-8b", *DUMMY, "--devices", "2", "--memory", "12", "--json")
    found = json.loads(said)
    assert status == 0
    assert (found["runner"], found["layers"], found["kv_token_bytes"]) == ("gpu", 32, 131_072)
    assert found["best"] == found["shapes"][1]
    assert [shape["problem"] == "" for shape in found["shapes"]] == [False, True]
    assert found["shapes"][1]["kv_bytes"] == found["shapes"][1]["kv_tokens"] * found["kv_token_bytes"] // 2


def test_states_of_recurrent_layers_have_a_line() -> None:
    sizes = {"weight_bytes": 1 << 30, "kv_token_bytes": 12 << 10, "state_bytes": 20 << 20, "state_slots": 51}
    numbers = {"max_model_len": 4096, "layers": 24, "heads": 8, "kv_heads": 2, "max_num_seqs": 25}
    found = ModelPlan("m", "native", "bfloat16", "auto", "bfloat16", **numbers, **sizes, shapes=(ShapeFit(1, 1, 1),))
    lines = list(plan.lines_of(found))
    assert lines[2] == (
        "states of recurrent layers 20.00 MiB per sequence; 51 slots, 1020.00 MiB, for 25 sequences and snapshots"
    )


def test_layers_with_windows_have_a_line() -> None:
    sizes = {"weight_bytes": 1 << 30, "kv_token_bytes": 26 << 10, "state_bytes": 0, "state_slots": 0}
    numbers = {"max_model_len": 4096, "layers": 26, "heads": 4, "kv_heads": 1, "max_num_seqs": 64}
    windows, shapes = {"window": 512, "window_token_bytes": 22 << 10}, (ShapeFit(1, 1, 1),)
    found = ModelPlan("m", "native", "bfloat16", "auto", "bfloat16", **numbers, **sizes, shapes=shapes, **windows)
    assert list(plan.lines_of(found))[2] == (
        "layers with windows keep 22.0 KiB of this for the last 512 tokens, 11.00 MiB per sequence; the other layers "
        "keep 4.0 KiB of each token"
    )


def test_what_does_not_fit_or_divide_is_an_exit_code() -> None:
    demo_gguf = demo_model()
    status, said, _ = planned(str(demo_gguf), "--devices", "2", "--memory", "4", "--tensor-parallel-size", "2")
    assert status == 1
    assert "num_heads 9 is not a multiple of it" in said.splitlines()[-1]
    status, said, _ = planned(str(demo_gguf), "--devices", "cpu", "--cores", "2", "--memory", "0.05")
    assert status == 1 and "a rank's weights take" in said
    status, said, _ = planned(str(demo_gguf), "--device", "cpu", "--cores", "2", "--kv-cache-gib", "0.1")
    assert status == 0 and "runner native" in said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--devices", "8"), "--memory: give the GiB of each GPU"),
        (("--devices", "eight"), "--devices: 'eight' is neither auto, cpu, cuda, a list such as cuda:0,cuda:1 nor"),
        (("--devices", "cuda:1"), "--devices: no GPU is usable here"),
        (("--device", "cuda"), "--devices: no GPU is usable here"),
        (("--devices", "2", "--memory", "8", "--device", "native"), "--devices: 2 GPUs, but runner native computes on"),
        (("--tensor-parallel-size", "0"), "--tensor-parallel-size: must be at least 1"),
        (("--max-model-len", "1"), "--max-model-len: must be at least 2"),
        (("--load-format", "auto"), "there is no folder /nowhere"),
    ],
)
def test_wrong_use_is_named(words: tuple[str, ...], reason: str) -> None:
    model = "/nowhere" if "auto" in words else "llama-1b"
    status, _, said = planned(model, *DUMMY, *words)
    assert status == 2
    assert reason in said


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = GpuDevice("0", "H100", 81_559), GpuDevice("1", "A10", 23_028)
    monkeypatch.setattr(plan, "this_machine", lambda: GpuMachine((ANY_GPU,), "13.0", "2.11", "13.0", "3.6"))
    monkeypatch.setattr(plan, "gpu_problems", lambda _: iter(()))
    monkeypatch.setattr(plan, "devices_here", lambda: gpus)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("devices", "count", "mib"),
    [("auto", 2, 23_028), ("cuda", 2, 23_028), ("cuda:0", 1, 81_559), ("cuda:1,cuda:0", 2, 23_028)],
)
def test_gpus_of_this_machine_count_with_the_memory_of_the_smallest(devices: str, count: int, mib: int) -> None:
    found = plan.planned({"model": "llama-8b", "load_format": "dummy"}, devices)
    first = found.shapes[0]
    assert (found.runner, first.replicas) == ("gpu", count)
    # Steps on a GPU have 256 sequences and 8,192 tokens by default, which take 2 to 4 GiB.
    left_gib = 0.9 * mib / 1024 - (first.weight_bytes + first.kv_bytes) / (1 << 30)
    assert 2 < left_gib < 4


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="devices: there is no cuda:2; 2 GPUs are visible"):
        plan.planned({"model": "llama-8b", "load_format": "dummy"}, "cuda:0,cuda:2")
