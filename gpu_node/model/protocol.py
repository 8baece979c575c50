"""The interface between the engine and a model runner: a step plan goes in, one token per sampling row comes out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.cache_sizes import NO_WINDOWS as NO_WINDOWS
from penstock.gpu_node.model.cache_sizes import CacheSizes as CacheSizes
from penstock.gpu_node.model.cache_sizes import StateSizes as StateSizes
from penstock.gpu_node.model.cache_sizes import WindowSizes as WindowSizes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from penstock.contract.adapters import AdapterRef
    from penstock.contract.tasks import Pooling

NULL_BLOCK = 0
"""The block id that pads block tables. No sequence writes to this block, so its values stay finite."""

NO_COPIES = np.empty((0, 2), dtype=np.int32)

NO_ADAPTER = -1

NO_STATE = -1

FAILED_TOKEN = -1
"""The token of a row that failed because its logits were not finite. Other rows of the step are not affected."""

NO_LOGPROBS = -1

MatrixName: TypeAlias = Literal["qkv", "out", "mixer_out", "mlp_in", "mlp_out", "expert_in", "expert_out", "gates"]
"""The matrices of a layer; runners compute one matrix product for each.

`gates`: those of a delta rule's value heads, small and in float32. They are named where adapters change them.
"""

_MASK_BITS = 32


class TokenMasks:
    """Bit masks of the tokens that some rows of a step may choose.

    The engine writes the masks while the step already runs. A runner waits for them before it samples.
    """

    def __init__(self, is_masked: NDArray[np.bool_], vocab_size: int) -> None:
        """is_masked: [num_samples], whether a row has a mask. A mask allows no token until it is written."""
        self.rows = np.where(is_masked, np.cumsum(is_masked) - 1, -1).astype(np.int32)
        """[num_samples]: the row of `words` that masks a sampling row; -1 where the row may choose any token."""
        self.words = np.zeros((int(is_masked.sum()), -(-vocab_size // _MASK_BITS)), dtype=np.uint32)
        """[num_masked, vocab / 32]: one bit per token, lowest bit first; 1 allows the token."""
        self.written = np.zeros(1, dtype=np.int32)
        """[1]: nonzero once all words are written. Native kernels poll this memory."""
        self._all_written = threading.Event()

    def allow(self, row: int, token_id: int) -> None:
        """Let a row of `words` choose a token."""
        self.words[row, token_id // _MASK_BITS] |= np.uint32(1 << token_id % _MASK_BITS)

    def allow_only(self, tokens: Mapping[int, int]) -> None:
        """Let some sampling rows choose one token alone: by row, its token."""
        for row, token_id in tokens.items():
            self.allow(int(self.rows[row]), token_id)

    def finish(self) -> None:
        """Signal that all words are written."""
        self.written[0] = 1
        self._all_written.set()

    def wait(self) -> None:
        """Block until all words are written."""
        self._all_written.wait()


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling parameters of each row of a step; every array is [num_samples]."""

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
    """Index of the token to sample within its choice, counted from 0."""
    seen: tuple[NDArray[np.int32], ...]
    """Per row: its tokens so far, prompt and output; empty where the row has no penalty."""
    num_seen_prompt: NDArray[np.int32]
    """How many tokens of a row's `seen` are prompt. Only the repetition penalty counts prompt tokens."""
    banned: tuple[NDArray[np.int32], ...]
    """Per row: the tokens that must not be chosen."""
    biased: tuple[NDArray[np.int32], ...] = ()
    """Per row: the distinct tokens with a logit bias, which is applied first; () where no row has a bias."""
    biases: tuple[NDArray[np.float32], ...] = ()
    """The logit bias of each token in `biased`, in the same shape."""
    masks: TokenMasks | None = None
    """Masks of allowed tokens, written while the step runs; None where no row has a mask."""
    num_logprobs: NDArray[np.int32] | None = None
    """How many of the most likely tokens to report beside a row's own token; NO_LOGPROBS where the row wants no
    logprobs. None where no row wants any."""


def _columns_of(rows: type[SamplingRows]) -> dict[str, type[np.generic]]:
    hints = get_type_hints(rows)
    # Until NumPy 2.4, NDArray[x] is ndarray[shape, dtype[x]]. From 2.5 on, it is an alias of its own.
    arrays = {name: get_args(hint)[-1] for name, hint in hints.items() if get_origin(hint) in (np.ndarray, NDArray)}
    return {name: (*get_args(dtype), dtype)[0] for name, dtype in arrays.items()}


