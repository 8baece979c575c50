"""What the engine and a model runner say to each other: one plan in, one token per sampling row out."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.architecture.spec import MatrixName
from penstock.gpu_node.model.lora.low_rank import LowRank

if TYPE_CHECKING:
    from penstock.contract.adapters import AdapterRef

NULL_BLOCK = 0
"""Padding of block tables; never written by a sequence, always finite."""

NO_COPIES = np.empty((0, 2), dtype=np.int32)

NO_ADAPTER = -1

FAILED_TOKEN = -1
"""Stands for a row whose logits were not finite: that row failed, the others did not."""

NO_LOGPROBS = -1

_MASK_BITS = 32


class TokenMasks:
    """Which tokens some rows of a step may choose, written while the step already runs; runners wait for that."""

    def __init__(self, is_masked: NDArray[np.bool_], vocab_size: int) -> None:
        """is_masked: [num_samples], which rows have a mask; until it is written it allows nothing."""
        self.rows = np.where(is_masked, np.cumsum(is_masked) - 1, -1).astype(np.int32)
        """[num_samples]: the row of `words` that a sampling row goes by, -1 where it may choose any token."""
        self.words = np.zeros((int(is_masked.sum()), -(-vocab_size // _MASK_BITS)), dtype=np.uint32)
        """[num_masked, vocab / 32]: a bit for each token, the lowest first."""
        self.written = np.zeros(1, dtype=np.int32)
        """Not 0 once all words are written, for those who look at memory."""
        self._all_written = threading.Event()

    def finish(self) -> None:
        """Say that all words are written."""
        self.written[0] = 1
        self._all_written.set()

    def wait(self) -> None:
        """Block until they are."""
        self._all_written.wait()


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each sampling row of a step chooses its token; every array is [num_samples]."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    """0 means no limit."""
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    """0 means no limit."""
    repetition_penalty: NDArray[np.float32]
    presence_penalty: NDArray[np.float32]
    frequency_penalty: NDArray[np.float32]
    seed: NDArray[np.uint64]
    choice: NDArray[np.int32]
    position: NDArray[np.int32]
    """Place of the token to sample in its choice, counted from 0."""
    seen: tuple[NDArray[np.int32], ...]
    """Per row its tokens so far, prompt and output; empty where no penalty looks at them."""
    num_seen_prompt: NDArray[np.int32]
    """How many of a row's `seen` are prompt: the repetition penalty counts those too, the other two do not."""
    banned: tuple[NDArray[np.int32], ...]
    """Per row the tokens that must not be chosen."""
    biased: tuple[NDArray[np.int32], ...] = ()
    """Per row the tokens, each once, whose logits are moved before all else; () where no row has any."""
    biases: tuple[NDArray[np.float32], ...] = ()
    """By how much, in the shape of `biased`."""
    masks: TokenMasks | None = None
    """What rows may choose at all, written while the step runs; None where no row has a mask."""
    num_logprobs: NDArray[np.int32] | None = None
    """How many of the likeliest tokens are wanted beside each row's own, NO_LOGPROBS for none at all; None where no
    row wants any."""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens of prompts, computed in a step, behind which it is known what comes: how likely is that?"""

    tokens: NDArray[np.int32]
    """[num_scored]: which of the step's tokens."""
    targets: NDArray[np.int32]
    """[num_scored]: what follows each."""
    num_logprobs: NDArray[np.int32]
    """[num_scored]: how many of the likeliest tokens are wanted beside it."""
    seqs: NDArray[np.int32]
    """[num_scored]: whose they are, for the caller."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Some rows' logarithms of the softmax of their logits, as they were before biases, penalties, bans and masks.

    The first column is the row's own token, the others are the likeliest ones, the best first; of equal ones any. There
    are as many columns as for the row that wants most; what is behind those that a row wants means nothing.
    """

    token_ids: NDArray[np.int32]
    """[num_rows, 1 + most]"""
    values: NDArray[np.float32]
    """[num_rows, 1 + most]"""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of a mixed batch: prefill chunks and decode steps of `num_seqs` sequences, packed without padding.

    A runner stores the keys and values of all tokens of a layer before any of them attends, because two sequences of
    one step may share a block that only one of them fills.
    """

    token_ids: NDArray[np.int32]
    """[num_tokens]; -1 - i stands for what row i of the step before samples, while that is in flight."""
    positions: NDArray[np.int32]
    """[num_tokens]"""
    query_starts: NDArray[np.int32]
    """[num_seqs + 1]: sequence i owns the tokens from query_starts[i] to query_starts[i + 1]."""
    context_lens: NDArray[np.int32]
    """[num_seqs]: tokens in the cache once this step's are stored."""
    block_tables: NDArray[np.int32]
    """[num_seqs, max_blocks], padded with NULL_BLOCK."""
    sample_tokens: NDArray[np.int32]
    """[num_samples]: behind which of `token_ids` a token is sampled, ascending."""
    sampling: SamplingRows
    copies: NDArray[np.int32] = field(default_factory=lambda: NO_COPIES)
    """[num_copies, 2]: from which block to which one; done in order, before anything of the step is stored or read."""
    adapters: NDArray[np.int32] | None = None
    """[num_seqs]: the place of each sequence's adapter in the runner, or NO_ADAPTER; None where nobody has one."""
    scored: ScoredTokens | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, and where its time went."""

    tokens: NDArray[np.int32]
    """[num_samples]: each sampling row's token, FAILED_TOKEN where that row's logits were not finite."""
    forward_ms: float
    sample_ms: float
    copy_ms: float = 0.0
    logprobs: Logprobs | None = None
    """Of the sampling rows, where one of them wants any; a failed one's mean nothing."""
    scores: Logprobs | None = None
    """Of the plan's scored tokens."""


