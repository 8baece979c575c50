"""Convert the config and tokenizer of a GGUF file to Hugging Face's format. The result is cached."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint import generation_config
from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile
from penstock.gpu_node.model.checkpoint.gguf_header import GgufHeader
from penstock.gpu_node.model.checkpoint.gguf_llama import TOKENIZER_LISTS, describe_llama
from penstock.gpu_node.model.protocol import WrittenTokenizer

LLAMA_LIKE = {"granite": "GraniteForCausalLM", "olmo2": "Olmo2ForCausalLM", "smollm3": "SmolLM3ForCausalLM"}
"""Architectures that transformers does not read from GGUF, with their names in config.json. Its fields are Llama's."""
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that only writing raises."""


def describe_gguf(file: GgufFile, folder: Path, progress: Callable[[str, float], None]) -> WrittenTokenizer | None:
    """Write the config and tokenizer of a file to a new `folder`. Return the tokenizer, if it is in memory.

    Raises ConfigError for an unreadable file and a full disk.
    """
    progress("convert", 0.0)
    try:
        # Parse the header first, because its errors for truncated files are clearer than those of transformers.
        header = file.header_with(TOKENIZER_LISTS)
        tokenizer = describe_llama(header, folder)
        if tokenizer is None:
            describe_by_transformers(file.path, header, folder, progress)
        _add_sampling(header, folder / generation_config.FILE)
    except ConfigError:
        raise
    except OSError as error:
        what = f"cannot write to {folder}" if error.errno in _WRITING else f"cannot read {file.path}"
        raise ConfigError(f"{what}: {error}") from error
    except Exception as error:
        # A third-party parser may raise any exception for a file of unknown origin.
        raise ConfigError(f"cannot read {file.path}: {error}") from error
    progress("convert", 1.0)
    return tokenizer


def _add_sampling(header: GgufHeader, path: Path) -> None:
    """Add the sampling that the file recommends to its generation_config.json."""
    found = {name: header.metadata[key] for key, name in generation_config.FROM_GGUF.items() if key in header.metadata}
    if found:
        given = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(given | found, indent=2) + "\n", encoding="utf-8")


def describe_by_transformers(
    gguf: Path, header: GgufHeader, folder: Path, progress: Callable[[str, float], None]
) -> None:
    """Write the config and tokenizer of any GGUF file that transformers reads."""
    try:
        import torch
    except ModuleNotFoundError as error:
        architecture = header.metadata.get("general.architecture")
        problem = f"{gguf}: a GGUF file of the architecture {architecture} needs torch: pip install 'penstock[node]'"
        raise ConfigError(problem) from error
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    auto_tokenizer: Any = AutoTokenizer
    auto_model: Any = AutoModelForCausalLM
    with _readable(gguf, str(header.metadata.get("general.architecture"))) as file:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        progress("convert", 0.5)
        tokenizer = auto_tokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # Without weights: only the class name and the end-of-sequence ids are needed.
    with torch.device("meta"):
        model = auto_model.from_config(config, dtype=torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


@contextmanager
def _readable(gguf: Path, architecture: str) -> Iterator[Path]:
    """Provide a file whose config and tokenizer transformers reads: `gguf` itself, or its metadata as a Llama's."""
    if architecture not in LLAMA_LIKE:
        yield gguf
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / gguf.name
        _write_as_llama(GGUFReader(gguf), architecture, path)
        yield path


def _write_as_llama(reader: Any, architecture: str, path: Path) -> None:
    """Write the metadata of a GGUF file to a file without tensors, with the keys of the architecture `llama`."""
    writer: Any = GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if name == "general.architecture" or name.startswith("GGUF."):
            continue
        key = f"llama.{name.removeprefix(f'{architecture}.')}" if name.startswith(f"{architecture}.") else name
        is_list = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=field.types[-1] if is_list else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
