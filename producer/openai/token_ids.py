"""Token ids in answers, in the shape of vLLM's `return_token_ids`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.contract.output import Result
from penstock.producer.openai.json_parts import Rows
from penstock.queue.results import PackedResult


class TokenIds(NamedTuple):
    """The token ids that a stream object reports."""

    of_choice: Sequence[int]
    """Ids of the choice's new tokens."""
    of_prompt: Sequence[int] | None = None
    """Ids of the whole prompt, in the first object that shows them."""


def prompt_ids_of(result: Result | PackedResult) -> Rows:
    """Return the ids of a result's prompt, which are decoded when they are written."""
    return Rows(lambda: (entry.token_ids[0] for entry in result.prompt_logprobs))
