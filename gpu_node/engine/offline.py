"""Prompts in any form to a batch of requests, and the batch's outputs back to one result a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, cast

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import RequestError
from penstock.contract.job import Choice, SamplingParams, Usage, seed_of
from penstock.contract.logprobs import TokenLogprobs
from penstock.gpu_node.engine.interrupts import held_interrupts
from penstock.gpu_node.engine.records import EngineRequest, Generation, StepOutput
from penstock.gpu_node.engine.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Adapters: TypeAlias = str | Sequence[str | None] | None


def spread(prompts: Sequence[Prompt], params: Params, adapters: Adapters, tokenizer: Tokenizer) -> list[EngineRequest]:
    """A request for each prompt, named by its index. Raises RequestError when the lists differ in length, a prompt is
    none, or a chat cannot be rendered.
    """
    if isinstance(prompts, str) or any(isinstance(prompt, int | Mapping) for prompt in prompts):
        message = "prompts must be a list, of which each is a text, token ids or the messages of a chat"
        raise RequestError(message, param="prompts")
    params = SamplingParams() if params is None else params
    wanted = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    named = [adapters] * len(prompts) if adapters is None or isinstance(adapters, str) else list(adapters)
    for name, given in (("params", wanted), ("adapters", named)):
        if len(given) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(given)} {name}", param=name)
    batch = []
    for i, (prompt, one, chosen) in enumerate(zip(prompts, wanted, named, strict=True)):
        adapter, token_ids = None if chosen is None else AdapterRef(name=chosen), _tokens_of(prompt, tokenizer)
        batch.append(EngineRequest(str(i), token_ids, one, seed=seed_of(str(i), one), adapter=adapter))
    return batch


class Steps(Protocol):
    """What a batch needs of an engine."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""

    def abort(self, request_id: str) -> None:
        """Drop one."""

    def has_work(self) -> bool:
        """Whether a step has anything to do."""

    def step(self) -> list[StepOutput]:
        """What one step gave."""


def run(engine: Steps, batch: list[EngineRequest]) -> list[StepOutput]:
    """All that an engine says to a batch; what fails or is interrupted leaves none of it."""
    outputs: list[StepOutput] = []
    with held_interrupts() as let_through:
        try:
            for request in batch:
                engine.add(request)
            while engine.has_work():
                outputs += engine.step()
                let_through()
        except BaseException:
            for request in batch:
                engine.abort(request.request_id)
            raise
    return outputs


def gather(batch: list[EngineRequest], outputs: Sequence[StepOutput]) -> list[Generation]:
    """The finished choices of each request."""
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
            prompt_token_ids=tuple(request.prompt_token_ids),
            choices=tuple(_join(by_choice[request.request_id, choice]) for choice in range(request.params.n)),
            usage=usages[request.request_id],
            prompt_logprobs=prompt_logprobs.get(request.request_id, ()),
        )
        for request in batch
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
