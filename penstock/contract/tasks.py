"""Tasks: what a job may ask of a node instead of generated text, and the outputs of these jobs.

A job without a task generates text. Its kind is `generate`; a task is named by its own kind. The kind is in the job's
request, and a pool's record lists the kinds that its nodes know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

from pydantic import Field

from penstock.contract.named import CheckedInput

GENERATE = "generate"
MAX_TASK_TOKENS = 1 << 20
"""Tokens of a task's prompt."""
MAX_TASK_BYTES = 8 << 20
"""Bytes of a task's text."""
MAX_OUTPUT_BYTES = 15 << 20
"""Bytes of a task's packed output. A result has at most 16 MiB."""


class Tokenize(CheckedInput):
    """Return the tokens of a text or a chat.

    - `add_special_tokens`: add the special tokens that the model expects around a text. None: do so for a text, but not
      for a chat, whose template contains them.
    - `add_generation_prompt`: end a chat where the assistant's answer begins.
    - `return_tokens`: return the tokens, not only their number.
    - `return_token_strs`: also return the tokens as the vocabulary spells them.
    """

    num_sequences: ClassVar[int] = 0
    """Sequences that the job occupies in an engine. A job without sequences needs no KV cache."""

    kind: Literal["tokenize"] = "tokenize"
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_tokens: bool = True
    return_token_strs: bool = False


class Detokenize(CheckedInput):
    """Return the text of tokens, special tokens included."""

    num_sequences: ClassVar[int] = 0

    kind: Literal["detokenize"] = "detokenize"


Task: TypeAlias = Annotated[Tokenize | Detokenize, Field(discriminator="kind")]
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


TaskOutput = Tokenized | Detokenized
