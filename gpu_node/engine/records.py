"""Requests, outputs and stats of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import PenstockError
from penstock.contract.job import Priority, SamplingParams
from penstock.contract.output import Choice, FirstChoice, PrefillProgress, TokenLogprobs, Usage
from penstock.contract.pool import EngineLoad
from penstock.contract.tasks import Embed, Score
from penstock.gpu_node.engine.text.output import EndReason
from penstock.gpu_node.engine.texts import PackedTexts, TextResults
from penstock.gpu_node.model.protocol import NO_RANKS, RankStats
from penstock.runtime.histogram import Histogram

if TYPE_CHECKING:
    from penstock.gpu_node.engine.structured.tenant_grammar import Grammar
    from penstock.gpu_node.engine.text.output import BadWords
    from penstock.gpu_node.engine.text.reasoning import ReasoningRule
    from penstock.gpu_node.model.protocol import Adapter


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """The part of one choice that an earlier node already logged."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request to the engine. Policies use its priority class, tenant and weight.

    Requests share cached prefixes only if tenant, `cache_salt` and adapter are equal. `resume` holds the progress of an
    earlier node with each choice. Generation continues after the logged tokens; text that was not logged yet is output
    first. A choice with a finish reason stays closed.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    _: KW_ONLY
    seed: int
    resume: Sequence[ResumedChoice] = ()
    level: int = int(Priority.STANDARD)
    tenant: str = "default"
    weight: float = 1.0
    background: bool = False
    """Whether no caller waits for it."""
    priority: int = int(Priority.STANDARD)
    """The class of its job. `level` may be a more urgent one, after a long wait. The engine's time counts by class."""
    adapter: AdapterRef | None = None
    reports_prefill: bool = False
    """Whether outputs without tokens report how far the prompt is computed."""
    embed: Embed | None = None
    """Return the prompt's embedding instead of text. `params` are then those of `Embed.sampling`."""
    score: Score | None = None
    """Return the score of the pair in the prompt. `params` are then those of `Score.sampling`."""
    texts: PackedTexts | None = None
    """The texts of a job for an encoder, which has no use for a prompt."""
    begins_text: bool = False
    """Whether the output is a text of its own, as an answer in a chat, and does not continue the prompt's text."""
    reasoning: ReasoningRule | None = None
    """How its choices may reason. `params` have the budget."""
    prepared: Prepared | None = None
    """The result of `Engine.prepare`; None: `Engine.add` prepares the request itself, and may take long."""


@dataclass(slots=True)
class StepOutput:
    """The output of one choice in a step; `position` is the index of `token_ids[0]` in the choice.

    Nothing changes it. It is not frozen, because each token makes one, and a frozen one takes five times as long.

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
    num_preemptions: int = 0
    """How often the choice was preempted so far."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of `token_ids`, where the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the whole prompt, once for a request, before or with its first token."""
    embedding: bytes = b""
    """The prompt's embedding, if the request asks for it: float32, little-endian. Its choice has no tokens."""
    texts: TextResults | None = None
    """What an encoder made of the texts of its request. Its choice has no tokens."""
    error: PenstockError | None = None
    """Why the choice failed, where its request is the reason."""
    prefill: PrefillProgress | None = None
    """How far the prompt is computed. Such an output has nothing else."""

    @property
    def is_first_or_last(self) -> bool:
        """Whether this is the choice's first or last output. A reader waits for both."""
        return self.position == 0 or self.finish_reason is not None


class StepLostError(Exception):
    """A step was lost with all KV blocks, because a rank of the runner ended. Its requests continue in later steps."""

    def __init__(self, requests: frozenset[str]) -> None:
        """requests: the ids of those in the lost step."""
        super().__init__(f"a step of {len(requests)} requests was lost")
        self.requests = requests


@dataclass(frozen=True, slots=True)
class RequestStep:
    """One step in which a request computed tokens."""

    ended_ms: float
    """Milliseconds from `add_request` until the step's tokens were known."""
    took_ms: float
    """From the step's submission until then."""
    num_tokens: int
    """Tokens of the request that the step computed, those of its prompt included."""


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Where the time of a request went. Times are milliseconds from `add_request`; None: not reached yet."""

    queued_ms: float | None
    """Until the request's first step began."""
    first_token_ms: float | None
    """Until `step` returned its first token."""
    ended_ms: float | None
    """Until it ended or was aborted."""
    steps: tuple[RequestStep, ...]
    cached_tokens: int
    """Prompt tokens that the prefix cache had."""
    num_preemptions: int
    """How often a choice of the request lost its blocks while it ran."""


