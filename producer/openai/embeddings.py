"""The fields of a `/v1/embeddings` body, for HTTP and for rows of batches, and the JSON of its answer in parts."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AliasChoices, ConfigDict, Field, PlainValidator
from pydantic_core import to_json

from penstock.contract.fields import WHOLE_NUMBER, Hint, Whole, Wire, only
from penstock.contract.output import Usage
from penstock.contract.sampling import SamplingParams
from penstock.contract.tasks import (
    MAX_DIMENSIONS,
    Embed,
    InputType,
    Pooling,
    PromptName,
    TruncatedTokens,
    TruncationSide,
)
from penstock.contract.tools import NO_TOOLS, ToolUse
from penstock.producer.openai.bodies import prompts_of

MAX_INPUTS = 2048
"""Most texts of one request or row, as in OpenAI's API."""
NUMBERS_PER_PART = 512
"""Numbers of a vector that are rendered at once, which takes 0.2 ms."""
_Input: TypeAlias = str | list[str] | list[int] | list[list[int]]


class TaskFields(Wire):
    """The base of bodies that ask for a task. A task samples nothing and calls no tools."""

    template_kwargs: ClassVar[None] = None
    echoes: ClassVar[bool] = False

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The served model. It may be omitted if only one model is served."""
    cache_salt: Annotated[Any, only(None)] = None

    def params(self) -> SamplingParams:
        """Return the default sampling options."""
        return SamplingParams()

    def tool_use(self) -> ToolUse:
        """Return the tools that a chat offers."""
        return NO_TOOLS

    def options(self) -> dict[str, Any]:
        """Return the options of the answer: none."""
        return {}


class TextFields(TaskFields):
    """The fields that all bodies share whose texts a model computes whole."""

    truncate_prompt_tokens: Annotated[TruncatedTokens, WHOLE_NUMBER] | None = None
    """Keep only that many of a text's tokens; -1: as many as the model's context takes. A model that generates text
    keeps the last ones, an encoder the first ones with the marks around the text. Default: a longer text is refused."""
    truncation_side: TruncationSide | None = None
    """The end of a text that is cut off. Default: `right` for an encoder, `left` for a model that generates text."""
    user: Hint = None
    add_special_tokens: Annotated[Any, only(None, True)] = None
    mm_processor_kwargs: Annotated[Any, only(None, {})] = None

    def cut(self) -> dict[str, Any]:
        """Return the options of the task that say how to shorten a long text."""
        return {"truncate_prompt_tokens": self.truncate_prompt_tokens, "truncation_side": self.truncation_side}


class EmbedFields(TextFields):
    """The fields that all bodies with texts to embed share."""

    pooling: Pooling | None = None
    """How the hidden states of a text become one vector: `mean` of all tokens, `last` token or `cls` (first token).
    Default: what the model's files say, or else `mean`."""
    prompt_name: PromptName | None = None
    """Put the model's prompt of this name before each text; only encoders have prompts. Default: the model's own."""

    def embed(self) -> Embed:
        """Return the embedding of each text."""
        return Embed(pooling=self.pooling, prompt_name=self.prompt_name, **self.cut())


def _inputs_of(value: object) -> list[str | list[int]]:
    return prompts_of(value, MAX_INPUTS)


Inputs: TypeAlias = Annotated[list[str | list[int]], PlainValidator(_inputs_of, json_schema_input_type=_Input)]
"""Texts, or their token ids."""


class EmbeddingFields(EmbedFields):
    """The fields of a `/v1/embeddings` body."""

    model_config = ConfigDict(use_attribute_docstrings=True, populate_by_name=True)

    input: Inputs
    """A text, a list of token ids, or a list of either."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64` stands for the bytes of the numbers: float32, little-endian. Default: `float`."""
    dimensions: Annotated[Whole, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    """Keep only the first dimensions, and normalize again. Useful only if the model was trained for it."""
    normalize: bool | None = None
    """Whether vectors have length 1; only encoders may leave it out. Default: as the model's files say."""
    input_type: Annotated[InputType | None, Field(validation_alias=AliasChoices("input_type", "task"))] = None
    """What the texts are for, in the words of Cohere or Jina, such as `search_query`. An encoder puts its prompt for
    that before each text, if it has one."""

    def names(self) -> dict[str, str]:
        """Map penstock's field names to the names in this body where they differ."""
        return {"prompt": "input"}

    def prompts(self) -> list[str | list[int]]:
        """Return the texts."""
        return [*self.input]

    def task(self) -> Embed:
        """Return what the job does with each text."""
        told = {"dimensions": self.dimensions, "normalize": self.normalize, "input_type": self.input_type}
        return self.embed().model_copy(update=told)

    def options(self) -> dict[str, Any]:
        """Return the encoding of the answer."""
        return {"base64": self.encoding_format == "base64"}


# OpenAI's answer of `/v1/embeddings`.


def embeddings_head(model: str) -> bytes:
    """Return the JSON before the embeddings."""
    return b'{"object":"list","model":%b,"data":[' % to_json(model)


def embedding_parts(index: int, values: array[float], *, as_base64: bool) -> Iterator[bytes]:
    """Yield the JSON of one text's embedding."""
    yield b'%b{"object":"embedding","index":%d,"embedding":' % (b"," if index else b"", index)
    yield from vector_parts(values, as_base64=as_base64)
    yield b"}"


def vector_parts(values: array[float], *, as_base64: bool) -> Iterator[bytes]:
    """Yield the JSON of a vector: an array of numbers, or the bytes of these."""
    if not as_base64:
        yield from numbers_of(values)
        return
    if sys.byteorder == "big":
        values.byteswap()
    yield b'"%b"' % base64.b64encode(values.tobytes())


def list_tail(usages: Sequence[Usage | None]) -> bytes:
    """Return the end of a list of what became of texts, and the usage of all jobs."""
    num_tokens = sum(usage.prompt_tokens for usage in usages if usage is not None)
    return b'],"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (num_tokens, num_tokens)


def numbers_of(values: array[float]) -> Iterator[bytes]:
    """Yield a JSON array of numbers in parts. Nine digits identify a float32."""
    for start in range(0, len(values), NUMBERS_PER_PART):
        part = b",".join([b"%.9g" % value for value in values[start : start + NUMBERS_PER_PART]])
        yield (b"," if start else b"[") + part
    yield b"]"
