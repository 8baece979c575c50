"""Load a model by name into a runner that is ready for steps. Imports torch only for runners that use it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.encoders import EncoderFoundError, is_encoder, row_kind_of
from penstock.gpu_node.model.architecture.families import family_of, needs_transformers, text_config_of
from penstock.gpu_node.model.architecture.gguf_layout import as_in_gguf
from penstock.gpu_node.model.architecture.limits import CONFIG_LIMITS, checked_config
from penstock.gpu_node.model.architecture.rank_part import Parallel, check_cuts, check_one_rank
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.architecture.transformers_class import architecture_of
from penstock.gpu_node.model.checkpoint.block_repacking import BLOCK
from penstock.gpu_node.model.checkpoint.description import Description, revision_of, stamps_of_source
from penstock.gpu_node.model.checkpoint.dummy import dummy_folder
from penstock.gpu_node.model.checkpoint.gguf_conversion import with_gguf_settings
from penstock.gpu_node.model.checkpoint.hub import EMBEDDER_FILES, POOLING_FILE
from penstock.gpu_node.model.checkpoint.json_object import read_object
from penstock.gpu_node.model.checkpoint.methods import reader_of, with_modelopt_file
from penstock.gpu_node.model.checkpoint.source import ModelSource, OpenModel, Progress, open_model
from penstock.gpu_node.model.encoders.decoder_files import decoder_pooling_of, decoder_prompts_of
from penstock.gpu_node.model.lora.library import AdapterLibrary
from penstock.gpu_node.model.native.load import load_native
from penstock.gpu_node.model.native.shapes import NativeUnavailableError
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.protocol import AdapterSource, LoadedModel, ModelRunner, WrittenTokenizer
from penstock.kernels.cpu.probe import available_bytes
from penstock.runtime.cache_folders import cache_folder, private_folder, trusted_cache
from penstock.runtime.reading import reading

if TYPE_CHECKING:
    from penstock.gpu_node.model.torch_common.ranked_runner import PartRunner
    from penstock.gpu_node.model.torch_common.ranks import RankLinks
    from penstock.gpu_node.model.transformers_runner.description import ModuleDescription

log = logging.getLogger(__package__)

_LEAST_BYTES = {"int4": 0.5, "int8": 1, "fp8": 1}
"""Bytes of a number by `quantization`; by default it has 16 bits or more."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that was found and checked, but not loaded."""

    name: str
    config: Mapping[str, Any]
    description: Description | ModuleDescription
    """By a family of ours, or of a module of transformers."""
    stamps: list[tuple[int, ...]]
    """Stamps of its files (device, inode, size, mtime); they change when a file is replaced."""
    tokenizer: WrittenTokenizer | None
    """Its tokenizer, if this process has just converted it. The loaded model does not keep it."""

    @property
    def source(self) -> ModelSource:
        """Its files."""
        return self.description.source

    @property
    def described(self) -> Description:
        """Its description by a family. Raises ConfigError for a model that a module of transformers computes."""
        if not isinstance(self.description, Description):
            raise ConfigError(f"{self.name}: runner transformers computes {self.description.architecture} in one rank")
        return self.description

    @property
    def vocab_size(self) -> int:
        """The tokens that it gives logits for."""
        return self.description.vocab_size


def load_model(model: str, options: RunnerOptions, progress: Progress, *, revision: str | None = None) -> LoadedModel:
    """Find, check and load a model, as `find_model` and `load_found` do."""
    return load_found(find_model(model, options, progress, revision=revision), options, progress)


def find_model(model: str, options: RunnerOptions, progress: Progress, *, revision: str | None = None) -> FoundModel:
    """Find and check a model; `revision` selects a revision on the Hugging Face hub.

    Raises EncoderFoundError for a model that generates no text, and ConfigError that names the missing file or the
    unsupported setting.
    """
    with reading(Path(model), model):
        opened = _open(model, options, progress, revision)
    source, gguf = opened.source, opened.gguf
    described_in = source.folder / "config.json" if gguf is None else gguf.path
    with reading(described_in, model):
        stamps = stamps_of_source(source)
        config = with_modelopt_file(read_object(source.folder / "config.json"), source.folder)
        generates_no_text = is_encoder(config)
    if generates_no_text:
        raise EncoderFoundError(model, architecture_of(config), source)
    with reading(described_in, model):
        if gguf is not None:
            config = with_gguf_settings(config, gguf)
            if any(part.stamp not in stamps for part in gguf.parts):
                raise _replaced(model)
        config = text_config_of(config)
        described = _describe(opened, config, options)
        described.check_sizes()
    return FoundModel(model, config, described, stamps, opened.tokenizer)


