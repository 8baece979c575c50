"""Offline use of an engine: a batch of prompts in, one result for each prompt out."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Protocol, TypeAlias, TypedDict, cast

import numpy as np

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import JobFailedError, RequestError
from penstock.contract.job import SamplingParams, seed_of
from penstock.contract.output import Choice, TokenLogprobs, Usage
from penstock.contract.priority import Priority, level_of
from penstock.contract.prompt import prompts_of
from penstock.contract.tasks import Embed, Embedding
from penstock.gpu_node.engine.records import EngineRequest, Generation, StepLostError, StepOutput
from penstock.gpu_node.engine.served_model import truncated
from penstock.gpu_node.engine.text.tokenizer import Tokenizer

log = logging.getLogger(__package__)


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Hold SIGINT back, because an interrupted step would leave queues and blocks half changed.

    Yields a function that delivers an interrupt that arrived; leaving the context does so too.

    A second interrupt is delivered at once, for a step that never ends. Python handles signals on the main thread only:
    on other threads, or without a handler in this process, nothing is held.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    act, came = handler, list[tuple[int, FrameType | None]]()

    def hold(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            let_through()

    def let_through() -> None:
        if came:
            last = came[-1]
            came.clear()
            act(*last)

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, handler)
        let_through()


Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Adapters: TypeAlias = str | Sequence[str | None] | None


def spread(
    prompts: Prompt | Sequence[Prompt], params: Params, adapters: Adapters, tokenizer: Tokenizer
) -> list[EngineRequest]:
    """Return a request for each prompt, with its index as id.

    Raises RequestError when the lists differ in length, an item is not a prompt, or a chat cannot be rendered.
    """
    prompts = prompts_of(prompts)
    params = SamplingParams() if params is None else params
    wanted = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    chosen = [adapters] * len(prompts) if adapters is None or isinstance(adapters, str) else list(adapters)
    for name, given in (("params", wanted), ("adapters", chosen)):
        if len(given) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(given)} {name}", param=name)
    batch, encoded = [], iter(tokenizer.encode_batch([prompt for prompt in prompts if isinstance(prompt, str)]))
    for i, (prompt, one, adapter_name) in enumerate(zip(prompts, wanted, chosen, strict=True)):
        adapter = None if adapter_name is None else AdapterRef(name=adapter_name)
        token_ids = truncated(next(encoded) if isinstance(prompt, str) else _tokens_of(prompt, tokenizer), one)
        begins_text, seed = _is_chat(prompt), seed_of(str(i), one)
        rule = tokenizer.reasoning_rule(None) if begins_text else None
        request = EngineRequest(str(i), token_ids, one, seed=seed, adapter=adapter, begins_text=begins_text)
        batch.append(request if rule is None else replace(request, reasoning=rule))
    return batch


class RequestOptions(TypedDict, total=False):
    """Optional arguments of `Engine.add_request`. Policies use tenant, class and `background`."""

    request_id: str
    """Default: a new one."""
    adapter: str | None
    tenant: str
    priority: Priority
    background: bool
    """Whether no caller waits for it."""


def one_request(
    prompt: Prompt,
    params: SamplingParams | None,
    tokenizer: Tokenizer,
    *,
    request_id: str,
    adapter: str | None = None,
    tenant: str = "default",
    priority: Priority = Priority.STANDARD,
    background: bool = False,
) -> EngineRequest:
    """Return the request for a prompt: a text, token ids or a chat. Raises RequestError as `spread` does."""
    (request,) = spread([prompt], params, adapter, tokenizer)
    return replace(
        request,
        request_id=request_id,
        seed=seed_of(request_id, request.params),
        tenant=tenant,
        level=level_of(priority, background),
        priority=int(priority),
        background=background,
    )


def embed_requests(
    prompts: Prompt | Sequence[Prompt], wanted: Embed, adapters: Adapters, tokenizer: Tokenizer
) -> list[EngineRequest]:
    """Return a request for the embedding of each prompt, as `spread` does. The model's prompt stands before texts."""
    before = tokenizer.embedding_prompts.before(wanted)
    texts = [before + one if isinstance(one, str) else one for one in prompts_of(prompts)]
    batch = spread(texts, SamplingParams(**wanted.sampling()), adapters, tokenizer)
    return [replace(request, embed=wanted) for request in batch]


class SteppedEngine(Protocol):
    """The part of an engine's interface that runs a batch."""

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""

    def abort(self, request_id: str) -> None:
        """Drop a request."""

    def has_work(self) -> bool:
        """Return whether a step has anything to do."""

    def step(self) -> list[StepOutput]:
        """Run one step and return its outputs."""


def step_of_any(engine: SteppedEngine) -> list[StepOutput]:
    """Run one step and return its outputs; none if the step was lost. The next one then computes all again."""
    try:
        return engine.step()
    except StepLostError as error:
        log.warning("a step was lost", extra={"reason": str(error.__cause__)})
        return []


def run_batch(engine: SteppedEngine, batch: list[EngineRequest], name: str) -> list[StepOutput]:
    """Run a batch and return all outputs. After an error or interrupt no request of it stays in the engine.

    `name`: the call, for the RequestError that is raised beside other requests.
    """
    if engine.num_requests:
        raise RequestError(f"{name} needs an engine without other requests")
    outputs: list[StepOutput] = []
    with held_interrupts() as let_through:
        try:
            for request in batch:
                engine.add(request)
            while engine.has_work():
                outputs += step_of_any(engine)
                let_through()
        except BaseException:
            for request in batch:
                engine.abort(request.request_id)
            raise
    return outputs


def embeddings_of(batch: list[EngineRequest], outputs: Sequence[StepOutput]) -> list[Embedding]:
    """Return the embedding of each request. Raises JobFailedError for a prompt at which the model failed."""
    vectors = {output.request_id: output.embedding for output in outputs}
    return [_embedding(request, vectors[request.request_id]) for request in batch]


def _embedding(request: EngineRequest, vector: bytes) -> Embedding:
    if not vector:
        message = f"the model computed NaN, infinity or zeros for prompt {request.request_id}"
        raise JobFailedError(message, code="model_error")
    return Embedding(tuple(np.frombuffer(vector, "<f4").tolist()), len(request.prompt_token_ids))


def generations_of(batch: list[EngineRequest], outputs: Sequence[StepOutput]) -> list[Generation]:
    """Return the finished choices of each request, joined from its outputs."""
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
    """Return the tokens of a prompt that is not a text."""
    if not isinstance(prompt, Sequence):
        raise RequestError("a prompt must be a text, token ids or a chat", param="prompts")
    if _is_chat(prompt):
        if not all(isinstance(message, Mapping) and "role" in message for message in prompt):
            raise RequestError("each message must have a role", param="messages")
        return tokenizer.encode_chat(cast("Sequence[Mapping[str, str]]", prompt))
    return list(cast("Sequence[int]", prompt))


def _is_chat(prompt: Prompt) -> bool:
    return bool(prompt) and isinstance(prompt[0], Mapping)


def _join(outputs: list[StepOutput]) -> Choice:
    return Choice(
        index=outputs[0].choice,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        finish_reason=outputs[-1].finish_reason,
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
    )
