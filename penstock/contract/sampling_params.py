"""Sampling parameters: how a job's tokens are chosen and where its choices end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator, model_validator

from penstock.contract.logprobs import MAX_LOGPROBS
from penstock.contract.structured import StructuredOutputs

if TYPE_CHECKING:
    from typing import Unpack

    from penstock.contract.sampling_options import SamplingOptions

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_TOKENS_LIMIT = 1 << 20

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_STRING_CHARS)]


class CheckedInput(BaseModel):
    """Base of records from callers: frozen; unknown fields, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


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