def load_found(
    found: FoundModel, options: RunnerOptions, progress: Progress, links: RankLinks | None = None
) -> LoadedModel:
    """Load a model that was found with the same options; with `links`, the part of one rank.

    Raises ConfigError that names the missing file, the unsupported setting, or the memory that cannot be allocated.
    Raises it also if a file was replaced since it was found: the revision is read from the files, and must be that of
    the loaded weights.
    """
    source, described = found.source, found.description
    if source.is_dummy and not options.remote_ranks:
        _check_room(described.num_weights, options)
    try:
        runner, arithmetic, adapters = _loaded(found, options, progress, links)
    except MemoryError as error:
        states = "" if options.state_cache_gib is None else f", and state_cache_gib {options.state_cache_gib:g}"
        raise ConfigError(f"no memory for the model with {_cache_of(options)}{states}: {error}") from error
    if source.is_dummy:
        arithmetic += "-dummy"
    if isinstance(described, Description) and described.origin:
        # Another version of the package may compute something else.
        arithmetic += f" by {described.origin}"
    with reading(source.folder / "generation_config.json", found.name):
        prompts, default_prompt = decoder_prompts_of(source.folder)
        loaded = LoadedModel(
            runner=runner,
            folder=source.folder,
            vocab_size=described.vocab_size,
            hidden_size=described.hidden_size,
            max_model_len=described.max_model_len,
            eos_token_ids=_eos_token_ids(source.folder, found.config),
            adapters=adapters,
            pooling=decoder_pooling_of(source.folder),
            prompts=prompts,
            default_prompt=default_prompt,
            is_embedder=_is_embedder(found),
            arithmetic=arithmetic,
            revision=revision_of(source, arithmetic),
            head_rows=described.head_rows if isinstance(described, Description) else None,
        )
    if stamps_of_source(source) != found.stamps:
        raise _replaced(found.name)
    return loaded


def _check_room(num_weights: int, options: RunnerOptions) -> None:
    """Refuse random weights that the host's memory cannot hold: no file bounds them. Raises ConfigError."""
    if options.wants_gpu or (options.runner == "auto" and _has_gpu()):
        return
    least = int(num_weights * _LEAST_BYTES.get(options.quantization, 2))
    if 0 < (free := available_bytes()) < least:
        needs, has = (f"{number / 2**30:,.1f} GiB" for number in (least, free))
        raise ConfigError(f"load_format dummy: the weights take at least {needs}, but {has} of memory are free")


def _replaced(name: str) -> ConfigError:
    return ConfigError(f"{name}: its files were replaced while they were loaded; start again")


def _open(model: str, options: RunnerOptions, progress: Progress, revision: str | None) -> OpenModel:
    if options.load_format != "dummy":
        return open_model(model, progress, revision, check=partial(_check_before_download, options=options))
    if revision is not None:
        raise ConfigError(f"revision {revision} is only for models of the hub; load_format dummy downloads nothing")
    log.warning("weights are random (load_format dummy)", extra={"model": model})
    return OpenModel(ModelSource(dummy_folder(model), is_dummy=True))


def _loaded(
    found: FoundModel, options: RunnerOptions, progress: Progress, links: RankLinks | None
) -> tuple[ModelRunner, str, AdapterSource]:
    """Return the runner of a model, the name of its arithmetic, and its adapters."""
    if not isinstance(found.description, Description):
        from penstock.gpu_node.model.transformers_runner.load import NoAdapters, load_module

        return *load_module(found.description, options, progress), NoAdapters()
    described = found.description
    adapters = AdapterLibrary(described.spec, options.lora, options.lora_dir, options.max_lora_rank)
    return *_load(described, options, progress, links), adapters


