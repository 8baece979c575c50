"""The sampling fields as keyword arguments: wider types than the checked record, whose fields they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from penstock.contract.structured import StructuredOutputs


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of `SamplingParams`, and of the client's `submit`; `SamplingParams` says what each means."""

    n: int
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
