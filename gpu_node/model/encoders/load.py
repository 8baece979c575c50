"""Find and load an encoder: its config is checked, its module is transformers' own, and no tensor may be missing."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.encoder_families import encoder_spec_of
from penstock.gpu_node.model.architecture.encoders import encoder_class, num_positions, row_kind_of
from penstock.gpu_node.model.architecture.families.gemma import embedding_gemma_spec
from penstock.gpu_node.model.architecture.gguf_layout import as_in_gguf
from penstock.gpu_node.model.architecture.limits import check_all_numbers, check_positions
from penstock.gpu_node.model.architecture.transformers_class import architecture_of
from penstock.gpu_node.model.checkpoint.description import Description, revision_of
from penstock.gpu_node.model.checkpoint.json_object import read_object
from penstock.gpu_node.model.checkpoint.source import ModelSource, Progress
from penstock.gpu_node.model.checkpoint.stored_tensors import Checkpoint
from penstock.gpu_node.model.encoders.files import SentenceFiles, read_sentence_files, score_activation_of
from penstock.gpu_node.model.encoders.heads import EmbeddingHead, LabelHead
from penstock.gpu_node.model.encoders.label_layers import label_layers_of
from penstock.gpu_node.model.encoders.native import load_native_encoder
from penstock.gpu_node.model.encoders.runner import EncoderRunner
from penstock.gpu_node.model.native.shapes import NativeUnavailableError
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.text_protocol import LoadedEncoder, RowKind, TextRunner
from penstock.gpu_node.model.torch_common.memory_errors import translate_out_of_memory
from penstock.gpu_node.model.torch_cpu.load import TORCH_DTYPES, choose_dtype, set_threads
from penstock.gpu_node.model.transformers_runner.description import as_refusals, on_meta, with_floats
from penstock.gpu_node.model.transformers_runner.load import check_settings
from penstock.gpu_node.model.transformers_runner.weights import stored_module
from penstock.runtime.reading import reason_of

log = logging.getLogger(__package__)

_RUNNERS = "auto", "cpu", "native", "torch", "transformers"
_NATIVE = "auto", "cpu", "native"
"""Those that try the native kernels first."""
_OF_DECODERS = {"gemma3_text": embedding_gemma_spec}
"""Encoders by `model_type` whose layers are those of a decoder's family."""
_DEFAULT_TOKENS = 512
"""Most tokens of a text where no file of the model says it."""
_MAX_TOLD = 1 << 22
"""A larger `model_max_length` of a tokenizer stands for no limit."""
_POOLERS = ("pooler.",)
"""Tensors that only make another vector of the hidden states than the one that is used here."""
_MAX_LABELS = 65_536


@translate_out_of_memory()
def load_encoder(source: ModelSource, options: RunnerOptions, progress: Progress) -> LoadedEncoder:
    """Load the encoder of a folder. Raises ConfigError that names the file, field, tensor or setting."""
    _check_options(source, options)
    folder, path = source.folder, source.folder / "config.json"
    config = {name: value for name, value in read_object(path).items() if value is not None}
    check_all_numbers(config, path)
    architecture, row_kind, module_class = architecture_of(config), row_kind_of(config), encoder_class(config)
    if config.get("quantization_config"):
        raise ConfigError(f"{folder}: encoders with quantized weights are not supported")
    progress("load", 0.0)
    with as_refusals(path, architecture):
        made = module_class.config_class.from_dict(with_floats(config))
    files = read_sentence_files(folder, int(made.hidden_size))
    head, max_tokens = _head_of(files, row_kind, made, config, source), _max_tokens(config, files, source, options)
    described = _Encoder(source, architecture, row_kind, module_class, made, _stored_dtype(config), max_tokens)
    runner, arithmetic, vocab_size = _runner_of(described, options, progress)
    revision = hashlib.blake2b(files.digest, key=revision_of(source, arithmetic).encode(), digest_size=16)
    facts = {"architecture": architecture, "arithmetic": arithmetic}
    log.info("encoder", extra={**facts, "max_tokens": max_tokens, "rows": row_kind, "width": head.width})
    progress("load", 1.0)
    return LoadedEncoder(
        runner=runner,
        head=head,
        folder=folder,
        vocab_size=vocab_size,
        max_tokens=max_tokens,
        lowercases=files.lowercases,
        prompts=files.prompts,
        default_prompt=files.default_prompt,
        similarity=files.similarity,
        architecture=architecture,
        arithmetic=arithmetic,
        revision=revision.hexdigest(),
    )


def _check_options(source: ModelSource, options: RunnerOptions) -> None:
    """Refuse settings that encoders do not have, by their names."""
    if options.runner not in _RUNNERS:
        known = ", ".join(_RUNNERS)
        raise ConfigError(f"runner {options.runner} does not compute encoders; use {known}", param="runner")
    # The native kernels take other quantizations than transformers' modules.
    check_settings(options.model_copy(update={"quantization": "none"}) if options.runner in _NATIVE else options)
    if source.is_dummy:
        raise ConfigError("load_format dummy is not supported for encoders", param="load_format")


def _stored_dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


@dataclass(frozen=True, slots=True)
class _Encoder:
    """What the files of an encoder say, before its weights are read."""

    source: ModelSource
    architecture: str
    row_kind: RowKind
    module_class: Any
    config: Any
    """Of transformers' class, with all defaults."""
    stored_dtype: str
    max_tokens: int


