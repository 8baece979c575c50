"""What is known of a model before anything of it is downloaded, converted or loaded."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.encoders import EncoderFoundError, row_kind_of
from penstock.gpu_node.model.checkpoint.dummy import dummy_folder
from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile
from penstock.gpu_node.model.checkpoint.gguf_names import GgufNames
from penstock.gpu_node.model.checkpoint.hub import HubModel
from penstock.gpu_node.model.checkpoint.json_object import read_object
from penstock.gpu_node.model.checkpoint.source import check_gguf, local_path
from penstock.gpu_node.model.checkpoint.weight_files import gguf_of
from penstock.gpu_node.model.loading.load import find_model
from penstock.gpu_node.model.options import RunnerOptions


def check_model(model: str, options: RunnerOptions, revision: str | None = None) -> None:
    """Check a model by its name, its config.json and the headers of its files.

    Raises ConfigError.
    """
    if options.load_format == "dummy":
        dummy_folder(model)
        return
    if (path := local_path(model)) is None:
        HubModel.parse(model, revision)
        return
    if not path.is_dir():
        check_gguf(path)
    gguf = gguf_of(path) if path.is_dir() else path
    if gguf is not None:
        GgufNames(GgufFile(gguf).header)
        return
    try:
        find_model(model, options, lambda stage, fraction: None, revision=revision)
    except EncoderFoundError as found:
        row_kind_of(read_object(found.source.folder / "config.json"))
