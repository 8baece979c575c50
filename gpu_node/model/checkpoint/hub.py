"""Download models from the Hugging Face hub: only the files that are needed, and only of supported models."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Self

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.families import family_of
from penstock.gpu_node.model.checkpoint.json_object import read_object
from penstock.gpu_node.model.checkpoint.weight_files import INDEX, SINGLE, first_parts, gguf_names, index_of, is_gguf
from penstock.runtime.proxies import proxy_error
from penstock.runtime.trusted_folders import trusted_folder

log = logging.getLogger("penstock.node")

_DESCRIPTIONS = ["*.json", "*.jinja", "*.model", "tokenizer*", "merges.txt", "vocab.txt"]
_FOLDERS = ["*/*"]
_TEMPLATES = "additional_chat_templates/*.jinja"
"""Chat templates for tools and documents, in their own folder."""
_MODULES = ("*_Pooling/config.json", "*_Dense/config.json", "*_Dense/model.safetensors")
"""The modules of sentence-transformers beside the model: each has a folder of its own."""
POOLING_FILE = "1_Pooling/config.json"
"""How a model in sentence-transformers' format embeds a text."""
EMBEDDER_FILES = ("modules.json", "config_sentence_transformers.json")
"""Further files of that format."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_BYTES_WRITTEN = "huggingface_hub.snapshot_download"
"""The name of huggingface_hub's progress bar for the bytes of all files that are written to disk."""

Progress = Callable[[float], None]


_QUANTIZATION = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A parsed model name: `ORG/MODEL`, `ORG/MODEL@REVISION` or `ORG/MODEL:FILE.gguf@REVISION`."""

    repo_id: str
    file: str | None
    """The GGUF file to use from the repository, or the quantization that its name has, as llama.cpp writes it."""
    revision: str | None
    """A branch, a tag or a commit; None: the hub's default branch."""

    @classmethod
    def parse(cls, name: str, revision: str | None) -> Self:
        """Parse a model name; `revision` applies to names without one.

        Raises ConfigError for two different revisions, and for what is neither a .gguf file nor a quantization.
        """
        whole, _, named = name.partition("@")
        repo_id, _, file = whole.partition(":")
        if named and revision not in (None, named):
            raise ConfigError(f"model {name} contradicts revision {revision}: give only one revision")
        if file and not is_gguf(file) and _QUANTIZATION.fullmatch(file) is None:
            kinds = f"a .gguf file of {repo_id} or a quantization, such as Q4_K_M"
            raise ConfigError(f"model {name}: the part after the colon must be {kinds}, not {file}")
        return cls(repo_id, file or None, named or revision or None)

    def __str__(self) -> str:
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"


def family_in(folder: Path) -> None:
    """Raise ConfigError unless the config.json of a folder is that of a family."""
    family_of(read_object(folder / "config.json"))


def downloaded(model: HubModel, progress: Progress, check: Callable[[Path], None] = family_in) -> Path:
    """Download a model and return the folder of its files, or the GGUF file that it names.

    Files in the hub's cache are not downloaded again. Raises ConfigError for a model that the hub does not have, does
    not give access to, or that is not supported. check: called with the folder, before weights are downloaded.
    """
    with _as_config_errors(model):
        progress(0.0)
        if model.file is not None:
            return _gguf_file(model, model.file, progress)
        folder = _snapshot(model, _DESCRIPTIONS, ignored=_FOLDERS)
        if (folder / "config.json").is_file():
            # An unsupported architecture is refused before gigabytes are downloaded.
            check(folder)
        sizes = _sizes(model, folder)
        wanted = _weight_names(model, folder, sizes)
        missing = sum(sizes[name] for name in wanted if name in sizes and not (folder / name).is_file())
        _snapshot(model, [*wanted, *_MODULES, _TEMPLATES], commit=folder.name, bar_class=_bar_class(missing, progress))
        progress(1.0)
        return folder


def _snapshot(
    model: HubModel,
    names: list[str],
    *,
    ignored: list[str] | None = None,
    commit: str | None = None,
    bar_class: Any = None,
) -> Path:
    from huggingface_hub import snapshot_download

    if logging.getLogger().handlers:
        # huggingface_hub also writes its events to stderr, in its own format.
        logging.getLogger("huggingface_hub").handlers.clear()
    revision = commit or model.revision
    bar_class = bar_class or _bar_class(0, lambda _: None)
    kinds = {"allow_patterns": names, "ignore_patterns": ignored, "tqdm_class": bar_class}
    folder = Path(snapshot_download(model.repo_id, revision=revision, **kinds))
    if commit is None:
        _warn_of_other_writers(folder)
    return folder


