"""The extra [cpu] has no torch: nothing on the way of a model through the native kernels imports it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures.tiny_model import make_tiny_model

from penstock.cli.demo_model import demo_model
from penstock.kernels.cpu.probe import best_isa, cpu_flags

WITHOUT_TORCH = """
import json, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""
GENERATE = """
from penstock import Engine, SamplingParams

found = {}
for name, settings in json.loads(sys.argv[1]).items():
    engine = Engine(settings.pop("model"), runner="auto", num_kv_blocks=64, **settings)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)
    found[name] = len(engine.generate(["The gate"], params)[0].token_ids)
print(json.dumps(found))
"""


def run(code: str, argument: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH + code, json.dumps(argument)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_models_run_without_torch(tmp_path: Path) -> None:
    if best_isa(cpu_flags()) is None:
        pytest.skip("this CPU has no native kernels")
    models: dict[str, dict[str, object]] = {
        "gguf": {"model": str(demo_model())},
        "safetensors": {"model": str(make_tiny_model(tmp_path / "tiny")), "dtype": "bfloat16", "quantization": "int8"},
    }
    done = run(GENERATE, models)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"gguf": 4, "safetensors": 4}


@pytest.mark.parametrize(("runner", "extra"), [("torch", "penstock-llm[node]"), ("gpu", "penstock-llm[gpu]")])
def test_a_runner_that_needs_torch_says_what_to_install(llama: Callable[..., Path], runner: str, extra: str) -> None:
    code = "from penstock import Engine; s = json.loads(sys.argv[1]); Engine(s['model'], runner=s['runner'])"
    done = run(code, {"model": str(llama()), "runner": runner})
    assert f"runner {runner} needs torch, which is not installed: pip install '{extra}'" in done.stderr
