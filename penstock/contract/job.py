"""Jobs and their sampling parameters. pydantic checks both where they enter: client, HTTP or batch file."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo, field_validator, model_validator

from penstock.contract.adapters import AdapterRef
from penstock.contract.logprobs import MAX_LOGPROBS
from penstock.contract.named import NAME_PATTERN, CheckedInput
from penstock.contract.packed_prompt import PackedPrompt
from penstock.contract.priority import Priority as Priority
from penstock.contract.sampling import StructuredOutputs
from penstock.contract.tasks import GENERATE, Detokenize, Embed, Task
from penstock.contract.tools import MAX_CALLS, MAX_CALLS_OF_CHAT, CallId, TemplateKwargs, ToolCall, Tools, few_calls

if TYPE_CHECKING:
    from typing import Unpack

    from penstock.contract.sampling import SamplingOptions

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 64
MAX_CACHE_SALT_CHARS = 256
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_TOKENS_LIMIT = 1 << 20
PREDICTED_OUTPUT_TOKENS = 256
"""Predicted output tokens per choice, or max_tokens if less, until nodes report measured lengths."""
MAX_MESSAGES = 4096
MAX_PARTICIPANT_NAME_CHARS = 256
"""Characters of the `name` of a message."""
MAX_DEADLINE_S = 7 * 24 * 3600
_UUID7_PATTERN = r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
JOB_ID_PATTERN = rf"^[A-Za-z0-9_-]{{1,64}}(~[0-9]{{1,4}})?\.{_UUID7_PATTERN}$"


def _encodable(text: str) -> str:
    try:
        # Fifteen times as fast as checking each character, which would block the event loop.
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text must be valid Unicode, without lone surrogates") from None
    return text


TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Text = Annotated[str, AfterValidator(_encodable)]
CacheSalt = Annotated[Text, StringConstraints(min_length=1, max_length=MAX_CACHE_SALT_CHARS)]
ParticipantName = Annotated[Text, StringConstraints(min_length=1, max_length=MAX_PARTICIPANT_NAME_CHARS)]


class SamplingParams(CheckedInput):
    """How tokens are sampled and when a choice ends. Names and meanings follow vLLM's.

    - `temperature`: 0 is greedy. `top_k`: 0 or -1 means no limit.
    - `min_p` drops each token whose probability is below this fraction of the most likely token's probability.
    - `repetition_penalty` counts prompt and output. `presence_penalty` and `frequency_penalty` count the output only;
      a negative value favors tokens that already occurred.
    - `logit_bias` maps a token id to an offset, which is added to its logit before all other steps.
    - `bad_words` are texts; their token sequences are never generated.
    - `include_stop_str_in_output` keeps the stop string that ended a choice in its text.
    - `max_tokens`: None generates up to the model's limit.
    - `logprobs` is the number of most likely tokens reported with each output token. Their log-probabilities are taken
      before all steps above. `prompt_logprobs` does the same for prompt tokens.
    - `truncate_prompt_tokens` keeps only that many of the prompt's last tokens.
    - `return_token_ids` reports the token ids of the prompt: as `prompt_logprobs` without values.
    - `cache_salt`: only the tenant's jobs with the same value share cached prefixes with this one.
    - `seed`: None derives it from the job's id, so that a job submitted twice samples the same tokens.
    """

    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, lt=1 << 31)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS_LIMIT)
    min_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS_LIMIT)
    ignore_eos: bool = False
    stop: tuple[StopString, ...] = Field(default=(), max_length=MAX_STOP_STRINGS)
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool = False
    logit_bias: dict[TokenId, Bias] = Field(default={}, max_length=MAX_LOGIT_BIASES)
    bad_words: tuple[StopString, ...] = Field(default=(), max_length=MAX_BAD_WORDS)
    structured_outputs: StructuredOutputs | None = None
    """The schema or grammar that the text must match."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    truncate_prompt_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS_LIMIT)
    return_token_ids: bool = False
    cache_salt: CacheSalt | None = None

    if TYPE_CHECKING:
        # A type checker would otherwise want what the fields hold, so a tuple for `stop`, where callers give a list.
        def __init__(self, **given: Unpack[SamplingOptions]) -> None: ...

    @property
    def needs_token_details(self) -> bool:
        """Whether log-probabilities or the prompt's token ids are asked for."""
        return self.logprobs is not None or self.prompt_logprobs is not None or self.return_token_ids

    @field_validator("logit_bias")
    @classmethod
    def _by_id(cls, value: dict[int, float]) -> dict[int, float]:
        return dict(sorted(value.items()))

    @model_validator(mode="before")
    @classmethod
    def _one_stop_string(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("stop"), str):
            return {**data, "stop": (data["stop"],)}
        return data

    @field_validator("min_tokens")
    @classmethod
    def _min_below_max(cls, value: int, info: ValidationInfo) -> int:
        max_tokens = info.data.get("max_tokens")
        if max_tokens is not None and value > max_tokens:
            raise ValueError(f"{value} must not exceed max_tokens ({max_tokens})")
        return value

    @field_validator("structured_outputs")
    @classmethod
    def _ends_by_itself(cls, value: StructuredOutputs | None, info: ValidationInfo) -> StructuredOutputs | None:
        if value is not None and (info.data.get("min_tokens") or info.data.get("ignore_eos")):
            raise ValueError("determines where the text ends; it cannot be combined with min_tokens or ignore_eos")
        return value


