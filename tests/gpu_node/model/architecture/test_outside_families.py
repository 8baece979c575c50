"""Families that other packages bring, by entry points."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.runners.runner_options import runner_options
from fixtures.small_transformers import quiet, require_same_tokens, write_small

from penstock.gpu_node.model.architecture.families import families
from penstock.gpu_node.model.loading.load import load_model

EXAMPLE = Path(__file__).parents[4] / "examples" / "own_family"
ARCHITECTURE = "SeedOssForCausalLM"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, which this process looks into."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    families.cache_clear()
    yield folder
    families.cache_clear()


def bring(packages: Path, name: str, source: str) -> None:
    """Install a package whose module `name` is `source`; its entry point is `FAMILIES`."""
    (packages / f"{name}.py").write_text(source)
    info = packages / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[penstock.families]\n{name} = {name}:FAMILIES\n")


def test_the_example_is_installed_and_computes_what_transformers_does(packages: Path, tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    copied = tmp_path / "example"
    copied.mkdir()
    for path in (EXAMPLE / "pyproject.toml", EXAMPLE / "penstock_seed_oss.py"):
        (copied / path.name).write_bytes(path.read_bytes())
    subprocess.run([*install, str(packages), str(copied)], check=True, timeout=120)
    with quiet():
        module = write_small(ARCHITECTURE, tmp_path / "model")
    options = runner_options(runner="torch", dtype="float32", num_kv_blocks=40, block_size=16)
    loaded = load_model(str(tmp_path / "model"), options, lambda *_: None)
    assert loaded.arithmetic == "torch-float32 by penstock-seed-oss 0.1.0"
    require_same_tokens(loaded.runner, module)


def test_a_package_that_cannot_be_loaded_is_named_and_harms_no_other_family(
    packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bring(packages, "broken_family", "raise RuntimeError('no kernel')")
    bring(packages, "odd_family", "FAMILIES = (1,)")
    with caplog.at_level(logging.WARNING):
        assert "LlamaForCausalLM" in families()
    said = {record.__dict__["package"]: record.__dict__["reason"] for record in caplog.records}
    assert said == {
        "broken_family 1.0": "RuntimeError: no kernel",
        "odd_family 1.0": "TypeError: odd_family:FAMILIES has a int, not a Family",
    }


def test_a_package_does_not_replace_a_family_of_ours(packages: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = "from penstock.gpu_node.model.architecture.spec import Family\nFAMILIES = Family('LlamaForCausalLM', None)"
    bring(packages, "other_llama", source)
    with caplog.at_level(logging.WARNING):
        assert families()["LlamaForCausalLM"].origin == ""
    (record,) = caplog.records
    assert record.__dict__["package"] == "other_llama 1.0"
