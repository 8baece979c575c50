"""Convert the config and tokenizer of a GGUF file to Hugging Face's format. The result is cached.

Settings that transformers ignores, RoPE scaling included, are read under the names of config.json.
"""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint import generation_config
from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile, GgufHeader
from penstock.gpu_node.model.checkpoint.gguf_hybrid import describe_hybrid
from penstock.gpu_node.model.checkpoint.gguf_llama import describe_llama
from penstock.gpu_node.model.checkpoint.gguf_tokenizer import (
    BYTE_LEVEL,
    TOKENIZER_LISTS,
    chat_template_of,
    check_special_ids,
    end_ids,
    follow_llama_cpp,
    name_of,
    named_templates,
)
from penstock.gpu_node.model.protocol import WrittenTokenizer
from penstock.runtime.reading import is_of_content, reading, reason_of

LLAMA_LIKE = {
    "gpt-oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""Architectures that transformers does not read from GGUF, with their names in config.json. Its fields are Llama's.

Of gpt-oss it takes the lengths of the metadata's names for the numbers of RoPE scaling.
"""
_TEMPLATES = "additional_chat_templates"
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that only writing raises."""


def describe_gguf(file: GgufFile, folder: Path, progress: Callable[[str, float], None]) -> WrittenTokenizer | None:
    """Write the config and tokenizer of a file to a new `folder`. Return the tokenizer, if it is in memory.

    Raises ConfigError for an unreadable file and a full disk.
    """
    progress("convert", 0.0)
    try:
        with reading(file.path, str(file.path)):
            # Parse the header first, because its errors for truncated files are clearer than those of transformers.
            header = file.header_with(TOKENIZER_LISTS)
            _check_tokenizer(file.path, header)
            tokenizer = describe_hybrid(header, folder) or describe_llama(header, folder)
            if tokenizer is None:
                describe_by_transformers(file.path, header, folder, progress)
            _add_generation(header, folder / generation_config.FILE)
            for name, template in named_templates(header.metadata).items():
                (folder / _TEMPLATES).mkdir(exist_ok=True)
                (folder / _TEMPLATES / f"{name}.jinja").write_text(template, encoding="utf-8")
    except ConfigError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _WRITING:
            raise ConfigError(f"cannot write to {folder}: {error.__cause__}") from error
        raise
    progress("convert", 1.0)
    return tokenizer


def _check_tokenizer(path: Path, header: GgufHeader) -> None:
    """Refuse a tokenizer whose way to split words is not known, which would give other tokens without a word."""
    merges = header.metadata.get(TOKENIZER_LISTS[2]) or ()
    try:
        wrong = next((merge for merge in merges if not isinstance(merge, str) or merge.count(" ") != 1), None)
        if wrong is not None:
            raise ConfigError(f"tokenizer.ggml.merges has {str(wrong)[:200]!r}; a merge is two tokens and a space")
        check_special_ids(header.metadata)
        if header.metadata.get("tokenizer.ggml.model") == BYTE_LEVEL:
            name_of(header.metadata)
    except ConfigError as error:
        raise ConfigError(f"cannot read {path}: {error.message}") from error


def _add_generation(header: GgufHeader, path: Path) -> None:
    """Add the sampling that the file recommends, and all tokens that end an answer, to its generation_config.json."""
    found = {name: header.metadata[key] for key, name in generation_config.FROM_GGUF.items() if key in header.metadata}
    given = json.loads(path.read_text(encoding="utf-8"))
    ends = {"eos_token_id": end_ids(header.metadata)}
    path.write_text(json.dumps(given | found | ends, indent=2) + "\n", encoding="utf-8")


def describe_by_transformers(
    gguf: Path, header: GgufHeader, folder: Path, progress: Callable[[str, float], None]
) -> None:
    """Write the config and tokenizer of any GGUF file that transformers reads."""
    try:
        import torch
    except ModuleNotFoundError as error:
        architecture = header.metadata.get("general.architecture")
        problem = (
            f"{gguf}: a GGUF file of the architecture {architecture} needs torch: pip install 'penstock-llm[node]'"
        )
        raise ConfigError(problem) from error
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    auto_tokenizer: Any = AutoTokenizer
    auto_model: Any = AutoModelForCausalLM
    with _readable(gguf, str(header.metadata.get("general.architecture"))) as file:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        progress("convert", 0.5)
        try:
            tokenizer = auto_tokenizer.from_pretrained(file.parent, gguf_file=file.name)
        except BaseException as error:
            if not is_of_content(error):
                raise
            said = f"tokenizer.ggml.tokens, its types and its merges make no tokenizer: {reason_of(error)}"
            raise ConfigError(said) from error
    # Without weights: only the class name and the end-of-sequence ids are needed.
    with torch.device("meta"):
        model = auto_model.from_config(config, dtype=torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = chat_template_of(header.metadata, tokenizer.chat_template)
    tokenizer.save_pretrained(folder)
    follow_llama_cpp(tokenizer.backend_tokenizer, header.metadata).save(str(folder / "tokenizer.json"))
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


_SETTINGS = {
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention.sliding_window": "sliding_window",
    },
    "gemma3": {"attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping"},
    "gpt-oss": {
        "attention.key_length": "head_dim",
        "attention.sliding_window": "sliding_window",
        "expert_feed_forward_length": "intermediate_size",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    "granite": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    "phi3": {
        "attention.sliding_window": "sliding_window",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    },
    "qwen3moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
    },
}
"""Architecture → its metadata keys, without the architecture's name, and the fields of config.json for them."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""These models scale scores by hidden_size / num_attention_heads instead of head_dim, which the file does not say."""


def with_gguf_settings(config: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """Return the config with the settings of a GGUF file. Raises ConfigError for an unreadable file."""
    header = file.header
    try:
        config = config | _settings(header, config)
    except (KeyError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"cannot read {file.path}: its metadata is incomplete or invalid: {error!r}") from error
    scaling = rope_scaling(file)
    rope = config.get("rope_parameters") or {}
    if not scaling:
        return config
    if "full_attention" in rope:
        return config | {"rope_parameters": rope | {"full_attention": rope["full_attention"] | scaling}}
    return config | {"rope_parameters": rope | scaling}


def _settings(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    metadata = header.metadata
    name = str(metadata.get("general.architecture"))
    keys = {f"{name}.{key}": field for key, field in _SETTINGS.get(name, {}).items()}
    found = {field: metadata[key] for key, field in keys.items() if key in metadata}
    for field in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
        if found.get(field) == 0:
            found[field] = None  # llama.cpp takes 0 for no limit.
    if config.get("num_hidden_layers") == _LAYERS_OF_27B.get(name, 0):
        found["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    elif name in _LAYERS_OF_27B:
        found["query_pre_attn_scalar"] = config["head_dim"]
    if name == "phi3":
        found |= _partial_rotation(metadata, config)
    if name in LLAMA_LIKE:
        found["architectures"] = [LLAMA_LIKE[name]]
        embedding = header.tensors.get("token_embd.weight")
        if embedding is not None:
            found["vocab_size"] = embedding.shape[0]
    if name == "gpt-oss":
        found["attention_bias"] = True
    # Like llama.cpp. transformers reads the tensors of the first part alone.
    found["tie_word_embeddings"] = "output.weight" not in header.tensors
    if name == "llama" and metadata.get("llama.expert_count"):
        found["architectures"] = ["MixtralForCausalLM"]
        found["num_local_experts"] = metadata["llama.expert_count"]
        found["num_experts_per_tok"] = metadata.get("llama.expert_used_count")
    return found


def _partial_rotation(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the share of a head's channels that RoPE rotates."""
    dim = metadata.get("phi3.rope.dimension_count")
    if not isinstance(dim, int):
        return {}
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    return {"rope_parameters": {**rope, "partial_rotary_factor": dim / head_dim}}


_FACTORS = "rope_freqs.weight"
"""The tensor of divisors, one per frequency, that the converter writes for Llama 3.1 and later."""
_LONG_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""The tensors of divisors that the converter writes for LongRoPE."""
_ROPE_FIELDS = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""GGUF's field names (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and those of config.json."""


def rope_scaling(file: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json's `rope_parameters` that scale RoPE; empty if it is not scaled."""
    header = file.header

    def values(name: str) -> list[float] | None:
        tensor = header.tensors.get(name)
        if tensor is None or tensor.ggml_type != "f32":
            return None
        numbers: list[float] = file.bytes_of(tensor).view(np.float32).tolist()
        return numbers

    factors, long_factors = values(_FACTORS), {field: values(name) for field, name in _LONG_FACTORS.items()}
    if factors is not None:
        return {"rope_type": "factors", "factors": factors}
    if None not in long_factors.values():
        magnitude = header.metadata.get(f"{header.metadata.get('general.architecture')}.rope.scaling.attn_factor")
        return long_factors | {"rope_type": "longrope", "attention_factor": magnitude}
    prefix = f"{header.metadata.get('general.architecture')}.rope.scaling."
    keys = {prefix + theirs: ours for theirs, ours in _ROPE_FIELDS.items()}
    found = {ours: header.metadata[key] for key, ours in keys.items() if key in header.metadata}
    if header.metadata.get("general.architecture") == "gpt-oss":
        found["truncate"] = False  # All models of this family were trained so, and the file does not say it.
    return found if found.get("rope_type", "none") != "none" else {}
