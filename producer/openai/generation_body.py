"""The request fields that chats and completions share, and vLLM's fields that only accept a neutral value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import FailFast, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from penstock.contract.job import MAX_METADATA, Metadata
from penstock.contract.priority import ClassName
from penstock.contract.sampling import MAX_ALTERNATIVES, OPENAI, SamplingParams
from penstock.contract.tools import closed
from penstock.producer.openai.fields import Hint, Wire, at_most, given_options, only, with_option_fields

_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Older names of vLLM → the members of `structured_outputs`."""

CLASS_OF_TIER: dict[str, ClassName] = {"flex": "batch", "priority": "interactive"}
"""OpenAI's service tiers that ask for a class. The other tiers ask for the caller's usual class."""


class _NamedSchema(Wire):
    """A JSON schema with a name and description. It is enforced whether or not `strict` is set.

    With `strict: false`, its objects may have properties that it does not name.
    """

    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def enforced(self) -> dict[str, Any]:
        """Return the schema that the text must match."""
        return self.schema_ if self.strict is False else closed(self.schema_)


class ResponseFormat(Wire):
    """OpenAI's `response_format`: plain text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "unsupported_value", "json_schema is required with type json_schema and only there"
            )
        return self

    def structured_outputs(self) -> dict[str, Any] | None:
        """Return the equivalent value of penstock's `structured_outputs` field."""
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.enforced()}
        return {"json_object": True} if self.type == "json_object" else None


class VllmFields(Wire):
    """Fields of vLLM's bodies that are accepted only with the value that changes nothing."""

    request_id: Hint = None
    session_id: Hint = None
    skip_special_tokens: Annotated[Any, only(None, True)] = None
    spaces_between_special_tokens: Annotated[Any, only(None, True)] = None
    truncation_side: Annotated[Any, only(None, "left")] = None
    allowed_token_ids: Annotated[Any, only(None)] = None
    logprob_token_ids: Annotated[Any, only(None)] = None
    return_tokens_as_token_ids: Annotated[Any, only(None, False)] = None
    logits_processors: Annotated[Any, only(None, [])] = None
    thinking_token_budget: Annotated[Any, only(None, -1)] = None
    include_reasoning: Annotated[Any, only(None, True)] = None
    repetition_detection: Annotated[Any, only(None)] = None
    watermarking: Annotated[Any, only(None, False)] = None
    kv_transfer_params: Annotated[Any, only(None)] = None
    vllm_xargs: Annotated[Any, only(None, {})] = None
    mm_processor_kwargs: Annotated[Any, only(None, {})] = None
    media_io_kwargs: Annotated[Any, only(None, {})] = None
    guided_decoding_backend: Annotated[Any, only(None)] = None


if TYPE_CHECKING:
    _SampledBody = VllmFields
else:
    _SampledBody = with_option_fields(VllmFields, OPENAI, SamplingParams, lenient=True)


class GenerationBody(_SampledBody):
    """Fields that chats and completions share: the sampling options, and these."""

    prompt_field: ClassVar[str]

    response_format: ResponseFormat | None = None
    # Older names of vLLM for the members of `structured_outputs`.
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str] | None, FailFast(), Field(max_length=MAX_ALTERNATIVES)] = None
    guided_grammar: str | None = None

    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """`flex` is the class `batch`, `priority` the class `interactive`. Each answer names the tier that it got."""

    user: Hint = None
    metadata: Annotated[Metadata | None, at_most(MAX_METADATA)] = None
    safety_identifier: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None

    @field_validator("response_format")
    @classmethod
    def _one_schema(cls, value: ResponseFormat | None, info: ValidationInfo) -> ResponseFormat | None:
        if value is not None and info.data.get("structured_outputs") is not None:
            raise PydanticCustomError("unsupported_value", "conflicts with structured_outputs; send one of them")
        return value

    @field_validator(*_GUIDED)
    @classmethod
    def _one_constraint(cls, value: object, info: ValidationInfo) -> object:
        others = ("structured_outputs", "response_format", *_GUIDED)
        if value is not None and (other := next((one for one in others if info.data.get(one) is not None), None)):
            message = "conflicts with {other}; send one of them"
            raise PydanticCustomError("unsupported_value", message, {"other": other})
        return value

    @property
    def _guided(self) -> str | None:
        """The older name of vLLM by which the body constrains the text, or None."""
        return next((name for name in _GUIDED if getattr(self, name) is not None), None)

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        names = {"prompt": self.prompt_field}
        constraint = "response_format" if self.response_format is not None else self._guided
        return names if constraint is None else names | {"structured_outputs": constraint}

    @property
    def template_kwargs(self) -> str | None:
        """The variables for the chat template as JSON text, or None."""
        return None

    def _given(self) -> dict[str, Any]:
        values = given_options(self, SamplingParams, OPENAI)
        if self.response_format is not None and (wanted := self.response_format.structured_outputs()) is not None:
            values["structured_outputs"] = wanted
        elif (guided := self._guided) is not None:
            values["structured_outputs"] = {_GUIDED[guided]: getattr(self, guided)}
        return values