def _check_before_download(folder: Path, options: RunnerOptions) -> None:
    """Raise ConfigError if the runner cannot compute the model of a folder's config.json."""
    config = read_object(folder / "config.json")
    if is_encoder(config):
        row_kind_of(config)
        return
    if _takes_module(config, options):
        _describe(OpenModel(ModelSource(folder)), config, options)
    else:
        family_of(config)


def _load(
    described: Description, options: RunnerOptions, progress: Progress, links: RankLinks | None
) -> tuple[ModelRunner, str]:
    """Return the runner and the name of its arithmetic (`LoadedModel.arithmetic`)."""
    parallel = Parallel(options.tensor_parallel_size, options.pipeline_parallel_size)
    check_one_rank(described.spec, parallel)
    if options.remote_ranks and (parallel.num_ranks == 1 or not (options.wants_gpu or options.runner == "torch")):
        needs = "runner torch or gpu, and tensor_parallel_size or pipeline_parallel_size"
        raise ConfigError(f"remote_ranks {options.remote_ranks} needs {needs}", param="remote_ranks")
    if parallel.pipeline > 1 and options.runner != "torch":
        setting = "pipeline_parallel_size"
        raise ConfigError(f"{setting} {parallel.pipeline} needs runner torch", param=setting)
    if parallel.tensor > 1 and options.runner in ("auto", "cpu", "native"):
        return _load_native_ranks(described, options, progress)
    if options.wants_gpu or (options.runner == "auto" and _has_gpu()):
        loaded = _load_gpu(described, options, progress, links)
        if loaded is not None:
            return loaded
    if options.runner != "torch" and (native := _load_native_or_none(described, options, progress)) is not None:
        return native
    with _torch_for("runner torch"):
        from penstock.gpu_node.model.torch_cpu.load import fixed_options, load_torch

    check_cuts(described.spec, parallel, "torch")
    if links is None and parallel.num_ranks > 1:
        return _load_ranks(
            described, fixed_options(described, options), partial(load_torch, described, progress=progress)
        )
    return load_torch(described, options, progress, *([] if links is None else [links]))


def _why_no_gpu(described: Description, options: RunnerOptions) -> str:
    """Return why a GPU does not compute the model; empty if it does."""
    if missing := ", ".join(special_features(described.spec)):
        return f"{described.architecture} is not supported on a GPU, which has no {missing}"
    untried = {
        "recurrent layers": bool(described.spec.recurrences),
        "experts": any(mlp.experts is not None for mlp in described.spec.mlps),
        "attention sinks": any(one.sinks is not None for one in described.spec.attentions),
        "heads of more than 256 channels": any(one.head_dim > 256 for one in described.spec.attentions),
    }
    names = " and ".join(name for name, is_present in untried.items() if is_present)
    if names and not options.wants_gpu:
        return f"kernels of {names} were only tested in Triton's interpreter; --runner gpu takes the GPU"
    return ""


def free_on_gpu(described: Description, options: RunnerOptions) -> int | None:
    """Return what a model may still take of its share of a GPU; None if no GPU computes it."""
    is_wanted = options.wants_gpu or (options.runner == "auto" and _has_gpu())
    if not is_wanted or _why_no_gpu(described, options):
        return None
    _choose_triton_cache()
    with _torch_for("runner gpu"):
        from penstock.gpu_node.model.gpu.load import free_bytes
    return free_bytes(options)


def _choose_triton_cache() -> None:
    """Let Triton keep its compiled code in our cache: like our kernels, it is code that a node runs."""
    if "TRITON_CACHE_DIR" not in os.environ:
        try:
            folder = trusted_cache("triton")
        except OSError as error:
            folder = private_folder(cache_folder() / "triton", error)
        os.environ["TRITON_CACHE_DIR"] = str(folder)


def _load_gpu(
    described: Description, options: RunnerOptions, progress: Progress, links: RankLinks | None
) -> tuple[ModelRunner, str] | None:
    """Return the runner of a GPU and the name of its arithmetic; None if the CPU must compute the model."""
    if reason := _why_no_gpu(described, options):
        if options.wants_gpu:
            raise ConfigError(f"runner gpu: {reason}; use --runner cpu")
        log.warning("the CPU computes, not the GPU", extra={"reason": reason})
        return None
    _choose_triton_cache()
    with _torch_for("runner gpu"):
        from penstock.gpu_node.model.gpu.load import load_gpu

    parallel, group = Parallel(options.tensor_parallel_size), BLOCK if options.quantization == "int4" else 1
    check_cuts(described.spec, parallel, "gpu", column_group=group)
    if links is None and parallel.num_ranks > 1:
        return _load_ranks(described, options, partial(load_gpu, described, progress=progress))
    return load_gpu(described, options, progress, *([] if links is None else [links]))


