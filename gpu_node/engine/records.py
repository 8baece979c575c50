"""Requests, outputs and stats of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import PenstockError
from penstock.contract.job import Choice, Priority, SamplingParams, Usage
from penstock.contract.logprobs import TokenLogprobs
from penstock.gpu_node.engine.text.end_rule import EndReason


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """The part of one choice that an earlier node already logged."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request to the engine. Policies use its priority class, tenant and weight.

    Requests share cached prefixes only if `cache_salt` and adapter are equal. `resume` holds the progress of an earlier
    node with each choice. Generation continues after the logged tokens; text that was not logged yet is output first. A
    choice with a finish reason stays closed.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    _: KW_ONLY
    seed: int
    resume: Sequence[ResumedChoice] = ()
    cache_salt: str | None = None
    priority: int = int(Priority.STANDARD)
    tenant: str = "default"
    weight: float = 1.0
    adapter: AdapterRef | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of one choice in a step; `position` is the index of `token_ids[0]` in the choice.

    `text` may lag behind the tokens. The last output of a choice carries `finish_reason`; `error` means that the
    computation of this choice failed, and only of this one. The last output of a request carries its `usage`.
    """

    request_id: str
    choice: int
    position: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: EndReason | None
    usage: Usage | None = None
    kv_token_ms: float = 0.0
    """KV-token-milliseconds of the choice so far: the capacity of its blocks in tokens × the time that it held them."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of `token_ids`, where the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the whole prompt, once for a request, before or with its first token."""
    error: PenstockError | None = None
    """Why the choice failed, where its request is the reason."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A prompt's finished choices, returned by `Engine.generate`."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine. Counters grow from its start; times cover the last few hundred steps.

    A step's time runs from its submission until its tokens are committed. Then schedule and prepare of the next step
    follow; the output of the first step is made while the next one runs. The five parts of a step are means.
    """

    kv_blocks_total: int
    kv_blocks_free: int
    """Device blocks that no sequence holds, cached prefixes included."""
    kv_blocks_cached: int
    block_size: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    steps: int
    prefill_tokens: int
    """Prompt tokens computed, recomputed ones included."""
    decode_tokens: int
    """Tokens sampled, without rejected drafts."""
    step_ms_p50: float
    step_ms_p99: float
    prefix_hit_tokens: int
    """Tokens found in the prefix cache when a sequence was admitted, on device and host."""
    prefix_lookup_tokens: int = 0
    """Tokens of all sequences that were admitted without blocks of their own."""
    swap_hit_tokens: int = 0
    """Those of `prefix_hit_tokens` that were found on the host."""
    kv_evictions: int = 0
    """Cached prefix blocks that the device evicted. The host keeps a copy of each while it has free blocks."""
    kv_tokens_used: int = 0
    """Tokens stored in held blocks; shared blocks count once."""
    swap_blocks_total: int = 0
    swap_blocks_free: int = 0
    """Host blocks that no sequence holds, cached prefixes included."""
    swap_blocks_cached: int = 0
    swap_evictions: int = 0
    """Cached prefix blocks that the host evicted."""
    swapped_out_blocks: int = 0
    """Blocks copied from the device to the host: of preempted sequences and of evicted prefixes."""
    swapped_in_blocks: int = 0
    num_swapped: int = 0
    """Preempted sequences with their blocks on the host."""
    num_swaps: int = 0
    """Preemptions by swapping; the others recompute."""
    drafted_tokens: int = 0
    """Drafted tokens that were computed."""
    accepted_tokens: int = 0
    """Drafted tokens that were accepted."""
    num_failed_steps: int = 0
    num_memory_failures: int = 0
    """Failed steps that ran out of memory."""
    max_step_tokens: int = 0
    """Largest number of tokens in a step; below the configured limit after a step ran out of memory."""
    copied_blocks: int = 0
    """Blocks copied: for forks, swaps, and prefixes that moved between device and host."""
    copy_ms: float = 0.0
    schedule_ms: float = 0.0
    """Time to schedule a step."""
    prepare_ms: float = 0.0
    """Time to build the runner's arrays and submit them."""
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    output_ms: float = 0.0
    """Time to turn tokens into text and outputs, while the next step runs."""
    grammar_trials: int = 0
    """New grammars that were tried out in a separate process."""
    grammar_refusals: int = 0
    """Tried grammars that were refused."""
    grammar_costly_refusals: int = 0
    """Refusals because of a limit of time, memory or work."""
    grammar_kills: int = 0
    """Grammar processes that a limit killed, without those of trials."""
    grammar_restarts: int = 0
    """Grammar processes that were started to replace one that ended."""
    late_masks: int = 0
    """Times that a sequence skipped a step because its token mask was not ready."""
    failed_guides: int = 0
    """Choices that ended because of their grammar."""
