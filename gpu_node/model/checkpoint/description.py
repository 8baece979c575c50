"""A model before its weights are read: the description from which every runner is built, and its revision."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.spec import ModelSpec, state_bytes
from penstock.gpu_node.model.checkpoint.conversion_cache import samples
from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile
from penstock.gpu_node.model.checkpoint.json_object import read_object
from penstock.gpu_node.model.checkpoint.mapped_file import stamp_of
from penstock.gpu_node.model.checkpoint.methods import MODELOPT_FILE
from penstock.gpu_node.model.checkpoint.source import ModelSource
from penstock.gpu_node.model.checkpoint.stored_kinds import ReadScaled, StoredTensor
from penstock.gpu_node.model.checkpoint.stored_tensors import Checkpoint, weight_files
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors
from penstock.gpu_node.model.checkpoint.window_blocks import WindowedTokens, divide_blocks
from penstock.gpu_node.model.options import DEFAULT_KV_CACHE_GIB, RunnerOptions
from penstock.gpu_node.model.protocol import CacheSizes
from penstock.kernels.cpu.probe import available_bytes

SWAP_SHARE = 0.25
"""Share of the free memory that the default of the swap space may take."""


@dataclass(frozen=True, slots=True)
class Description:
    """A model's files, and the spec and options read from them."""

    source: ModelSource
    architecture: str
    """The architecture that config.json names."""
    spec: ModelSpec
    stored_dtype: str
    """The dtype of the checkpoint as config.json states it."""
    max_model_len: int
    read_scaled: ReadScaled | None = None
    """Reads the quantized matrices of a quantized checkpoint; None for other checkpoints."""
    gguf: GgufFile | None = None
    """The source's GGUF file, if it is open."""
    origin: str = ""
    """The package and version that describes the architecture (`Family.origin`)."""

    @property
    def vocab_size(self) -> int:
        """The tokens that the model gives logits for."""
        return self.spec.vocab_size

    @property
    def hidden_size(self) -> int:
        """Channels of the hidden state."""
        return self.spec.hidden_size

    @property
    def num_weights(self) -> int:
        """Numbers in all matrices."""
        return self.spec.num_weights

    def open_checkpoint(self) -> Checkpoint:
        """Map the weight files. Raises ConfigError for files that are missing, truncated or invalid."""
        return Checkpoint.open(self.source, self.read_scaled, self.gguf)

    def head_rows(self, token_ids: Sequence[int]) -> NDArray[np.float32] | None:
        """Return the head's rows for tokens, scaled as its logits are. None if logits are no products of these."""
        head = DecoderTensors(self.open_checkpoint(), self.spec).head()
        if self.spec.logit_cap is not None or not isinstance(head, StoredTensor):
            return None
        rows = head.take_rows(np.array(token_ids, np.int32), len(token_ids), self.hidden_size).to_float32()
        return (rows * np.float32(self.spec.logit_scale)).astype(np.float32)

    def check_sizes(self) -> None:
        """Refuse sizes of the config that the tensors do not have, before anything is made of these sizes.

        Raises ConfigError that names the tensor. Of a quantized checkpoint, which is read to know its matrices' shapes,
        only the vocabulary, the width and the number of layers are compared.
        """
        if self.source.is_dummy:
            return
        tensors, last = DecoderTensors(self.open_checkpoint(), self.spec), self.spec.num_layers - 1
        tensors.embedding()
        tensors.attention_norm(last)
        tensors.post_attention_norm(last)
        if self.read_scaled is None:
            tensors.layer(last)