@dataclass(frozen=True, slots=True)
class Generation(FirstChoice):
    """A prompt's finished choices, returned by `Engine.generate`.

    `text`, `token_ids` and `finish_reason` are those of the first choice.
    """

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


COUNTED = "counted"
"""The key of the metadata of a field that is a counter for Prometheus; its value is the help text."""


def counted(text: str) -> Any:
    """Return a field of EngineStats that counts from 0, and that metrics show under its name with this help text."""
    return field(default=0, metadata={COUNTED: text})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(EngineLoad):
    """A snapshot of the engine. Counters grow from its start; times cover the last few hundred steps.

    A step's time runs from its submission until its tokens are committed. Then schedule and prepare of the next step
    follow; the output of the first step is made while the next one runs. The five parts of a step are means.
    """

    steps: int
    search_blocks_needed: int = counted(
        "Blocks that beams and the choices of best_of would have held without sharing, summed over steps."
    )
    search_blocks_held: int = counted("Blocks that they held, summed over the same steps.")
    """1 - this ÷ `search_blocks_needed` is the share that sharing saved."""
    copied_blocks: int = counted("Blocks copied: for forks, swaps, and prefixes moved between device and host.")
    copy_ms: float = 0.0
    schedule_ms: float = 0.0
    """Time to schedule a step."""
    prepare_ms: float = 0.0
    """Time to build the runner's arrays and submit them."""
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    output_ms: float = 0.0
    """Time to turn tokens into text and outputs, while the next step runs."""
    grammar_trials: int = counted("New grammars that were tried out.")
    grammar_refusals: int = counted("New grammars that were refused.")
    grammar_costly_refusals: int = counted("New grammars that a limit of time, memory or work refused.")
    grammar_kills: int = counted("Grammar processes that a limit killed.")
    """Without those of trials."""
    grammar_restarts: int = counted("Grammar processes started to replace one that ended.")
    late_masks: int = counted("Times that a sequence sat out a step because its mask was not ready.")
    failed_guides: int = counted("Choices that ended because of their grammar.")
    grammar_host_failures: int = counted(
        "1 once the grammar processes cannot be served; requests with structured output fail from then on."
    )
    block_bytes: int = 0
    """Memory of a KV block over all layers, or over those without windows where these have blocks of their own."""
    window_block_bytes: int = 0
    """Memory of a block over the layers with windows."""
    state_slot_bytes: int = 0
    """Memory of a state over all recurrent layers."""
    gpu_uuid: str = ""
    """The GPU on which steps run; empty on the CPU."""
    part_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of all steps by part: schedule, prepare, copies, forward, sample and output."""
    kind_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of all steps by kind of work: foreground and background."""
    level_seconds: tuple[float, ...] = ()
    """Seconds of all steps by the levels of the jobs, their class and kind, most urgent first."""
    step_costs_ms: tuple[float, float, float] | None = None
    """What the model of step times says: fixed part, decoded token, prompt token; None before the first step."""
    background_held_back: int = counted("Times that a running background sequence skipped a step.")
    background_due: bool = False
    """Whether background work is below its share of engine time."""
    eager_steps: Mapping[str, int] = field(default_factory=dict)
    """Steps of a GPU that did not run as a CUDA graph, by the reason."""
    ranks: RankStats = NO_RANKS
    """The ranks that compute the model together."""
    step_seconds: Histogram | None = None
    batch_sequences: Histogram | None = None
    """Sequences of each step."""
    batch_tokens: Histogram | None = None
    """Tokens of each step: prompt tokens computed and tokens sampled."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's grammar, adapter and bad words. The grammar and the adapter stay loaded while this object lives."""

    grammar: Grammar | None
    adapter: Adapter | None
    bad_words: BadWords

    @property
    def adapter_digest(self) -> str | None:
        """The digest of the adapter's content, if there is one."""
        return None if self.adapter is None else self.adapter.digest
