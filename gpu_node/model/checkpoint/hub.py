"""Models of the Hugging Face hub: only the files that are needed, and only of models that can be run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Self

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.families import family_of
from penstock.gpu_node.model.checkpoint.json_object import read_object
from penstock.gpu_node.model.checkpoint.shards import shards_of

_DESCRIPTIONS = ["*.json", "*.jinja", "*.model", "tokenizer*", "merges.txt", "vocab.txt"]
_FOLDERS = ["*/*"]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_BYTES_WRITTEN = "huggingface_hub.snapshot_download"
"""What huggingface_hub calls the bar of bytes that are on disk, those of all files together."""

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class HubModel:
    """What a name like `ORG/MODEL`, `ORG/MODEL@REVISION` or `ORG/MODEL:FILE.gguf@REVISION` says."""

    repo_id: str
    file: str | None
    """A GGUF file of it."""
    revision: str | None
    """A branch, a tag or a commit; None: the hub's default."""

    @classmethod
    def parse(cls, name: str, revision: str | None) -> Self:
        """`revision` is for names without one. Raises ConfigError for two, and for a file of another kind."""
        whole, _, named = name.partition("@")
        repo_id, _, file = whole.partition(":")
        if named and revision not in (None, named):
            raise ConfigError(f"model {name} names a revision, and revision {revision} another one")
        if file and not file.endswith(".gguf"):
            raise ConfigError(f"model {name}: behind the colon stands a .gguf file of {repo_id}, not {file}")
        return cls(repo_id, file or None, named or revision or None)

    def __str__(self) -> str:
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"


def downloaded(model: HubModel, progress: Progress) -> Path:
    """The folder with a model's files, or the GGUF file that it names.

    What is in the hub's cache is not fetched again. Raises ConfigError for a model that the hub does not have or give,
    or that cannot be run.
    """
    with _errors_in_plain_words(model):
        progress(0.0)
        if model.file is not None:
            return _gguf_file(model, model.file, progress)
        folder = _snapshot(model, _DESCRIPTIONS, ignored=_FOLDERS)
        _check_config(model, folder)
        sizes = _sizes(model, folder)
        wanted = _weight_names(model, folder, sizes)
        missing = sum(sizes[name] for name in wanted if name in sizes and not (folder / name).is_file())
        _snapshot(model, wanted, commit=folder.name, heard=_bar_class(missing, progress))
        progress(1.0)
        return folder


def _snapshot(
    model: HubModel, names: list[str], *, ignored: list[str] | None = None, commit: str | None = None, heard: Any = None
) -> Path:
    from huggingface_hub import snapshot_download

    revision = commit or model.revision
    kinds = {"allow_patterns": names, "ignore_patterns": ignored, "tqdm_class": heard}
    return Path(snapshot_download(model.repo_id, revision=revision, **kinds))


def _gguf_file(model: HubModel, file: str, progress: Progress) -> Path:
    # Nothing of it yet: only which commit is meant and what that holds.
    folder = _snapshot(model, [".gitattributes"])
    sizes = _sizes(model, folder)
    if sizes and file not in sizes:
        raise ConfigError(f"model {model} has no file {file}; it has {_listed(sizes, '.gguf')}")
    missing = 0 if (folder / file).is_file() else sizes.get(file, 0)
    _snapshot(model, [file], commit=folder.name, heard=_bar_class(missing, progress))
    progress(1.0)
    return folder / file


def _check_config(model: HubModel, folder: Path) -> None:
    """Before gigabytes are fetched: whether the architecture is one of ours."""
    path = folder / "config.json"
    if path.is_file():
        family_of(read_object(path))


def _sizes(model: HubModel, folder: Path) -> dict[str, int]:
    """Of all files of the commit in `folder`, by name; nothing where they were fetched before the hub's cache knew."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(model.repo_id, revision=folder.name)
    except CachedRepoTreeNotFoundError:
        return {}
    return {file.path: file.size for file in tree}


def _weight_names(model: HubModel, folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """The safetensors of a model in one format only. Raises ConfigError where there are none."""
    shards = shards_of(folder)
    if shards is not None:
        return shards
    names = sorted(sizes) or sorted(path.name for path in folder.iterdir())
    found = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if found:
        return ["model.safetensors"] if "model.safetensors" in found else found
    if any(name.endswith(".gguf") for name in names):
        files = _listed(names, ".gguf")
        raise ConfigError(f"model {model} has no .safetensors; name one of its files as {model.repo_id}:FILE: {files}")
    if any(name.endswith(_PICKLES) for name in names):
        raise ConfigError(f"model {model} has only pickled weights, which can run code; want .safetensors or .gguf")
    raise ConfigError(f"model {model} has no .safetensors weights")


def _listed(names: Mapping[str, int] | list[str], ending: str) -> str:
    return ", ".join(sorted(name for name in names if name.endswith(ending))) or f"no {ending}"


def _bar_class(num_bytes: int, progress: Progress) -> type[Any]:
    """huggingface_hub's bar, which shows itself where there is a terminal, and tells `progress` of bytes."""
    from huggingface_hub.utils.tqdm import tqdm

    bar: type[Any] = tqdm

    class Heard(bar):  # type: ignore[misc]
        _written = 0.0
        _lock_of_written = Lock()

        def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
            self._counts = name == _BYTES_WRITTEN
            super().__init__(*args, name=name, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and num_bytes and n:
                with self._lock_of_written:
                    self._written += n
                    progress(max(0.0, min(1.0, self._written / num_bytes)))
            shown: bool | None = super().update(n)
            return shown

    return Heard


@contextmanager
def _errors_in_plain_words(model: HubModel) -> Iterator[None]:
    import httpx2
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{model.repo_id}"
        raise ConfigError(
            f"model {model.repo_id} is gated: accept its terms at {page} and set HF_TOKEN to a token of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"the hub has no model {model.repo_id}, or does not show it to you; private ones want HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"model {model.repo_id} has no revision {model.revision}") from error
    except errors.HFValidationError as error:
        raise ConfigError(f"{model.repo_id} is no folder, no .gguf file and no id of a model of the hub") from error
    except (errors.HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        if constants.HF_HUB_OFFLINE:
            place = f"not whole in the hub's cache, {constants.HF_HUB_CACHE}"
            raise ConfigError(f"model {model} is {place}, and HF_HUB_OFFLINE forbids to fetch it") from error
        said = re.sub(r"\s+", " ", str(error))[:300]
        raise ConfigError(f"cannot get model {model} from {constants.ENDPOINT}: {said}") from error