def _runner_of(encoder: _Encoder, options: RunnerOptions, progress: Progress) -> tuple[TextRunner, str, int]:
    """Return the runner of an encoder, the name of its arithmetic, and the tokens that it knows.

    The native kernels compute it if they can, and else its module of transformers, unless it is in a GGUF file. Raises
    ConfigError.
    """
    reason = f"runner {options.runner} reads no GGUF file"
    if options.runner in _NATIVE:
        try:
            return _native_runner(encoder, options, progress)
        except (NativeUnavailableError, ConfigError) as error:
            reason = str(error)
            if options.runner == "native":
                remedy = error.remedy if isinstance(error, NativeUnavailableError) else "--runner cpu"
                raise ConfigError(f"the native runner is unavailable: {reason} ({remedy})", param="runner") from error
        if encoder.source.gguf is None:
            log.info("the native kernels do not compute this encoder", extra={"reason": reason})
            check_settings(options)
    if encoder.source.gguf is not None:
        raise ConfigError(f"{encoder.source.gguf}: only the native kernels compute encoders of GGUF files: {reason}")
    return _module_runner(encoder, options)


def _native_runner(encoder: _Encoder, options: RunnerOptions, progress: Progress) -> tuple[TextRunner, str, int]:
    checkpoint = Checkpoint.open(encoder.source)
    config = {**encoder.config.to_dict(), "hidden_size": int(encoder.config.hidden_size)}
    spec = encoder_spec_of(config, checkpoint.names, _OF_DECODERS)
    if encoder.source.gguf is not None:
        spec = as_in_gguf(spec)
    labels = label_layers_of(config, encoder.row_kind, int(encoder.config.num_labels), checkpoint)
    described = Description(encoder.source, encoder.architecture, spec, encoder.stored_dtype, encoder.max_tokens)
    described.check_sizes()
    runner, arithmetic = load_native_encoder(described, options, labels, progress)
    if options.dtype == "auto" and encoder.stored_dtype == "float32":
        log.info("the weights are float32 and are rounded: dtype float32 keeps them, but is slower")
    return runner, arithmetic, spec.vocab_size


def _module_runner(encoder: _Encoder, options: RunnerOptions) -> tuple[TextRunner, str, int]:
    set_threads(options)
    name = choose_dtype(options.dtype, encoder.stored_dtype)
    module = _module_of(
        encoder.module_class, encoder.config, encoder.source, encoder.architecture, TORCH_DTYPES[name], encoder.row_kind
    )
    runner, vocab_size = EncoderRunner(module, encoder.row_kind), int(module.get_input_embeddings().weight.shape[0])
    try:
        runner.require_agreement(vocab_size)
    except MemoryError:
        raise
    except Exception as error:
        reason = error.message if isinstance(error, ConfigError) else reason_of(error)
        raise ConfigError(f"{encoder.source.folder}: {encoder.architecture} is not supported: {reason}") from error
    log.info("module of transformers", extra={"dtype": name, "num_threads": torch.get_num_threads()})
    return runner, f"transformers-{transformers.__version__}-{name}", vocab_size


def _module_of(
    module_class: Any, config: Any, source: ModelSource, architecture: str, dtype: torch.dtype, row_kind: RowKind
) -> Any:
    """Return transformers' module of a config with the weights of a folder. Raises ConfigError."""
    with as_refusals(source.folder / "config.json", architecture):
        num_weights = sum(one.numel() for one in on_meta(module_class, config).parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return stored_module(
            module_class,
            config,
            source,
            architecture=architecture,
            num_weights=num_weights,
            dtype=dtype,
            unused=_POOLERS if row_kind == "vectors" else (),
        )


def _head_of(
    files: SentenceFiles, row_kind: RowKind, made: Any, config: Mapping[str, Any], source: ModelSource
) -> EmbeddingHead | LabelHead:
    if row_kind == "vectors":
        width = int(made.hidden_size) * len(files.poolings)
        width = len(files.layers[-1].weight) if files.layers else width
        return EmbeddingHead(files.poolings, files.layers, files.normalizes, width)
    count = int(made.num_labels)
    if not 1 <= count <= _MAX_LABELS:
        raise ConfigError(f"{source.folder}/config.json: a model with {count} labels is not supported")
    named: Mapping[Any, Any] = made.id2label or {}
    labels = tuple(str(named.get(at, f"LABEL_{at}"))[:256] for at in range(count))
    is_multi = made.problem_type == "multi_label_classification"
    return LabelHead(labels, is_multi, score_activation_of(config, source.folder / "config.json"), row_kind)


def _max_tokens(config: Mapping[str, Any], files: SentenceFiles, source: ModelSource, options: RunnerOptions) -> int:
    """Return the most tokens of a text. Raises ConfigError for a larger `max_model_len`."""
    positions = num_positions(config)
    check_positions(positions or 1, 1, has_own=False)
    told = files.max_tokens
    path = source.folder / "tokenizer_config.json"
    if told is None and path.is_file():
        length = read_object(path).get("model_max_length")
        told = int(length) if isinstance(length, int | float) and 1 <= length <= _MAX_TOLD else None
    known = [one for one in (positions, told) if one is not None]
    limit = min(known, default=_DEFAULT_TOKENS)
    wanted = options.max_model_len
    if wanted is None:
        return limit
    most = positions or wanted
    if wanted > most:
        raise ConfigError(f"max_model_len {wanted} is more than the model's own limit of {most} tokens")
    return wanted