def _warn_of_other_writers(folder: Path) -> None:
    """Log a warning if another user may replace the files of the hub's cache, such as a chat template."""
    try:
        trusted_folder(folder, remedy="set HF_HOME to a folder of your own")
    except OSError as error:
        log.warning("another user may write the model's files", extra={"folder": str(folder), "reason": str(error)})


def _gguf_file(model: HubModel, file: str, progress: Progress) -> Path:
    # A tiny file first, only to learn the commit and its list of files.
    folder = _snapshot(model, [".gitattributes"])
    sizes = _sizes(model, folder)
    file = file if is_gguf(file) else _file_of(model, file, sizes)
    parts = [(Path(file).parent / name).as_posix() for name in gguf_names(Path(file).name)]
    if lacking := [part for part in parts if sizes and part not in sizes]:
        raise ConfigError(f"model {model} has no file {lacking[0]}; it has {_listed(sizes)}")
    missing = sum(sizes.get(part, 0) for part in parts if not (folder / part).is_file())
    _snapshot(model, parts, commit=folder.name, bar_class=_bar_class(missing, progress))
    progress(1.0)
    return folder / file


def _file_of(model: HubModel, quantization: str, names: Iterable[str]) -> str:
    """Return the GGUF file whose name has this quantization. Raises ConfigError if none has it, or several."""
    has_it = re.compile(rf"(?<![a-z0-9]){re.escape(quantization)}(?![a-z0-9_])", re.IGNORECASE)
    found = [name for name in first_parts(names) if has_it.search(name)]
    if len(found) != 1:
        files = ", ".join(found) or _listed(list(names))
        many = "several files" if found else "no file"
        raise ConfigError(f"model {model} has {many} of {quantization}; name one as {model.repo_id}:FILE: {files}")
    return found[0]


def _sizes(model: HubModel, folder: Path) -> dict[str, int]:
    """Return the size of each file of the commit in `folder`, by name.

    Returns an empty dict if an older huggingface_hub downloaded the commit and did not cache its file list.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(model.repo_id, revision=folder.name)
    except CachedRepoTreeNotFoundError:
        return {}
    return {file.path: file.size for file in tree}


def _weight_names(model: HubModel, folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Return the names of a model's safetensors files, without duplicates. Raises ConfigError if there are none."""
    names = sorted(sizes) or sorted(path.name for path in folder.iterdir())
    found = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if SINGLE in found:
        return [SINGLE]
    if (index := folder / INDEX).is_file():
        return sorted(set(index_of(index).values()))
    if found:
        return found
    if any(is_gguf(name) for name in names):
        files = _listed(names)
        raise ConfigError(f"model {model} has no .safetensors; name one of its files as {model.repo_id}:FILE: {files}")
    if any(name.endswith(_PICKLES) for name in names):
        raise ConfigError(f"model {model} has only pickled weights, which can run code; use .safetensors or .gguf")
    raise ConfigError(f"model {model} has no .safetensors weights")


def _listed(names: Mapping[str, int] | list[str]) -> str:
    """Return the GGUF files among the names, for an error."""
    return ", ".join(first_parts(names)) or "no .gguf"


def _bar_class(num_bytes: int, progress: Progress) -> type[Any]:
    """Return a subclass of huggingface_hub's progress bar that also reports downloaded bytes to `progress`.

    num_bytes: the bytes to download in total. Bars show on terminals only, so that they fill no logs.
    """
    from huggingface_hub.utils.tqdm import tqdm

    bar: type[Any] = tqdm

    class ReportingBar(bar):  # type: ignore[misc]
        _written = 0.0
        _lock_of_written = Lock()

        def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
            self._counts = name == _BYTES_WRITTEN
            kwargs["disable"] = kwargs.get("disable") or not sys.stderr.isatty()
            super().__init__(*args, name=name, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and num_bytes and n:
                with self._lock_of_written:
                    self._written += n
                    progress(max(0.0, min(1.0, self._written / num_bytes)))
            shown: bool | None = super().update(n)
            return shown

    return ReportingBar


@contextmanager
def _as_config_errors(model: HubModel) -> Iterator[None]:
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
            f"the hub has no model {model.repo_id}, or it is private; private models need HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"model {model.repo_id} has no revision {model.revision}") from error
    except errors.HFValidationError as error:
        raise ConfigError(f"{model.repo_id} is not a folder, a .gguf file or the id of a model on the hub") from error
    except (errors.HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        if constants.HF_HUB_OFFLINE:
            state = f"not complete in the hub's cache, {constants.HF_HUB_CACHE}"
            raise ConfigError(f"model {model} is {state}, and HF_HUB_OFFLINE forbids downloading it") from error
        reason = re.sub(r"\s+", " ", str(error))[:300].rstrip(". ")
        raise ConfigError(f"cannot download model {model} from {constants.ENDPOINT}: {reason}") from error
    except (ImportError, ValueError) as error:
        raise proxy_error(error) or error from None