def _load_native_or_none(
    described: Description, options: RunnerOptions, progress: Progress
) -> tuple[ModelRunner, str] | None:
    """Load a model for the native kernels. Return None if torch must compute it."""
    try:
        return load_native(described, options, progress)
    except NativeUnavailableError as error:
        if options.runner == "native":
            raise ConfigError(f"runner native: {error}; remedy: {error.remedy}") from error
        if find_spec("torch") is None:
            remedy = f"{error.remedy}; or install torch, which is slower: pip install 'penstock-llm[node]'"
            raise ConfigError(f"no runner for this model: {error}; remedy: {remedy}") from error
        facts = {"reason": str(error), "remedy": error.remedy}
        log.warning("torch computes, several times slower than the native kernels", extra=facts)
        return None


@contextmanager
def _torch_for(runner: str) -> Iterator[None]:
    """Name what to install if an import in the block finds no torch."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        extra = "penstock-llm[gpu]" if runner == "runner gpu" else "penstock-llm[node]"
        raise ConfigError(f"{runner} needs {error.name}, which is not installed: pip install '{extra}'") from error


def _load_native_ranks(described: Description, options: RunnerOptions, progress: Progress) -> tuple[ModelRunner, str]:
    """Load a model that several ranks of the native runner compute together."""
    setting = f"tensor_parallel_size {options.tensor_parallel_size}"
    try:
        return load_native(described, options, progress)
    except NativeUnavailableError as error:
        remedy = f"{error.remedy}, or use runner torch, which is slower"
        raise ConfigError(f"{setting} needs the native runner: {error}; remedy: {remedy}") from error


def _load_ranks(described: Description, options: RunnerOptions, load: Callable[..., Any]) -> tuple[ModelRunner, str]:
    """Load a model that several ranks of the torch or the GPU runner compute together. load: of a rank's part."""
    from penstock.gpu_node.model.loading.rank_host import RankProcesses
    from penstock.gpu_node.model.torch_common.ranked_runner import RankedRunner

    runner = RankedRunner(RankProcesses(described, options, lambda own, links: load(options=own, links=links)))
    return runner, runner.arithmetic


def load_part(found: FoundModel, options: RunnerOptions, links: RankLinks) -> tuple[PartRunner, str, AdapterSource]:
    """Load the part of a rank other than rank 0. Return its runner, the name of its arithmetic, and the adapters."""
    described = found.described
    adapters = AdapterLibrary(described.spec, options.lora, options.lora_dir, options.max_lora_rank)
    runner, arithmetic = _load(described, options, lambda stage, fraction: None, links)
    return cast("PartRunner", runner), arithmetic, adapters