def cache_sizes(
    max_model_len: int, options: RunnerOptions, token_bytes: int, windowed: WindowedTokens | None = None
) -> CacheSizes:
    """Return the number of KV blocks of a CPU runner; `token_bytes` is the size of one token over all layers.

    windowed: the part of layers with windows, where the runner can keep them apart.

    Raises ConfigError if kv_cache_gib does not hold one block, and for options that only the GPU runner supports.
    """
    if options.gpu_memory_utilization is not None:
        raise ConfigError("gpu_memory_utilization needs a GPU; on the CPU, kv_cache_gib sizes the KV cache")
    if options.cpu_offload_gib:
        raise ConfigError("cpu_offload_gib needs a GPU; on the CPU, all weights are in host memory already")
    block_bytes, kv_cache_gib = token_bytes * options.block_size, options.kv_cache_gib or DEFAULT_KV_CACHE_GIB
    if windowed is not None:
        whole, num_bytes = token_bytes - windowed.token_bytes, int(kv_cache_gib * 2**30)
        divided = divide_blocks(windowed, max_model_len, options, whole_token_bytes=whole, num_bytes=num_bytes)
        if divided is not None:
            block_bytes = whole * options.block_size
            num_swapped = num_host_blocks(options, block_bytes, divided.num_whole)
            return CacheSizes(divided.num_whole, num_swapped, block_bytes, divided.windows)
    num_device_blocks = options.wanted_blocks
    if num_device_blocks is None:
        affordable = int(kv_cache_gib * 2**30) // max(1, block_bytes)
        useful = options.max_num_seqs * -(-max_model_len // options.block_size)
        num_device_blocks = min(affordable, useful)
    if num_device_blocks < 1:
        raise ConfigError(f"kv_cache_gib {kv_cache_gib} does not hold one block of {options.block_size} tokens")
    num_swapped = num_host_blocks(options, block_bytes, num_device_blocks)
    return CacheSizes(num_device_blocks, num_swapped, block_bytes)


def state_slots_of(described: Description, options: RunnerOptions) -> int:
    """Return the number of state slots; 0 for a model without recurrent layers.

    Raises ConfigError if a model with recurrent layers gets none.
    """
    slot_bytes = state_bytes(described.spec)
    if slot_bytes and not options.state_slots:
        needs = f"{described.architecture} has recurrent layers, and the state of a sequence takes {slot_bytes:,} bytes"
        raise ConfigError(f"state_slots is 0 but must be at least 1: {needs}", param="state_slots")
    return options.state_slots if slot_bytes else 0


def num_host_blocks(options: RunnerOptions, block_bytes: int, num_device_blocks: int, default_gib: float = 0.0) -> int:
    """Return the number of KV blocks in host memory, from num_swap_blocks, else from swap_space_gib, else a default.

    An operator who sets the size of the KV cache decides about the node's memory, so there is no default beside that.
    """
    if options.num_swap_blocks is not None:
        return options.num_swap_blocks
    if options.swap_space_gib is not None:
        return int(options.swap_space_gib * 2**30) // block_bytes
    if options.kv_cache_gib is not None or options.wanted_blocks is not None:
        return 0
    return min(num_device_blocks, int(min(default_gib * 2**30, available_bytes() * SWAP_SHARE)) // block_bytes)


_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("chat_template.json", "additional_chat_templates/*.jinja"),
)
_CONFIG_FILES = ("config.json", "generation_config.json", MODELOPT_FILE)


def revision_of(source: ModelSource, arithmetic: str) -> str:
    """Return 32 hex digits over the tokenizer, the configs, samples of the weight files, and the arithmetic.

    The digest covers samples instead of all bytes, because a node should not read a large model twice at start. Folder
    names and the name of a GGUF file do not count, because machines keep the same model under different paths.
    """
    digest = hashlib.blake2b(arithmetic.encode(), digest_size=16)
    for path in _present(source, _TOKENIZER_FILES):
        digest.update(path.name.encode() + path.read_bytes())
    return _with_weights(digest, source)


def revision_with(revision: str, chat_template: str) -> str:
    """Return the revision of a model whose chats are written by another template than that of its files."""
    return hashlib.blake2b(chat_template.encode(), key=revision.encode(), digest_size=16).hexdigest()


def weights_revision_of(source: ModelSource, arithmetic: str) -> str:
    """Return what `revision_of` does, but without the tokenizer, whose file is large."""
    return _with_weights(hashlib.blake2b(arithmetic.encode(), digest_size=16), source)


def _with_weights(digest: hashlib.blake2b, source: ModelSource) -> str:
    for path in _present(source, _CONFIG_FILES):
        config = read_object(path)
        # Neither the transformers version that wrote a config nor its layout counts.
        config.pop("transformers_version", None)
        digest.update(path.name.encode() + json.dumps(config, sort_keys=True).encode())
    for path in weight_files(source):
        for sample in samples(path):
            digest.update(sample)
    return digest.hexdigest()


def stamps_of(paths: Iterable[Path]) -> list[tuple[int, ...]]:
    """Return the stamps of files, which change when one of them is written or replaced."""
    return [stamp_of(path.stat()) for path in paths]


def stamps_of_source(source: ModelSource) -> list[tuple[int, ...]]:
    """Return the stamps of all files on which the revision depends."""
    return stamps_of([*_present(source, (*_TOKENIZER_FILES, *_CONFIG_FILES)), *weight_files(source)])


def _present(source: ModelSource, names: Iterable[str]) -> list[Path]:
    """Return the files of the folder that match one of some patterns."""
    return [path for name in names for path in sorted(source.folder.glob(name)) if path.is_file()]
