"""Models of the hub, loaded through huggingface_hub from a substitute of its HTTP API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from fakes.processes.hub_server import GATED, TOKEN, HubServer

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.hub import HubModel, downloaded
from penstock.gpu_node.model.checkpoint.source import resolve_model

MODEL = "org/tiny"
WEIGHTS = "model.safetensors"


def _ask_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_ENDPOINT does, which huggingface_hub reads when it is imported."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub that this process asks, and a cache with nothing in it."""
    with HubServer().running() as server:
        _ask_at(server.url, monkeypatch)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "")
        # Between a cut and the next try, huggingface_hub waits a second.
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _seconds: None)
        yield server


@pytest.fixture
def change(model_copy: Path) -> Callable[..., Path]:
    """Return a copy of the tiny model's folder with changes of its config, and some additional files."""

    def change(*files: str, **config: Any) -> Path:
        path = model_copy / "config.json"
        if config:
            path.write_text(json.dumps(json.loads(path.read_text()) | config))
        for name in files:
            (model_copy / name).parent.mkdir(exist_ok=True)
            (model_copy / name).write_bytes(b"something")
        return model_copy

    return change


def _get(name: str, revision: str | None = None) -> Path:
    return downloaded(HubModel.parse(name, revision), lambda fraction: None)


def _same_files(folder: Path, other: Path) -> bool:
    return all((folder / path.name).read_bytes() == path.read_bytes() for path in other.iterdir())


def test_only_needed_files_are_downloaded(hub: HubServer, change: Callable[..., Path], tiny_model: Path) -> None:
    others = ("pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx", "original/params.json", "README.md")
    hub.add(MODEL, change(*others))
    fractions: list[float] = []
    folder = downloaded(HubModel.parse(MODEL, None), fractions.append)
    assert _same_files(folder, tiny_model)
    assert not {path.name for path in folder.rglob("*")} & {Path(name).name for name in others}
    assert fractions == sorted(fractions) and (fractions[0], fractions[-1]) == (0.0, 1.0) and len(fractions) > 2
    hub.requests.clear()
    assert _get(MODEL) == folder
    assert hub.fetched() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a folder of another user")
