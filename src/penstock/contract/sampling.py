"""Sampling options, each declared once: type, default, bounds, names in HTTP bodies, and flag of `submit` and `chat`.

Bodies, refusals, flags and tables of fields are made from `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypedDict

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    FailFast,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.contract.fields import MESSAGES, OPENAI, RESPONSES, WRONG_MEMBER, CheckedInput, Endpoint, Named, Option
from penstock.contract.fields import Text as Text
from penstock.contract.fields import TokenId as TokenId
from penstock.contract.fields import encodable as encodable
from penstock.contract.output import MAX_LOGPROBS
from penstock.contract.tools import JsonNumberError, WantedCalls, json_of, json_text

if TYPE_CHECKING:
    from typing import Unpack

# Structured outputs. Nodes compile them into masks of allowed tokens.

MAX_SCHEMA_CHARS = 1 << 18
MAX_GRAMMAR_CHARS = 1 << 16
MAX_REGEX_CHARS = 1 << 13
MAX_ALTERNATIVES = 1024
MAX_ALTERNATIVE_CHARS = 1024
MAX_CHOICE_CHARS = 1 << 18
"""Characters of all alternatives of `choice` together."""

Alternative = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ALTERNATIVE_CHARS)]


class StructuredOutputs(Named):
    """The constraint that the output must satisfy; exactly one field is set.

    `json_schema` (alias `json`, kept as text): JSON that matches the schema. `json_object`: any JSON object. `regex`: a
    full match. `choice`: one of these texts. `grammar`: a text derived from a Lark grammar. `calls`: tool calls in the
    model's own syntax.
    """

    json_schema: Annotated[str, StringConstraints(max_length=MAX_SCHEMA_CHARS)] | None = Field(
        default=None, validation_alias=AliasChoices("json_schema", "json")
    )
    json_object: bool = False
    regex: Annotated[str, StringConstraints(min_length=1, max_length=MAX_REGEX_CHARS)] | None = None
    choice: Annotated[tuple[Alternative, ...] | None, FailFast()] = Field(
        default=None, min_length=1, max_length=MAX_ALTERNATIVES
    )
    grammar: Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None = None
    calls: WantedCalls | None = None

    if TYPE_CHECKING:
        # Callers may give a schema as a mapping and a choice as a list; fields hold text and a tuple.
        def __init__(
            self,
            *,
            json: Mapping[str, Any] | str | None = None,
            json_schema: Mapping[str, Any] | str | None = None,
            json_object: bool = False,
            regex: str | None = None,
            choice: Sequence[str] | None = None,
            grammar: str | None = None,
            calls: WantedCalls | None = None,
        ) -> None: ...

    @field_validator("json_schema", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        try:
            if isinstance(value, Mapping):
                return json_text(value)
            is_schema = value is None or isinstance(json_of(value), dict)
        except JsonNumberError:
            raise
        except (TypeError, ValueError, RecursionError):
            is_schema = False
        if not is_schema:
            raise ValueError("a JSON schema must be a JSON object, or the text of one")
        return value

    @field_validator("choice")
    @classmethod
    def _not_too_much_text(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        num_chars = sum(map(len, value or ()))
        if num_chars > MAX_CHOICE_CHARS:
            raise ValueError(f"the alternatives have {num_chars} characters together; the limit is {MAX_CHOICE_CHARS}")
        return value

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(type(self).model_fields)
            raise ValueError(f"exactly one of {names} must be given, not {given or 'none'}")
        return self


_NOT_ANTHROPIC: Mapping[Endpoint, None] = {MESSAGES: None}
_ONLY_OPENAI: Mapping[Endpoint, None] = {RESPONSES: None, MESSAGES: None}
_RECOMMENDED = "Default: what the model recommends."

# Samplers compute in float32. Within these ranges no score overflows, whatever the other options are.

MIN_REPETITION_PENALTY = 0.01
MIN_TEMPERATURE = 1e-5
"""A lower temperature counts as 0, as in vLLM: clients send 1e-8 where an API refuses 0."""
MIN_TOP_P = 1e-6
"""A lower value counts as this one. Both keep only the most likely token."""

MAX_CHOICES = 16
"""Also the most of `best_of` and `beam_width`."""
MAX_LENGTH_PENALTY = 10.0
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 64
MAX_CACHE_SALT_CHARS = 256
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_TOKENS_LIMIT = 1 << 20


NOT_WITH_BEAM_SEARCH = (
    *("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"),
    *("stop", "reasoning_budget", "logit_bias", "bad_words", "structured_outputs", "logprobs"),
)
"""Sampling options that beam search does not have. `temperature` may be 0 or 1."""
_OF_SEARCH = frozenset(("best_of", "beam_width", "length_penalty", "early_stopping", "use_beam_search"))


def _limit_of(budget: object) -> object:
    # In vLLM and llama.cpp, -1 asks for no limit, whatever the server's default is.
    return MAX_TOKENS_LIMIT if budget == -1 else budget


Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CACHE_SALT_CHARS), AfterValidator(encodable)]


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
    - `reasoning_budget`: after so many tokens of reasoning in a chat, the text that ends the reasoning follows. -1: no
      limit. It has no effect on a model that does not reason.
    - `logprobs` is the number of most likely tokens reported with each output token. Their log-probabilities are taken
      before all steps above. `prompt_logprobs` does the same for prompt tokens.
    - `truncate_prompt_tokens` keeps only that many of the prompt's last tokens.
    - `return_token_ids` reports the token ids of the prompt: as `prompt_logprobs` without values.
    - `cache_salt`: only the tenant's jobs with the same value share cached prefixes with this one.
    - `seed`: None derives it from the job's id, so that a job submitted twice samples the same tokens.
    - `best_of` samples so many choices and returns the `n` with the highest mean log-probability of a token.
    - `use_beam_search` searches for the most likely choices instead of sampling. `beam_width`: the choices that it
      follows at once, by default `best_of`, else `n`; it returns the `n` best. A choice's score is the sum of its
      tokens' log-probabilities ÷ its number of tokens to the power of `length_penalty`. `early_stopping`: True ends the
      search once `beam_width` choices are complete. False ends it once the best open one has no higher score at its
      length, "never" once it can have none at any length.
    """

    n: Annotated[int, Option(_ONLY_OPENAI)] = Field(default=1, ge=1, le=MAX_CHOICES)
    best_of: Annotated[int | None, Option(_ONLY_OPENAI)] = Field(default=None, ge=1, le=MAX_CHOICES)
    use_beam_search: Annotated[bool, Option(_ONLY_OPENAI)] = False
    beam_width: Annotated[int | None, Option(_ONLY_OPENAI)] = Field(default=None, ge=1, le=MAX_CHOICES)
    length_penalty: Annotated[float, Option(_ONLY_OPENAI)] = Field(
        default=1.0, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY
    )
    early_stopping: Annotated[Literal[True, False, "never"], Option(_ONLY_OPENAI)] = False
    temperature: Annotated[
        float, Option(flag=f"Sampling temperature. 0 always picks the most likely token. {_RECOMMENDED}")
    ] = Field(default=1.0, ge=0.0, le=10.0)
    top_p: Annotated[
        float, Option(flag=f"Sample from the most likely tokens that together reach this probability. {_RECOMMENDED}")
    ] = Field(default=1.0, ge=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, lt=1 << 31)
    min_p: Annotated[
        float,
        Option(
            _NOT_ANTHROPIC,
            flag=f"Drop tokens below this fraction of the most likely token's probability. {_RECOMMENDED}",
        ),
    ] = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: Annotated[float, Option(_NOT_ANTHROPIC)] = Field(
        default=1.0, ge=MIN_REPETITION_PENALTY, le=10.0
    )
    presence_penalty: Annotated[
        float, Option(_NOT_ANTHROPIC, flag="Lower the score of tokens that already occurred in the answer. Default: 0.")
    ] = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: Annotated[
        float,
        Option(
            _NOT_ANTHROPIC, flag="Lower the score of a token for each earlier occurrence in the answer. Default: 0."
        ),
    ] = Field(default=0.0, ge=-2.0, le=2.0)
    seed: Annotated[
        int | None, Option(_NOT_ANTHROPIC, flag="Random seed. The same seed gives the same answer. Default: random.")
    ] = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    max_tokens: Annotated[
        int | None,
        Option(
            {RESPONSES: "max_output_tokens"},
            flag="Most tokens of the answer. Default: up to the model's context length.",
        ),
    ] = Field(default=None, ge=1, le=MAX_TOKENS_LIMIT)
    min_tokens: Annotated[int, Option(_ONLY_OPENAI)] = Field(default=0, ge=0, le=MAX_TOKENS_LIMIT)
    ignore_eos: Annotated[bool, Option(_NOT_ANTHROPIC)] = False
    stop: Annotated[
        tuple[StopString, ...],
        Option(
            {MESSAGES: "stop_sequences"},
            one_is_enough=True,
            flag="End the answer before this text. Repeat it for several.",
        ),
    ] = Field(default=(), max_length=MAX_STOP_STRINGS)
    reasoning_budget: Annotated[
        int | None,
        BeforeValidator(_limit_of),
        Option(
            {OPENAI: "thinking_token_budget", RESPONSES: "reasoning.max_tokens", MESSAGES: "thinking.budget_tokens"},
            flag="Tokens of reasoning after which the model must answer. Default: the setting of the model's nodes.",
        ),
    ] = Field(default=None, ge=1, le=MAX_TOKENS_LIMIT)
    stop_token_ids: Annotated[tuple[TokenId, ...], Option(_ONLY_OPENAI, one_is_enough=True)] = Field(
        default=(), max_length=MAX_STOP_TOKEN_IDS
    )
    include_stop_str_in_output: Annotated[bool, Option(_ONLY_OPENAI)] = False
    logit_bias: Annotated[dict[TokenId, Bias], Option(_ONLY_OPENAI)] = Field(default={}, max_length=MAX_LOGIT_BIASES)
    bad_words: Annotated[tuple[StopString, ...], Option(_ONLY_OPENAI)] = Field(default=(), max_length=MAX_BAD_WORDS)
    structured_outputs: Annotated[
        StructuredOutputs | None, Option({RESPONSES: "text.format", MESSAGES: "output_config.format"})
    ] = None
    """The schema or grammar that the text must match."""
    logprobs: Annotated[int | None, Option({OPENAI: None, RESPONSES: "top_logprobs", MESSAGES: None})] = Field(
        default=None, ge=0, le=MAX_LOGPROBS
    )
    prompt_logprobs: Annotated[int | None, Option({OPENAI: None, RESPONSES: None, MESSAGES: None})] = Field(
        default=None, ge=0, le=MAX_LOGPROBS
    )
    truncate_prompt_tokens: Annotated[int | None, Option(_ONLY_OPENAI)] = Field(default=None, ge=1, le=MAX_TOKENS_LIMIT)
    return_token_ids: Annotated[bool, Option(_ONLY_OPENAI)] = False
    cache_salt: CacheSalt | None = None

    if TYPE_CHECKING:
        # A type checker would otherwise want what the fields hold, so a tuple for `stop`, where callers give a list.
        def __init__(self, **given: Unpack[SamplingOptions]) -> None: ...

    @property
    def needs_token_details(self) -> bool:
        """Whether log-probabilities or the prompt's token ids are asked for."""
        return self.logprobs is not None or self.prompt_logprobs is not None or self.return_token_ids

    @property
    def num_sequences(self) -> int:
        """The choices that are computed, of which `n` are returned."""
        width = self.beam_width if self.use_beam_search else None
        return max(self.n, width or self.best_of or 1)

    @property
    def withholds_output(self) -> bool:
        """Whether no output exists before all choices are complete, because these are ranked then."""
        return self.use_beam_search or self.num_sequences > self.n

    @model_validator(mode="after")
    def _search_is_whole(self) -> Self:
        if self.model_fields_set.isdisjoint(_OF_SEARCH):
            return self
        for name in ("best_of", "beam_width"):
            if (given := getattr(self, name)) is not None and given < self.n:
                raise _on(name, f"{given} is less than n ({self.n})")
        of_search = (self.beam_width is not None, self.length_penalty != 1.0, self.early_stopping is not False)
        for name, is_given in zip(("beam_width", "length_penalty", "early_stopping"), of_search, strict=True):
            if is_given and not self.use_beam_search:
                raise _on(name, "needs use_beam_search")
        if self.use_beam_search:
            self._check_beam_search()
        return self

    def _check_beam_search(self) -> None:
        if self.best_of is not None and self.beam_width not in (None, self.best_of):
            raise _on("beam_width", f"conflicts with best_of ({self.best_of}); send one of them")
        if self.temperature not in (0.0, 1.0):
            raise _on("temperature", "has no effect with use_beam_search; omit it")
        fields = type(self).model_fields
        for name in NOT_WITH_BEAM_SEARCH:
            if getattr(self, name) != fields[name].default:
                raise _on(name, "cannot be combined with use_beam_search")

    @field_validator("temperature")
    @classmethod
    def _greedy_near_zero(cls, value: float) -> float:
        return value if value >= MIN_TEMPERATURE else 0.0

    @field_validator("top_p")
    @classmethod
    def _not_zero_in_float32(cls, value: float) -> float:
        return max(value, MIN_TOP_P)

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


def _on(field: str, message: str) -> PydanticCustomError:
    """Return the error of a check of several fields, which refuses one of them."""
    return PydanticCustomError("unsupported_value", "{message}", {WRONG_MEMBER: field, "message": message})


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of `SamplingParams`, and of the client's `submit`, for type checkers.

    The types are wider than those of the fields that the arguments become.
    """

    n: int
    best_of: int | None
    use_beam_search: bool
    beam_width: int | None
    length_penalty: float
    early_stopping: bool | Literal["never"]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stop: str | Sequence[str]
    reasoning_budget: int | None
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None
    logprobs: int | None
    prompt_logprobs: int | None
    truncate_prompt_tokens: int | None
    return_token_ids: bool
    cache_salt: str | None


def lowered_max_tokens(max_tokens: int | None, max_total_tokens: int | None, num_prompt_tokens: int) -> int | None:
    """Return what a prompt leaves of `max_total_tokens`, or None if it leaves `max_tokens` or more, or nothing."""
    if max_tokens is None or max_total_tokens is None:
        return None
    left = max_total_tokens - num_prompt_tokens
    return left if 0 < left < max_tokens else None