ROW_COLUMNS: Mapping[str, type[np.generic]] = _columns_of(SamplingRows)
"""The fields of SamplingRows that have one number for each row, with its dtype."""
_NO_COLUMNS: Mapping[str, Any] = {name: np.empty(0, dtype) for name, dtype in ROW_COLUMNS.items()}
NO_ROWS = SamplingRows(**_NO_COLUMNS, seen=(), banned=())
"""Those of a step that samples nothing."""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Prompt tokens of a step at which the logprob of the known next token is computed."""

    tokens: NDArray[np.int32]
    """[num_scored]: indices into the step's tokens."""
    targets: NDArray[np.int32]
    """[num_scored]: the prompt token that follows each one."""
    num_logprobs: NDArray[np.int32]
    """[num_scored]: how many of the most likely tokens to report beside the target."""
    seqs: NDArray[np.int32]
    """[num_scored]: the sequence of each one; only the caller uses it."""


@dataclass(frozen=True, slots=True)
class PooledTokens:
    """Prompt tokens of a step whose hidden state after the final norm is wanted."""

    tokens: NDArray[np.int32]
    """[num_pooled]: indices into the step's tokens, ascending."""
    seqs: NDArray[np.int32]
    """[num_pooled]: the sequence of each one; only the caller uses it."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log-softmax of some rows' logits before biases, penalties, bans and masks.

    Column 0 is the row's own token. The other columns are the most likely tokens, best first; ties are in any order.
    The width is that of the row with the largest `num_logprobs`; a row's columns past its own number are undefined.
    """

    token_ids: NDArray[np.int32]
    """[num_rows, 1 + largest num_logprobs]"""
    values: NDArray[np.float32]
    """[num_rows, 1 + largest num_logprobs]"""


@dataclass(frozen=True, slots=True)
class StepStates:
    """Where a step reads and writes the recurrent states of its sequences. A slot holds the states of all layers."""

    reads: NDArray[np.int32]
    """[num_seqs]: the slot with the state before the sequence's first token of this step, or NO_STATE: zeros."""
    writes: NDArray[np.int32]
    """[num_seqs]: the slot for the state after its last token of this step; it may be the one that was read."""
    saves: NDArray[np.int32]
    """[num_saves, 2]: an index into `token_ids`, ascending, and the slot that gets the state after that token."""


@dataclass(frozen=True, slots=True)
class StepWindows:
    """The blocks of layers with windows, where these have a pool of their own."""

    block_tables: NDArray[np.int32]
    """[num_seqs, max_blocks], as wide as those of the plan; NULL_BLOCK for blocks behind the window as well."""
    copies: NDArray[np.int32]
    """[num_copies, 2]: source and target block, as those of the plan."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of a mixed batch: prefill chunks and decode steps of `num_seqs` sequences, packed without padding.

    In each layer, a runner stores the keys and values of all tokens before it computes attention. Two sequences of one
    step may share a block that only one of them fills.
    """

    token_ids: NDArray[np.int32]
    """[num_tokens]; -1 - i stands for the token that row i of the previous step samples while that is in flight."""
    positions: NDArray[np.int32]
    """[num_tokens]"""
    query_starts: NDArray[np.int32]
    """[num_seqs + 1]: sequence i owns the tokens from query_starts[i] to query_starts[i + 1]."""
    context_lens: NDArray[np.int32]
    """[num_seqs]: tokens in the KV cache after this step's tokens are stored."""
    block_tables: NDArray[np.int32]
    """[num_seqs, max_blocks], padded with NULL_BLOCK."""
    sample_tokens: NDArray[np.int32]
    """[num_samples]: indices into `token_ids` after which a token is sampled, ascending."""
    sampling: SamplingRows
    copies: NDArray[np.int32] = field(default_factory=lambda: NO_COPIES)
    """[num_copies, 2]: source and target block. Copies run in order, before the step stores or reads any block."""
    adapters: NDArray[np.int32] | None = None
    """[num_seqs]: the adapter slot of each sequence, or NO_ADAPTER; None where no sequence has an adapter."""
    scored: ScoredTokens | None = None
    pooled: PooledTokens | None = None
    states: StepStates | None = None
    windows: StepWindows | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens and logprobs of a step, and the time of each of its parts."""

    tokens: NDArray[np.int32]
    """[num_samples]: the token of each sampling row; FAILED_TOKEN where the row's logits were not finite."""
    forward_ms: float
    sample_ms: float
    copy_ms: float = 0.0
    logprobs: Logprobs | None = None
    """Logprobs of the sampling rows; None where no row wants any. Those of a failed row are undefined."""
    scores: Logprobs | None = None
    """Logprobs of the plan's scored tokens."""
    hidden: NDArray[np.float32] | None = None
    """[num_pooled, hidden_size]: hidden states of the plan's pooled tokens after the final norm."""
    eager: str | None = None
    """Why the step did not run as a CUDA graph; None if it did, or if the runner has no graphs."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank term up @ down that an adapter adds to one part of a layer's matrix."""

    part: int
    """The index of the part in `ModelSpec.parts_of`."""
    down: NDArray[np.float32]
    """[rank, columns]"""
    up: NDArray[np.float32]
    """[rows, rank], multiplied by the adapter's scaling factor."""