def test_a_hub_cache_of_another_user_is_warned_about(
    hub: HubServer, change: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add(MODEL, change())
    folder = _get(MODEL)
    assert caplog.records == []
    os.chown(folder.parent, 54321, -1)
    assert _get(MODEL) == folder
    (record,) = caplog.records
    assert record.getMessage() == "another user may write the model's files"
    assert "set HF_HOME" in vars(record)["reason"]


def test_shards_are_those_of_the_index(hub: HubServer, change: Callable[..., Path]) -> None:
    folder = change("model-1-of-2.safetensors", "model-2-of-2.safetensors", "other.safetensors")
    (folder / WEIGHTS).unlink()
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.add(MODEL, folder)
    assert sorted(path.name for path in _get(MODEL).glob("*.safetensors")) == sorted(index["weight_map"].values())


def test_a_stale_index_beside_the_single_file_does_not_count(hub: HubServer, change: Callable[..., Path]) -> None:
    folder = change("old-1-of-1.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "old-1-of-1.safetensors"}}')
    hub.add(MODEL, folder)
    assert [path.name for path in _get(MODEL).glob("*.safetensors")] == [WEIGHTS]


def test_chat_templates_in_their_own_folder_are_downloaded(hub: HubServer, change: Callable[..., Path]) -> None:
    hub.add(MODEL, change("additional_chat_templates/tool_use.jinja"))
    assert (_get(MODEL) / "additional_chat_templates/tool_use.jinja").is_file()


def test_interrupted_download_continues(hub: HubServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 500)
    hub.add(MODEL, tiny_model)
    hub.cuts[WEIGHTS] = 1000
    assert _same_files(_get(MODEL), tiny_model)
    ranges = [wanted for _, path, wanted in hub.requests if path.startswith("/cdn/") and path.endswith(WEIGHTS)]
    assert ranges[0] == "" and ranges[-1] == "bytes=1000-"


def test_downloaded_files_are_not_fetched_again_after_a_failure(
    hub: HubServer, tiny_model: Path, change: Callable[..., Path]
) -> None:
    source = change()
    weights = (source / WEIGHTS).read_bytes()
    (source / WEIGHTS).unlink()
    hub.add(MODEL, source)
    with pytest.raises(ConfigError, match=r"org/tiny has no \.safetensors"):
        _get(MODEL)
    (source / WEIGHTS).write_bytes(weights)
    hub.repos.clear()
    hub.add(MODEL, source, "fixed")
    hub.requests.clear()
    assert _same_files(_get(f"{MODEL}@fixed"), tiny_model)
    assert hub.fetched() == [WEIGHTS]


@pytest.mark.parametrize("name", [f"{MODEL}@v2", MODEL])
def test_revisions_are_branches_tags_and_commits(
    hub: HubServer, tiny_model: Path, change: Callable[..., Path], name: str
) -> None:
    hub.add(MODEL, tiny_model)
    commit = hub.add(MODEL, change(rope_theta=5.0), "v2")
    folder = _get(name, None if "@" in name else "v2")
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 5.0
    assert _get(f"{MODEL}@{commit}") == folder != _get(MODEL)
    with pytest.raises(ConfigError, match="model org/tiny has no revision v3"):
        _get(f"{MODEL}@v3")
    with pytest.raises(ConfigError, match="model org/tiny@v2 contradicts revision v3"):
        _get(f"{MODEL}@v2", "v3")


def test_gguf_file_is_named_after_a_colon(hub: HubServer, change: Callable[..., Path]) -> None:
    folder = change("m.q4_0.gguf", "m.q8_0.gguf")
    (folder / WEIGHTS).unlink()
    hub.add(MODEL, folder)
    path = _get(f"{MODEL}:m.q4_0.gguf@main")
    assert path.read_bytes() == b"something" and [file.name for file in path.parent.iterdir()] == [path.name]
    with pytest.raises(ConfigError, match=r"no file m\.q2\.gguf; it has m\.q4_0\.gguf, m\.q8_0\.gguf"):
        _get(f"{MODEL}:m.q2.gguf")
    with pytest.raises(ConfigError, match=r"name one of its files as org/tiny:FILE: m\.q4_0\.gguf"):
        _get(MODEL)
    assert _get(f"{MODEL}:Q4_0") == path
    with pytest.raises(ConfigError, match=r"no file of Q4_K_M; name one as org/tiny:FILE: m\.q4_0\.gguf, m"):
        _get(f"{MODEL}:Q4_K_M")
    with pytest.raises(ConfigError, match=r"must be a \.gguf file .* or a quantization"):
        _get(f"{MODEL}:model.bin")


@pytest.mark.parametrize("number", [1, 2])
def test_all_parts_of_a_split_gguf_file_are_downloaded(
    number: int, hub: HubServer, change: Callable[..., Path]
) -> None:
    parts = [f"q8/m-0000{i}-of-00002.gguf" for i in (1, 2)]
    folder = change(*parts, "m.gguf", "m-IQ8.gguf", "m-q8_0_4_4.gguf")
    (folder / WEIGHTS).unlink()
    hub.add(MODEL, folder)
    path = _get(f"{MODEL}:{parts[number - 1]}")
    assert sorted(file.name for file in path.parent.iterdir()) == [Path(part).name for part in parts]
    assert _get(f"{MODEL}:Q8").name == Path(parts[0]).name
    with pytest.raises(ConfigError, match=r"as org/tiny:FILE: m-IQ8.*, m\.gguf, q8/m-00001-of-00002\.gguf$"):
        _get(MODEL)
    with pytest.raises(ConfigError, match=r"org/tiny has no file q8/m-00001-of-00003\.gguf"):
        _get(f"{MODEL}:q8/m-00003-of-00003.gguf")


def test_token_gives_access_to_gated_models(hub: HubServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(GATED, tiny_model)
    with pytest.raises(ConfigError, match=f"org/gated is gated: accept its terms at {hub.url}/org/gated .*HF_TOKEN"):
        _get(GATED)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert _same_files(_get(GATED), tiny_model)
    assert hub.tokens == {"", TOKEN}


def test_unknown_models_are_named(hub: HubServer) -> None:
    with pytest.raises(ConfigError, match="the hub has no model org/none"):
        _get("org/none")
    with pytest.raises(ConfigError, match="not a/valid/id is not a folder"):
        _get("not a/valid/id")


def test_unsupported_model_is_refused_before_its_weights_are_downloaded(
    hub: HubServer, change: Callable[..., Path]
) -> None:
    hub.add(MODEL, change(architectures=["OwnForCausalLM"], auto_map={"AutoModelForCausalLM": "own.Own"}))
    with pytest.raises(ConfigError, match=r"OwnForCausalLM is not supported.*\(trust_remote_code\) is never run"):
        _get(MODEL)
    assert WEIGHTS not in hub.fetched()


def test_pickles_are_refused_by_name(hub: HubServer, change: Callable[..., Path]) -> None:
    folder = change("pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    hub.add(MODEL, folder)
    with pytest.raises(ConfigError, match="org/tiny has only pickled weights, which can run code"):
        _get(MODEL)
    assert "pytorch_model.bin" not in hub.fetched()


def test_offline_mode_uses_only_the_cache(hub: HubServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(MODEL, tiny_model)
    folder = _get(MODEL)
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert _get(MODEL) == folder
    (folder / WEIGHTS).unlink()
    for name in (MODEL, "org/other"):
        with pytest.raises(ConfigError, match=f"{name} is not complete in the hub's cache.*HF_HUB_OFFLINE forbids"):
            _get(name)
    assert hub.requests == []


def test_a_hub_that_cannot_be_reached_is_named(
    hub: HubServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(MODEL, tiny_model)
    folder = _get(MODEL)
    _ask_at("http://127.0.0.1:9", monkeypatch)
    assert _get(MODEL) == folder
    with pytest.raises(ConfigError, match=r"cannot download model org/other from http://127\.0\.0\.1:9: .*refused"):
        _get("org/other")


def test_a_revision_is_for_models_of_the_hub(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="revision main is only for models of the hub"):
        resolve_model(str(tiny_model), lambda stage, fraction: None, "main")


_RESOLVES = """
import sys
from penstock.gpu_node.model.checkpoint.source import resolve_model
stages = []
found = resolve_model(sys.argv[1], lambda stage, fraction: stages.append(stage), "main")
print(found.folder, *dict.fromkeys(stages))
"""


def test_environment_sets_the_address_of_the_hub_and_the_token(tiny_model: Path, tmp_path: Path) -> None:
    with HubServer().running() as server:
        server.add(GATED, tiny_model)
        env = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", _RESOLVES, GATED]
        said = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=120, check=True)
    folder, *stages = said.stdout.split()
    assert Path(folder).is_relative_to(tmp_path) and _same_files(Path(folder), tiny_model)
    assert stages == ["download"]
    assert server.tokens == {TOKEN}