def special_features(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the features of a spec that the GPU runner does not support."""
    later = [kind for kind in spec.kinds if kind.post_attention_norm is not None or kind.post_mlp_norm is not None]
    present = {
        "experts beside attention": any(
            kind.parallel_residual and kind.mlp is not None and kind.mlp.experts is not None for kind in spec.kinds
        ),
        "layers that read the keys of others": any(one.source is not None for one in spec.attentions),
        "embeddings of tokens for each layer": spec.token_inputs is not None,
        "factors of MLPs without gates, or with clamped ones": any(
            mlp.output_factor != 1 and (not mlp.is_gated or mlp.clamped_gate is not None) for mlp in spec.mlps
        ),
        "models without attention": not spec.attentions,
        "norms after a parallel attention and MLP": any(kind.parallel_residual for kind in later),
        "layer norms after attention and MLP": bool(later) and spec.norm == "layer",
    }
    return tuple(name for name, is_present in present.items() if is_present)


def _cache_of(options: RunnerOptions) -> str:
    kv = "the default KV cache" if options.kv_cache_gib is None else f"kv_cache_gib {options.kv_cache_gib}"
    swap = "the default swap space" if options.swap_space_gib is None else f"swap_space_gib {options.swap_space_gib}"
    if options.wanted_blocks is not None:
        kv = f"{options.wanted_blocks} KV blocks"
    if options.num_swap_blocks is not None:
        swap = f"num_swap_blocks {options.num_swap_blocks}"
    return f"{kv} and {swap}"


def _has_gpu() -> bool:
    """Return whether torch sees a supported CUDA device.

    Without an NVIDIA driver the answer is no, and torch is not imported. Without torch it is no, too.
    """
    if not Path("/dev/nvidiactl").exists() or find_spec("torch") is None:
        return False
    import torch

    from penstock.gpu_node.model.gpu.device import MIN_COMPUTE_CAPABILITY

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= MIN_COMPUTE_CAPABILITY


def _describe(opened: OpenModel, config: Mapping[str, Any], options: RunnerOptions) -> Description | ModuleDescription:
    if options.runner == "transformers" or (opened.gguf is None and _takes_module(config, options)):
        return _describe_module(opened, config, options)
    source, family = opened.source, family_of(config)
    config = checked_config(config, source.folder / "config.json")
    try:
        spec = family.spec_of(config)
    except ConfigError as error:
        raise ConfigError(f"{source.folder}/config.json: {error.message}") from error
    except KeyError as error:
        raise ConfigError(f"{source.folder}/config.json has no {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{source.folder}/config.json is invalid: {error}") from error
    if source.gguf is not None:
        spec = as_in_gguf(spec)
    if options.max_model_len is not None and options.max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len {options.max_model_len} is more than the model's own limit of {spec.max_position} tokens"
        )
    max_model_len = options.max_model_len or spec.max_position
    return Description(
        source=source,
        architecture=family.architecture,
        spec=spec.within(max_model_len),
        stored_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        max_model_len=max_model_len,
        read_scaled=None if source.is_dummy else reader_of(config),
        gguf=opened.gguf,
        origin=family.origin,
    )


def _takes_module(config: Mapping[str, Any], options: RunnerOptions) -> bool:
    """Return whether transformers' own class computes a model: by the setting `runner`, or because it has no family."""
    return options.runner == "transformers" or (options.runner in ("auto", "cpu") and needs_transformers(config))


def _describe_module(opened: OpenModel, config: Mapping[str, Any], options: RunnerOptions) -> ModuleDescription:
    """Describe a model that transformers' own class computes."""
    if opened.gguf is not None:
        raise ConfigError("runner transformers reads safetensors, not GGUF files", param="runner")
    with _torch_for("runner transformers"):
        from penstock.gpu_node.model.transformers_runner.description import LACKS, describe_module
        from penstock.gpu_node.model.transformers_runner.load import check_settings

    check_settings(options)
    without_nulls = {name: value for name, value in config.items() if value is not None}
    described = describe_module(opened.source, without_nulls, options.max_model_len)
    if options.runner != "transformers":
        facts = {"reason": f"no family of ours is {described.architecture}", "lacks": LACKS}
        log.warning("transformers computes, slower than the runners of families", extra=facts)
    return described


def _is_embedder(found: FoundModel) -> bool:
    """Return whether the model's files say that it embeds: files of sentence-transformers, or no head for tokens."""
    folder = found.source.folder
    gguf = found.description.gguf if isinstance(found.description, Description) else None
    if gguf is not None:
        metadata = gguf.header.metadata
        return bool(metadata.get(f"{metadata.get('general.architecture')}.pooling_type"))
    named = str((found.config.get("architectures") or [""])[0])
    has_no_head = named.endswith("Model") and not named.endswith("LMHeadModel")
    return has_no_head or any((folder / name).is_file() for name in (POOLING_FILE, *EMBEDDER_FILES))


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Return the end-of-sequence token ids from generation_config.json, or else from config.json.

    Raises ConfigError for an eos_token_id that is neither an id nor a list of ids.
    """
    path = folder / "generation_config.json"
    generation = read_object(path) if path.is_file() else {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    if eos is None:
        return frozenset()
    token_ids = eos if isinstance(eos, list) else [eos]
    limit = CONFIG_LIMITS["eos_token_id"]
    if not all(limit.allows(token_id) for token_id in token_ids):
        raise ConfigError(f"{path}: eos_token_id is {str(eos)[:100]!r} but must be {limit}, or a list of these")
    return frozenset(token_ids)