class Adapter(Protocol):
    """A LoRA adapter of the model, ready to load into an adapter slot of its runner."""

    @property
    def name(self) -> str:
        """The name by which an `AdapterSource` finds it."""

    @property
    def digest(self) -> str:
        """A digest of the content: adapters with equal digests give the same tokens."""

    def low_ranks(self, layer: int, matrix: MatrixName) -> tuple[LowRank, ...]:
        """Return the low-rank terms added to a layer's matrix, one per adapted part."""


class AdapterSource(Protocol):
    """Finds adapters by name; thread-safe."""

    def digests(self) -> dict[str, str]:
        """Return the digest of each available adapter by name."""

    def find(self, wanted: AdapterRef) -> Adapter:
        """Return an adapter. Raises NotFoundError for an unknown name, RequestError for an unusable adapter."""


class RanksLostError(Exception):
    """The ranks of a runner have ended, and what they held: all KV blocks. `RecoverableRunner.recover` starts anew."""


class StepHandle(Protocol):
    """A step that may still be running."""

    def result(self) -> StepResult:
        """Wait for the step and return its result.

        Raises the error that made the whole step fail; MemoryError means that a smaller step might succeed.
        """


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a runner keeps the weights, how much memory they take, and whether it computes on all cores."""

    weight_bytes: int = 0
    """0: unknown, because the weights are read when they are needed."""
    gpu_uuid: str = ""
    """The GPU, as its driver names it; empty on the CPU."""
    leaves_core_free: bool = False
    """Whether at least one core that this process may use does not compute steps."""


class StepRunner(Protocol):
    """Owns weights and a KV cache, and runs steps one after another."""

    @property
    def max_in_flight(self) -> int:
        """The number of steps that may be in flight at once. Above 1, a plan may refer to tokens not yet sampled."""

    @property
    def cache_sizes(self) -> CacheSizes:
        """The number and size of the KV blocks."""

    @property
    def state_sizes(self) -> StateSizes:
        """The number and size of the state slots."""

    @property
    def placement(self) -> Placement:
        """Where the weights are."""

    @property
    def verifies_drafts(self) -> bool:
        """Whether one sequence may sample after several of its tokens in a step, as speculative decoding does."""

    def bind_thread(self) -> None:
        """Set the CPU affinity of the calling thread, which only waits for steps, to suit the runner's threads."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step and return at once.

        A step reads of a block only what the sequence itself stored: new blocks may hold anything, NaN included.
        The caller must not change the plan's arrays before the result is available. Raises like `StepHandle.result`. If
        a runner with state slots raises MemoryError here, it has written to none of them.
        """


class ModelRunner(StepRunner, Protocol):
    """The runner of a whole model."""

    def set_adapter(self, adapter_slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot, 0 <= adapter_slot < `max_loras`, and replace the adapter there.

        Steps that were submitted earlier still compute with the previous adapter.
        """


class RankBytes(NamedTuple):
    """Memory of what a rank holds."""

    weights: int
    """Of its part of the matrices; 0 if the runner does not know it."""
    kv_blocks: int
    """Of its part of all KV blocks, on device and host."""


