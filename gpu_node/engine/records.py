"""What goes into the engine and comes out of it, besides tokens."""

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
    """What an earlier node already logged for one choice."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the engine is asked for. Policies look at class, tenant and weight.

    Only requests of one `cache_salt` and adapter share cached prefixes. `resume` says how far an earlier node got with
    each choice: it goes on behind that, text that was not logged yet first, and stays closed if it has a finish reason.
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
    """What one choice gained in a step; `position` is the place of `token_ids[0]` in the choice.

    `text` may lag behind the tokens. The last output of a choice carries `finish_reason`; `error` means that this
    choice's computation failed and the others' did not. The last output of a request carries its `usage`.
    """

    request_id: str
    choice: int
    position: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: EndReason | None
    usage: Usage | None = None
    kv_ms: float = 0.0
    """KV-token-milliseconds of the choice so far: what its blocks had room for × how long it held them."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Those of `token_ids`, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Those of the whole prompt, once for a request, before or with its first token."""
    error: PenstockError | None = None
    """Why the choice failed, where its request is the reason."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A prompt's finished choices, from `Engine.generate`."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine. Counters grow from its start; times look at the last few hundred steps.

    A step's time runs from its submission to where its tokens are committed; behind it schedule and prepare of the next
    one follow, and its own output runs beside that. The five parts are means.
    """

    kv_blocks_total: int
    kv_blocks_free: int
    """Blocks that nobody holds, cached prefixes included."""
    kv_blocks_cached: int
    block_size: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    steps: int
    prefill_tokens: int
    """Prompt tokens computed, recomputed ones included."""
    decode_tokens: int
    """Tokens sampled that stand."""
    step_ms_p50: float
    step_ms_p99: float
    prefix_hit_tokens: int
    """Tokens found computed when a sequence was admitted, on both tiers."""
    prefix_lookup_tokens: int = 0
    """Tokens of all sequences that were admitted without blocks of their own."""
    swap_hit_tokens: int = 0
    """Those of the tokens found that were on the host."""
    kv_evictions: int = 0
    """Cached prefix blocks that the device gave away; where the host has room, it keeps them."""
    kv_tokens_used: int = 0
    """Tokens stored in blocks that somebody holds, shared ones counted once."""
    swap_blocks_total: int = 0
    swap_blocks_free: int = 0
    """Host blocks that nobody holds, cached prefixes included."""
    swap_blocks_cached: int = 0
    swap_evictions: int = 0
    """Cached prefix blocks that the host gave away."""
    swapped_out_blocks: int = 0
    """Blocks copied from the device to the host: of preempted sequences, and evicted prefixes."""
    swapped_in_blocks: int = 0
    num_swapped: int = 0
    """Preempted sequences whose blocks are on the host."""
    num_swaps: int = 0
    """Preemptions that were swaps; the others are computed again."""
    drafted_tokens: int = 0
    """Tokens computed because a sequence would probably say them,"""
    accepted_tokens: int = 0
    """and those of them that it said."""
    num_failed_steps: int = 0
    num_memory_failures: int = 0
    """Failed steps that found no memory."""
    max_step_tokens: int = 0
    """Most tokens that a step may have: fewer than the settings say after one that found no memory."""
    copied_blocks: int = 0
    """Blocks copied: forks, swaps, and prefixes that moved between device and host."""
    copy_ms: float = 0.0
    schedule_ms: float = 0.0
    """Deciding who computes what, with whose blocks."""
    prepare_ms: float = 0.0
    """Building the runner's arrays and handing them over."""
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    output_ms: float = 0.0
    """Tokens to text and outputs, while the next step runs."""
    grammar_trials: int = 0
    """New grammars that were tried out,"""
    grammar_refusals: int = 0
    """those of them that were refused,"""
    grammar_costly_refusals: int = 0
    """and those of these that a limit of time, memory or work refused."""
    grammar_kills: int = 0
    """Grammar processes that a limit killed, those of trials not counted."""
    grammar_restarts: int = 0
    """Grammar processes that were started in the place of one that ended."""
    late_masks: int = 0
    """Times that a sequence sat out a step because its mask was not ready."""
    failed_guides: int = 0
    """Choices that ended because of their grammar."""
