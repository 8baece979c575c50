"""The upgrade contract of arithmetic: the bits of logits change only with the name.

A node continues the jobs of another one if both compute with the same arithmetic, also while two releases run beside
each other. So a change of the kernels that changes a bit must change the name, which `native/load.py` makes. Nodes of
the old release then end their own jobs. After such a change, this writes the file anew:
`PYTHONPATH=tests:ops python -m gpu_node.model.native.test_golden_bits`
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fakes.native import built
from fakes.runners.runner_options import runner_options
from fixtures.plans import logits_alone

from penstock.cli.demo_model import demo_model
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.native import load as native_load
from penstock.kernels.cpu.probe import REQUIRED_FLAGS, Isa

GOLDEN = Path(__file__).with_name("golden_bits.json")
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"quantization": "int8", "kv_cache_dtype": "int8"},
    {"quantization": "int4", "kv_cache_dtype": "float16"},
    {"dtype": "bfloat16", "quantization": "none"},
)
TOKEN_IDS = [(7919 * number) % 49_000 for number in range(1, 40)]


def bits_of(isa: Isa, settings: dict[str, Any]) -> tuple[str, str]:
    """Return the name of an arithmetic, and the digest of the demo model's logits in it."""
    library = built(isa)
    options = {"num_kv_blocks": 16, "max_num_seqs": 1, "max_model_len": 256, "num_threads": 1, "dtype": "auto"}
    options |= {"runner": "native", "quantization": "auto", "cpu_isa": isa}
    with mock.patch.object(native_load, "library_path", lambda *_: library):
        wanted = runner_options(**options | settings)
        model = load_model(str(demo_model()), wanted, lambda stage, fraction: None)
    runner: Any = model.runner
    try:
        digest = blake2b(logits_alone(runner, TOKEN_IDS).tobytes(), digest_size=16).hexdigest()
    finally:
        runner.close()
    return model.arithmetic, digest


@pytest.mark.parametrize("isa", REQUIRED_FLAGS)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings.values()) or "file")
def test_bits_change_only_with_the_name_of_the_arithmetic(isa: Isa, settings: dict[str, Any]) -> None:
    name, bits = bits_of(isa, settings)
    assert json.loads(GOLDEN.read_text())[name] == bits, f"{name} computes other bits than in the last release"


def main() -> None:
    """Write the digests of all arithmetics that this CPU has."""
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    known |= dict(bits_of(isa, settings) for isa in REQUIRED_FLAGS for settings in SETTINGS)
    GOLDEN.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
