"""What a command line and a model's files tell is said before Redis or a process is started, and once."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from fakes.command import run_command
from fixtures.tiny_model import make_tiny_model

CHECK_S = 0.3
"""What the check may take of one idle core."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def with_config(model: Path, change: Mapping[str, object]) -> Path:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    return model


def without(model: Path, pattern: str) -> Path:
    for path in model.glob(pattern):
        path.unlink()
    return model


def file_of(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no file": (lambda model: model / "none.gguf", "there is no file "),
    "no folder": (lambda model: model / "none", "there is no folder "),
    "unknown architecture": (
        lambda model: with_config(model, {"architectures": ["FooForCausalLM"]}),
        "architecture FooForCausalLM is not supported",
    ),
    "no config": (lambda model: without(model, "config.json"), "config.json"),
    "broken config": (lambda model: file_of(model, "config.json", b'{"a":').parent, "config.json"),
    "no weights": (lambda model: without(model, "*.safetensors"), "has no .safetensors weights"),
    "a cut GGUF file": (lambda model: file_of(model, "x.gguf", b"GGUF\3\0\0\0"), "the header is cut short"),
    "no GGUF file": (lambda model: file_of(model, "x.bin", b"PK"), "is neither a folder nor a GGUF file"),
    "an adapter": (
        lambda model: file_of(without(model, "config.json"), "adapter_config.json", b"{}").parent,
        "is a LoRA adapter of None, not a model: serve that with --lora NAME=",
    ),
}


@pytest.mark.parametrize("command", ["serve", "node"])
@pytest.mark.parametrize(("make", "said"), MODELS.values(), ids=MODELS)
def test_a_model_that_cannot_run_is_refused_before_anything_starts(
    make: Callable[[Path], Path], said: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.serve.find_or_start_redis", None)
    model = make(make_tiny_model(tmp_path / "model"))
    words = ("--port", "0") if command == "serve" else ("--redis-url", "redis://127.0.0.1:1")
    began_s = time.process_time()
    done = run_command(command, str(model), *words)
    took_s = time.process_time() - began_s
    assert (done.returncode, done.stderr.count("\n"), said in done.stderr) == (2, 1, True), done.stderr
    assert took_s < CHECK_S


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--tool-parser nonsense", "tool-parser: 'nonsense' is not one of none, hermes, "),
        ("--max-model-len 9999999", "max_model_len 9999999 is more than the model's own limit of "),
        ("--revision abc", "revision abc is only for models of the hub"),
        ("--lora a=/none", "--lora: adapter a: there is no folder /none"),
        ("--gpu-memory-utilization 0.9 --device cpu", "--gpu-memory-utilization: needs a GPU; on the CPU, --kv-cache-"),
        ("--chat-template /none.jinja", "--chat-template: cannot read /none.jinja"),
        ("--max-num-batched-tokens 16", "max_num_batched_tokens (16) must be at least max_num_seqs (64)"),
    ],
)
def test_an_option_that_does_not_fit_the_model_is_refused_before_anything_starts(
    line: str, said: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.serve.find_or_start_redis", None)
    done = run_command("serve", str(tiny), "--port", "0", *shlex.split(line))
    assert (done.returncode, done.stderr.count("\n"), said in done.stderr) == (2, 1, True), done.stderr