class Message(CheckedInput):
    """One message of a chat. With role `tool`, it holds the result of the call `tool_call_id`.

    `name` is the participant's name, for chat templates that use it.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text
    tool_calls: tuple[ToolCall, ...] = Field(default=(), max_length=MAX_CALLS)
    tool_call_id: CallId | None = None
    name: ParticipantName | None = None


class JobDef(CheckedInput):
    """One request as submitted: a prompt in exactly one of three forms, sampling parameters, and queueing options.

    `id` is `<pool>.<uuidv7>`. The caller creates it, so that a retried submit is the same job. `deadline_ms` and
    `not_before_ms` are durations from the moment of submission. Until `not_before_ms` has passed, no node takes the job
    and its priority does not age. A job with `background` false is canceled when it loses all its readers.
    """

    id: Annotated[str, StringConstraints(pattern=JOB_ID_PATTERN)]
    prompt: Text | None = None
    prompt_token_ids: tuple[TokenId, ...] | None = Field(default=None, min_length=1)
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    packed_prompt: PackedPrompt | None = Field(default=None, repr=False)
    """A prompt in any of the three forms, already checked and packed by another process."""
    tools: Tools | None = None
    """The functions that the chat's assistant may call."""
    chat_template_kwargs: TemplateKwargs | None = None
    """Variables for the model's chat template."""
    adapter: AdapterRef | None = None
    """The LoRA adapter that the model runs with."""
    task: Task | None = None
    """What to do with the prompt instead of generating text from it."""
    params: SamplingParams = SamplingParams()
    tenant: Name = "default"
    priority: Priority = Priority.STANDARD
    deadline_ms: int | None = Field(default=None, ge=1, le=1000 * MAX_DEADLINE_S)
    not_before_ms: int | None = Field(default=None, ge=0, le=1000 * MAX_DEADLINE_S)
    background: bool = True
    max_total_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_LIMIT)] | None = None
    """The most tokens of prompt and output together, to which the node lowers `params.max_tokens`. It is part of the
    job, so every node that runs it lowers the limit alike. None: a larger `max_tokens` is refused."""
    return_progress: bool = False
    """Whether the node reports to the readers how far it has computed the prompt."""
    idempotency_key: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None

    @field_validator("messages")
    @classmethod
    def _few_calls(cls, value: Any) -> Any:
        # HTTP bodies, batch files and nodes call few_calls themselves, before they validate messages of others.
        num_calls = sum(len(message.tool_calls) for message in value or ())
        return value if num_calls <= MAX_CALLS_OF_CHAT else few_calls(value)

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        names, packed = ("prompt", "prompt_token_ids", "messages"), self.packed_prompt
        given = [name for name in (*names, "packed_prompt") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(names)} must be given, not {given or 'none'}")
        is_chat = self.messages is not None or (packed is not None and packed.form == "messages")
        for name in ("tools", "chat_template_kwargs"):
            if getattr(self, name) is not None and not is_chat:
                raise ValueError(f"{name} may be given only together with messages")
        return self

    @model_validator(mode="after")
    def _task_fits(self) -> Self:
        if self.task is None:
            return self
        if self.params != SamplingParams():
            raise ValueError(f"a job of kind {self.kind} has no sampling parameters")
        if self.adapter is not None and not self.num_sequences:
            raise ValueError(f"a job of kind {self.kind} has no adapter")
        if isinstance(self.task, Embed):
            return self
        packed = self.packed_prompt
        has_ids = self.prompt_token_ids is not None or (packed is not None and packed.form == "tokens")
        if has_ids != isinstance(self.task, Detokenize):
            wanted = "token ids" if isinstance(self.task, Detokenize) else "a text or a chat"
            raise ValueError(f"the prompt of a job of kind {self.kind} must be {wanted}")
        return self

    @model_validator(mode="after")
    def _begins_before_deadline(self) -> Self:
        if self.deadline_ms is not None and (self.not_before_ms or 0) >= self.deadline_ms:
            raise ValueError(f"not_before_ms ({self.not_before_ms}) must be less than deadline_ms ({self.deadline_ms})")
        return self

    @property
    def kind(self) -> str:
        """The kind of job, which names its task."""
        return GENERATE if self.task is None else self.task.kind

    @property
    def num_sequences(self) -> int:
        """The sequences that the job occupies in an engine; 0 for a task that needs no engine."""
        return self.params.n if self.task is None else self.task.num_sequences

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of the job's sequences: the caller's, or those of its task."""
        return self.params if self.task is None else SamplingParams(**self.task.sampling())

    @property
    def pool(self) -> str:
        """The pool (a served model and its nodes) that the id names."""
        return pool_of(self.id)


def lowered_max_tokens(max_tokens: int | None, max_total_tokens: int | None, num_prompt_tokens: int) -> int | None:
    """Return what a prompt leaves of `max_total_tokens`, or None if it leaves `max_tokens` or more, or nothing."""
    if max_tokens is None or max_total_tokens is None:
        return None
    left = max_total_tokens - num_prompt_tokens
    return left if 0 < left < max_tokens else None


def pool_of(job_id: str) -> str:
    """Return the pool that a job id names."""
    return job_id.partition(".")[0]


def is_job_id(text: str) -> bool:
    """Return whether `text` has the form of a job id."""
    return re.fullmatch(JOB_ID_PATTERN, text) is not None


def created_at(job_id: str) -> datetime:
    """Return the time in a job's id, in UTC. A UUIDv7 begins with the Unix time in milliseconds."""
    uuid = job_id.rpartition(".")[2].replace("-", "")
    return datetime.fromtimestamp(int(uuid[:12], 16) / 1000, UTC)


def seed_of(job_id: str, params: SamplingParams) -> int:
    """Return the job's 64-bit seed: the caller's, else one derived from the job id."""
    if params.seed is not None:
        return params.seed & 0xFFFF_FFFF_FFFF_FFFF
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class JobKey:
    """An idempotency key and the tenant that it belongs to."""

    tenant: str
    key: str

    def rank_of(self, pool: str) -> bytes:
        """Return the rank of a pool for this key. Every process computes the same one (rendezvous hashing)."""
        text = "\0".join((pool, self.tenant, self.key))
        return hashlib.blake2b(text.encode(), digest_size=8).digest()
