"""Offline generation: a batch of prompts in, one result for each prompt out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, cast

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import RequestError
from penstock.contract.job import SamplingParams, seed_of
from penstock.contract.logprobs import TokenLogprobs
from penstock.contract.output import Choice, Usage
from penstock.gpu_node.engine.interrupts import held_interrupts
from penstock.gpu_node.engine.records import EngineRequest, Generation, StepOutput
from penstock.gpu_node.engine.request import truncated
from penstock.gpu_node.engine.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Adapters: TypeAlias = str | Sequence[str | None] | None


def spread(prompts: Sequence[Prompt], params: Params, adapters: Adapters, tokenizer: Tokenizer) -> list[EngineRequest]:
    """Return a request for each prompt, with its index as id.

    Raises RequestError when the lists differ in length, an item is not a prompt, or a chat cannot be rendered.
    """
    if isinstance(prompts, str) or any(isinstance(prompt, int | Mapping) for prompt in prompts):
        message = "prompts must be a list; each prompt is a text, a list of token ids or a list of chat messages"
        raise RequestError(message, param="prompts")
    params = SamplingParams() if params is None else params
    wanted = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    chosen = [adapters] * len(prompts) if adapters is None or isinstance(adapters, str) else list(adapters)
    for name, given in (("params", wanted), ("adapters", chosen)):
        if len(given) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(given)} {name}", param=name)
    batch = []
    for i, (prompt, one, adapter_name) in enumerate(zip(prompts, wanted, chosen, strict=True)):
        adapter = None if adapter_name is None else AdapterRef(name=adapter_name)
        token_ids = truncated(_tokens_of(prompt, tokenizer), one)
        batch.append(EngineRequest(str(i), token_ids, one, seed=seed_of(str(i), one), adapter=adapter))
    return batch


class Steps(Protocol):
    """The methods of an engine that a batch uses."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""

    def abort(self, request_id: str) -> None:
        """Drop a request."""

    def has_work(self) -> bool:
        """Return whether a step has anything to do."""

    def step(self) -> list[StepOutput]:
        """Run one step and return its outputs."""


def run(engine: Steps, batch: list[EngineRequest]) -> list[StepOutput]:
    """Run a batch and return all outputs. After an error or interrupt no request of the batch stays in the engine."""
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
    """Join the outputs of each request to its finished choices."""
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
        if not all(isinstance(message, Mapping) and "role" in message for message in prompt):
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
