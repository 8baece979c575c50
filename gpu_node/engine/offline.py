"""Prompts in any form to a batch of requests, and the batch's outputs back to one result a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, cast

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import RequestError
from penstock.contract.job import Choice, SamplingParams, Usage, seed_of
from penstock.contract.logprobs import TokenLogprobs
from penstock.gpu_node.engine.records import Generation, StepOutput
from penstock.gpu_node.engine.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
Adapters: TypeAlias = str | Sequence[str | None] | None


class Asked(NamedTuple):
    """One request of a batch."""

    token_ids: list[int]
    params: SamplingParams
    adapter: str | None


def spread(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    adapters: Adapters,
    tokenizer: Tokenizer,
) -> list[Asked]:
    """Each prompt's tokens with what goes with it. Raises RequestError when the lists differ in length or a chat
    cannot be rendered.
    """
    wanted = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    named = [adapters] * len(prompts) if adapters is None or isinstance(adapters, str) else list(adapters)
    for name, given in (("params", wanted), ("adapters", named)):
        if len(given) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(given)} {name}", param=name)
    tokens = (_tokens_of(prompt, tokenizer) for prompt in prompts)
    return [Asked(*one) for one in zip(tokens, wanted, named, strict=True)]


class Steps(Protocol):
    """What a batch needs of an engine."""

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        adapter: AdapterRef | None,
    ) -> None:
        """Queue a request."""

    def abort(self, request_id: str) -> None:
        """Drop one."""

    def has_work(self) -> bool:
        """Whether a step has anything to do."""

    def step(self) -> list[StepOutput]:
        """What one step gave."""


def run(engine: Steps, batch: list[Asked]) -> list[StepOutput]:
    """All that an engine says to a batch, whose requests are named by their index; what fails leaves none of them."""
    outputs: list[StepOutput] = []
    try:
        for i, (prompt, wanted, name) in enumerate(batch):
            adapter = None if name is None else AdapterRef(name=name)
            engine.add(str(i), prompt, wanted, seed=seed_of(str(i), wanted), adapter=adapter)
        while engine.has_work():
            outputs += engine.step()
    except BaseException:
        for i in range(len(batch)):
            engine.abort(str(i))
        raise
    return outputs


def gather(batch: list[Asked], outputs: Sequence[StepOutput]) -> list[Generation]:
    """The finished choices of each prompt; requests are named by their index in the batch."""
    by_choice: dict[tuple[str, int], list[StepOutput]] = {}
    usages: dict[str, Usage] = {}
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
    for output in outputs:
        by_choice.setdefault((output.request_id, output.choice), []).append(output)
        if output.usage is not None:
            usages[output.request_id] = output.usage
        if output.prompt_logprobs:
            prompt_logprobs[output.request_id] = output.prompt_logprobs
    return [
        Generation(
            prompt_token_ids=tuple(prompt),
            choices=tuple(_join(by_choice[str(i), choice]) for choice in range(params.n)),
            usage=usages[str(i)],
            prompt_logprobs=prompt_logprobs.get(str(i), ()),
        )
        for i, (prompt, params, _) in enumerate(batch)
    ]


def _tokens_of(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if prompt and isinstance(prompt[0], Mapping):
        if not all(isinstance(turn, Mapping) and "role" in turn for turn in prompt):
            raise RequestError("each message must have a role", param="messages")
        return tokenizer.encode_chat(cast("Sequence[Mapping[str, str]]", prompt))
    return list(cast("Sequence[int]", prompt))


def _join(outputs: list[StepOutput]) -> Choice:
    return Choice(
        index=outputs[0].choice,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        finish_reason=outputs[-1].finish_reason,
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
    )
