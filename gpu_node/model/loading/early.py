"""What is known of a model before anything of it is downloaded, converted or loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.gpu_node.model.checkpoint.dummy import dummy_folder
from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile
from penstock.gpu_node.model.checkpoint.gguf_tokenizer import named_templates
from penstock.gpu_node.model.checkpoint.hub import HubModel
from penstock.gpu_node.model.checkpoint.source import check_gguf, local_path
from penstock.gpu_node.model.checkpoint.stored_tensors import conventions_of
from penstock.gpu_node.model.checkpoint.weight_files import gguf_of
from penstock.gpu_node.model.loading.load import find_model
from penstock.gpu_node.model.options import RunnerOptions

_FILES_WITH_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


def check_model(model: str, options: RunnerOptions, revision: str | None = None) -> str | None:
    """Check a model by its name, its config.json and the headers of its files.

    Raises ConfigError. Returns the texts that contain its chat templates, or None if they are not on this machine.
    """
    if options.load_format == "dummy":
        dummy_folder(model)
        return None
    if (path := local_path(model)) is None:
        HubModel.parse(model, revision)
        return None
    if not path.is_dir():
        check_gguf(path)
    gguf = gguf_of(path) if path.is_dir() else path
    if gguf is None:
        folder = find_model(model, options, lambda stage, fraction: None, revision=revision).source.folder
        return "\n".join(_texts_in(folder))
    header = GgufFile(gguf).header
    conventions_of(header)
    templates = (header.metadata.get("tokenizer.chat_template"), *named_templates(header.metadata).values())
    return "\n".join(text for text in templates if isinstance(text, str))


def _texts_in(folder: Path) -> Iterator[str]:
    for path in (*(folder / name for name in _FILES_WITH_TEMPLATES), *folder.glob("additional_chat_templates/*.jinja")):
        if path.is_file():
            yield path.read_text(encoding="utf-8", errors="replace")