@dataclass(frozen=True, slots=True)
class RankStats:
    """The ranks that compute a model together. Times are seconds, by rank, since the ranks were started last."""

    num_ranks: int = 1
    num_starts: int = 0
    """How often the ranks beside rank 0 were started: again each time after one was lost."""
    waited_s: tuple[float, ...] = ()
    """For the slowest rank of the stage, and for other stages. Unknown on GPUs, like `exchanged_s`."""
    exchanged_s: tuple[float, ...] = ()
    """From the arrival of the slowest rank of the stage until this one went on."""
    num_meetings: int = 0
    """At which all ranks have waited for each other."""
    weight_bytes: tuple[int, ...] = ()
    """By rank, as in `RankBytes`; empty until all are known. Likewise `kv_bytes`."""
    num_stages: int = 1
    """Of a pipeline. Each has the same number of ranks, and consecutive ones."""
    lost: str = ""
    """Why no step can run until the ranks are started again; empty while all of them live."""
    kv_bytes: tuple[int, ...] = ()
    num_steps: int = 0
    """That have ended."""
    stepped_s: float = 0.0
    """In which steps ran."""

    @property
    def stage_idle(self) -> tuple[float, ...]:
        """By stage: the share of the time of steps in which its ranks waited, on average. Empty if it is not known."""
        if not self.waited_s or self.stepped_s <= 0:
            return ()
        each = self.num_ranks // self.num_stages
        stages = (self.waited_s[first : first + each] for first in range(0, self.num_ranks, each))
        return tuple(sum(waited_s) / (each * self.stepped_s) for waited_s in stages)

    def since(self, before: RankStats) -> RankStats | None:
        """Return what the ranks have spent since `before`; None if they were started again, and counted anew."""
        if self.lost or before.lost or self.num_starts != before.num_starts:
            return None
        waited_s, exchanged_s = (
            tuple(after - earlier for earlier, after in zip(*pair, strict=True))
            for pair in ((before.waited_s, self.waited_s), (before.exchanged_s, self.exchanged_s))
        )
        return replace(
            self,
            waited_s=waited_s,
            exchanged_s=exchanged_s,
            num_meetings=self.num_meetings - before.num_meetings,
            num_steps=self.num_steps - before.num_steps,
            stepped_s=self.stepped_s - before.stepped_s,
        )


NO_RANKS = RankStats()


@runtime_checkable
class RecoverableRunner(Protocol):
    """A runner that may lose ranks that compute with it, and start them again."""

    @property
    def is_lost(self) -> bool:
        """Whether a rank was lost, so that no step can run before `recover`. Any thread may read it."""

    @property
    def ranks(self) -> RankStats:
        """The ranks, and what they have spent at meetings. Any thread may read it."""

    def recover(self) -> None:
        """Be as after loading, with empty KV blocks, after RanksLostError. Adapters stay in their slots.

        Raises what loading raises.
        """


@runtime_checkable
class ProfiledRunner(Protocol):
    """A runner that can record its operations."""

    def start_profile(self) -> None:
        """Start recording."""

    def stop_profile(self) -> None:
        """Stop recording."""

    def write_profile(self, path: Path) -> None:
        """Write what was recorded as a compressed Chrome trace. It may take seconds; safe on any thread."""


@dataclass(frozen=True, slots=True)
class WrittenTokenizer:
    """A tokenizer that was written to a folder. Reading it from there would take as long as making it."""

    backend: Backend
    tokens: Sequence[str]
    """Its tokens by id, without added ones. Ids without a token have an empty text."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner, and the facts about its model that the engine needs."""

    runner: ModelRunner
    folder: Path
    """The folder with the tokenizer's files."""
    vocab_size: int
    hidden_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    adapters: AdapterSource
    pooling: Pooling
    """The pooling of embeddings that the model's files name, or else `mean`."""
    is_embedder: bool
    """Whether the files say that the model was made for embeddings, and not for text."""
    arithmetic: str
    """Names the runner, its kernels and number formats: all that tokens depend on besides the model's files."""
    revision: str
    head_rows: Callable[[Sequence[int]], NDArray[np.float32] | None] | None = None
    """Returns the rows of the head for tokens, [tokens, hidden_size], whose products with hidden states are logits.

    None for a head whose rows cannot be read, or whose logits are no such products.
    """
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that the model expects before those that it embeds, by name."""
    default_prompt: str | None = None
    """The name of the prompt of requests that name none."""