class Adapter(Protocol):
    """A low-rank adapter of the model, ready to be given to its runner."""

    @property
    def digest(self) -> str:
        """Of its content: adapters of one digest give the same tokens."""

    def low_ranks(self, layer: int, matrix: MatrixName) -> tuple[LowRank, ...]:
        """What it adds to a layer's matrix, part by part."""


class AdapterSource(Protocol):
    """Where adapters come from; safe for use by several threads."""

    def digests(self) -> dict[str, str]:
        """What there is, by name."""

    def find(self, wanted: AdapterRef) -> Adapter:
        """An adapter. Raises NotFoundError for an unknown name, RequestError for one that cannot be used."""


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Blocks of a KV cache besides the null block: ids from 1 to num_device_blocks, and behind those the host's.

    The runners on the CPU have both in one memory, and steps read and store in either.
    """

    num_device_blocks: int
    num_host_blocks: int
    block_bytes: int
    """Of all layers."""

    @property
    def num_blocks(self) -> int:
        """All of them, the null block included."""
        return 1 + self.num_device_blocks + self.num_host_blocks


class StepHandle(Protocol):
    """A step that may still be running."""

    def result(self) -> StepResult:
        """Wait for it; raises what made the whole step fail: MemoryError where a smaller one might not."""


class ModelRunner(Protocol):
    """Owns weights and KV tensors and runs steps one after the other."""

    @property
    def max_in_flight(self) -> int:
        """Steps that may be submitted before the first of them is done; past 1, plans may stand ahead of tokens."""

    @property
    def cache_sizes(self) -> CacheSizes:
        """What the KV cache holds."""

    @property
    def verifies_drafts(self) -> bool:
        """Whether a step may sample behind more of its tokens than it has sequences."""

    def bind_thread(self) -> None:
        """Let the calling thread, which does nothing but wait for steps, run where the runner has most of it."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step and come back at once.

        Its plan's arrays must not change until the result is there. Raises as a result does.
        """

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Forget what blocks hold once steps in flight are done, so that a NaN in them reaches no later one."""

    def set_adapter(self, place: int, adapter: Adapter) -> None:
        """Put an adapter in a place, from 0 to `max_loras`, instead of what was there.

        Steps that were submitted before still compute with that.
        """


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What a runner needs to know beyond the model itself. Numbers of blocks win over sizes in GiB."""

    runner: str
    """`auto`, `gpu`, `native` or `torch`."""
    dtype: str
    quantization: str
    kv_cache_dtype: str
    block_size: int
    num_blocks: int | None
    kv_cache_gib: float
    max_model_len: int | None
    max_num_seqs: int
    num_threads: int | None
    num_host_blocks: int | None = None
    swap_space_gib: float = 0.0
    gpu_memory_utilization: float | None = None
    cpu_offload_gib: float = 0.0
    max_num_batched_tokens: int = 512
    reserved_cores: int = 0
    """Cores to leave to other processes where `num_threads` is None."""
    deterministic: bool = False
    """Whether a card may not cut contexts by the size of the batch, nor sums of products at all."""
    weight_cache: bool = True
    """Whether packed weights lie in a file that the machine's processes share."""
    lora: Mapping[str, Path] = field(default_factory=dict)
    """Adapters by name."""
    lora_dir: Path | None = None
    """Holds more of them, each in a folder of its name."""
    max_loras: int = 0
    """Places for adapters that one step may compute with."""
    max_lora_rank: int = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner and what the engine must know about the model it runs."""

    runner: ModelRunner
    folder: Path
    """Holds the tokenizer's files."""
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    adapters: AdapterSource
    arithmetic: str
    """Names the runner, its kernels and the formats it computes in: what tokens depend on besides the model's files."""
    revision: str
