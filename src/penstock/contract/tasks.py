"""Tasks: what a job may ask of a node instead of generated text, and the outputs of these jobs.

A job without a task generates text. Its kind is `generate`; a task is named by its own kind. The kind is in the job's
request, and a pool's record lists the kinds that its nodes know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, get_args

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from penstock.contract.fields import CheckedInput

GENERATE = "generate"
MAX_TASK_TOKENS = 1 << 20
"""Tokens of a task's prompt."""
MAX_TASK_BYTES = 8 << 20
"""Bytes of a task's text."""
MAX_OUTPUT_BYTES = 15 << 20
"""Bytes of a task's packed output. A result has at most 16 MiB."""
MAX_DIMENSIONS = 1 << 16
"""Dimensions of an embedding that a request may ask for. The model's hidden size is the limit that matters."""

WHOLE_CONTEXT = -1
"""The value of `truncate_prompt_tokens` that stands for the length of the model's context."""

Pooling: TypeAlias = Literal["mean", "last", "cls"]
"""How the hidden states of a prompt become one vector: their mean, that of the last token, or that of the first."""


class TaskOptions(CheckedInput):
    """Base of tasks."""

    num_sequences: ClassVar[int] = 0
    """Sequences that the job occupies in an engine. A job without sequences needs no KV cache."""

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters of the job's sequences, where they are not the defaults."""
        return {}


class Tokenize(TaskOptions):
    """Return the tokens of a text or a chat.

    - `add_special_tokens`: add the special tokens that the model expects around a text. None: do so for a text, but not
      for a chat, whose template contains them.
    - `add_generation_prompt`: end a chat where the assistant's answer begins.
    - `return_tokens`: return the tokens, not only their number.
    - `return_token_strs`: also return the tokens as the vocabulary spells them.
    """

    kind: Literal["tokenize"] = "tokenize"
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_tokens: bool = True
    return_token_strs: bool = False


class Detokenize(TaskOptions):
    """Return the text of tokens, special tokens included."""

    kind: Literal["detokenize"] = "detokenize"


def _not_zero(num_tokens: int) -> int:
    if num_tokens == 0:
        raise PydanticCustomError("no_tokens", "must be at least 1, or -1 for the length of the model's context")
    return num_tokens


TruncatedTokens = Annotated[int, Field(ge=WHOLE_CONTEXT, le=MAX_TASK_TOKENS), AfterValidator(_not_zero)]
"""A number of tokens to keep, or WHOLE_CONTEXT."""


class Embed(TaskOptions):
    """Return the embedding of a prompt: the model's final hidden states, pooled to one vector of length 1.

    - `pooling`: how the hidden states become one vector. None: as the model's files say, or else `mean`.
    - `dimensions`: keep only the first dimensions of the vector and normalize it again.
    - `truncate_prompt_tokens`: keep only that many of the prompt's last tokens; WHOLE_CONTEXT: as many as the model's
      context takes. Jobs in the queue have the number itself.
    """

    num_sequences: ClassVar[int] = 1

    kind: Literal["embed"] = "embed"
    pooling: Pooling | None = None
    dimensions: int | None = Field(default=None, ge=1, le=MAX_DIMENSIONS)
    truncate_prompt_tokens: TruncatedTokens | None = None

    def within(self, max_model_len: int) -> Self:
        """Return the task with a number in place of WHOLE_CONTEXT. `max_model_len`: the model's context; 0: unknown."""
        if self.truncate_prompt_tokens != WHOLE_CONTEXT:
            return self
        return self.model_copy(update={"truncate_prompt_tokens": max_model_len or None})

    def sampling(self) -> dict[str, Any]:
        """Return the parameters of a sequence that ends with its prompt."""
        return {"temperature": 0.0, "max_tokens": 1, "truncate_prompt_tokens": self.truncate_prompt_tokens}


Task: TypeAlias = Annotated[Tokenize | Detokenize | Embed, Field(discriminator="kind")]
KINDS: tuple[str, ...] = (GENERATE, *(one.model_fields["kind"].default for one in get_args(get_args(Task)[0])))
"""The kinds of jobs that nodes of this release know."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The output of `Tokenize`. `token_ids` is empty if only the number was requested."""

    num_tokens: int
    max_model_len: int
    token_ids: tuple[int, ...] = ()
    token_strs: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Detokenized:
    """The output of `Detokenize`."""

    text: str


@dataclass(frozen=True, slots=True)
class Embedding:
    """The output of `Embed`: a vector of length 1, and the number of tokens that it represents."""

    values: tuple[float, ...]
    num_tokens: int


TaskOutput = Tokenized | Detokenized | Embedding
