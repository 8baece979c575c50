"""A gateway over real Redis and a real node, whose engine echoes the prompt: tests choose the answer."""

from __future__ import annotations

import asyncio
import codecs
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import openai
import pytest
import uvicorn
from fakes.processes.child_process import ChildProcess
from fakes.processes.fork_client import PARSER, command_of
from fakes.processes.reference_engine import packed_fake_embedding
from fastapi import FastAPI
from starlette.routing import Route

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import PromptTooLongError, RequestError
from penstock.contract.job import SamplingParams
from penstock.contract.output import TokenLogprobs, Usage
from penstock.contract.tool_formats import NO_CALLS
from penstock.contract.tools import reasoning_parser_for
from penstock.gateway.app import make_server
from penstock.gateway.request import reading
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.engine.records import EngineRequest, EngineStats, StepOutput
from penstock.gpu_node.engine.text.prompts import NO_PROMPTS
from penstock.gpu_node.engine.text.reasoning import ReasoningRule, ReasoningState
from penstock.gpu_node.model.protocol import NO_RANKS, RankStats
from penstock.gpu_node.node import Node
from penstock.gpu_node.settings import NodeSettings
from penstock.producer.client import AsyncClient

T = TypeVar("T")
Name = TypeVar("Name", bound=str)
MODEL = "acme/echo"
DIGEST = "0123456789abcdef" * 2
"""Of its only adapter, echo-tuned."""
MAX_PROMPT_TOKENS = 256
MAX_MODEL_LEN = 2 * MAX_PROMPT_TOKENS
"""Of the echoing engine: a prompt that it accepts leaves enough tokens for its echo."""
START_TIMEOUT_S = 60.0


class ByteTokenizer:
    """One token per byte. A chat is encoded as its last message."""

    max_token_bytes = 64
    tool_format = NO_CALLS
    embedding_prompts = NO_PROMPTS
    reasoning_parser = "none"
    thinking_switches: tuple[str, ...] = ()
    takes_effort = False

    def __init__(self) -> None:
        self.last_chat: tuple[Sequence[dict[str, Any]], str | None] | None = None
        self.last_template_kwargs: str | None = None
        self.last_framed: bool | None = None

    @property
    def backend(self) -> ByteTokenizer:
        return self

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Any]:
        lengths = [len(text.encode()) for text in texts]
        return [
            SimpleNamespace(offsets=[(at, at + 1) for at in range(length)], special_tokens_mask=[0] * length)
            for length in lengths
        ]

    def reasoning_rule(self, template_kwargs: str | None) -> ReasoningRule:
        """Return that each answer in a chat may reason in the usual marks."""
        parser = reasoning_parser_for(self.reasoning_parser, self.thinking_switches, template_kwargs)
        opening = b"" if parser == "think_open" else b"<think>"
        return ReasoningRule(b"</think>", tuple(b"</think>"), [bytes([byte]) for byte in range(256)], opening)

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        return list(text.encode())

    def encode_prompt(self, text: str, owner: object) -> list[int]:
        return self.encode(text)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: str | None = None,
        template_kwargs: str | None = None,
        *,
        framed: bool = False,
        now: datetime | None = None,
        owner: object = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        self.last_chat, self.last_template_kwargs, self.last_framed = (messages, tools), template_kwargs, framed
        return self.encode(messages[-1]["content"])

    @property
    def last_options(self) -> tuple[bool, bool]:
        """Whether the last chat ended with the beginning of an answer, and whether it was framed."""
        variables = json.loads(self.last_template_kwargs or "{}")
        return variables.get("add_generation_prompt", True), bool(self.last_framed)

    def names_of(self, token_ids: Sequence[int]) -> list[str]:
        return [f"<{token_id}>" for token_id in token_ids]

    def text_of(self, token_ids: Sequence[int]) -> str:
        if max(token_ids) > 255:
            raise RequestError(
                f"token id {max(token_ids)} is not in the model's vocabulary of 256 tokens", param="prompt"
            )
        return bytes(token_ids).decode(errors="replace")


@dataclass
class _Live:
    request_id: str
    choice: int
    prompt: Sequence[int]
    params: SamplingParams
    reasoning: ReasoningState | None = None
    num_said: int = 0
    text: str = ""
    decoder: codecs.IncrementalDecoder = field(default_factory=codecs.getincrementaldecoder("utf-8"))


class EchoEngine:
    """Echoes each prompt, one byte a step. `step_s`: seconds per step."""

    max_prompt_tokens = MAX_PROMPT_TOKENS

    def __init__(self) -> None:
        self.tokenizer, self.texts = ByteTokenizer(), None
        self.pairs = None
        self.max_model_len = MAX_MODEL_LEN
        self.num_kv_tokens = 1 << 16
        self.window_tokens = None
        self.revision = "echo"
        self.leaves_core_free = False
        self.background_due = False
        self.sampling_defaults: dict[str, int | float] = {}
        self.step_s = 0.0
        self.may_go_on = threading.Event()
        """While it is clear, requests wait after `waits_after` tokens: a reader sees the first of these alone.

        Other requests go on.
        """
        self.may_go_on.set()
        self.waits_after = 1
        self.last_params: SamplingParams | None = None
        self.last_adapter: AdapterRef | None = None
        self._live: list[_Live] = []
        self._embeddings: list[tuple[str, int, bytes]] = []
        """Of each request for one: its id, the number of its tokens, and the vector."""
        self._num_steps = 0

    def capabilities(self) -> tuple[str, ...]:
        return ()

    def note_queued_background(self, is_queued: bool) -> None:
        pass

    def has_foreground(self) -> bool:
        return bool(self._live)

    def note_foreground_beside(self) -> None:
        pass

    def add(self, request: EngineRequest) -> None:
        prompt, params = request.prompt_token_ids, request.params
        if len(prompt) >= (self.max_prompt_tokens if request.embed is None else self.max_model_len + 1):
            raise PromptTooLongError(f"maximum context length, {len(prompt)} tokens are too many", param="prompt")
        self.last_params, self.last_adapter = params, request.adapter
        if request.embed is not None:
            self._embeddings.append((request.request_id, len(prompt), packed_fake_embedding(prompt, request.embed)))
            return
        for choice in range(params.n):
            reasoning = None if request.reasoning is None else ReasoningState(request.reasoning)
            self._live.append(_Live(request.request_id, choice, prompt, params, reasoning))

    def prepare(self, params: SamplingParams, adapter: AdapterRef | None = None, *, tenant: str = "default") -> None:
        pass

    def adapters(self) -> dict[str, str]:
        return {"echo-tuned": DIGEST}

    def abort(self, request_id: str) -> None:
        self._live = [live for live in self._live if live.request_id != request_id]
        self._embeddings = [one for one in self._embeddings if one[0] != request_id]

    def has_work(self) -> bool:
        return bool(self._live or self._embeddings)

    def bind_thread(self) -> None:
        """Do nothing: the engine needs no particular core."""

    def wait(self) -> None:
        pass

    @property
    def ranks(self) -> RankStats:
        return NO_RANKS

    def requests_in_flight(self) -> set[str]:
        """Return no ids: no step of this engine hangs."""
        return set()

    def num_preemptions(self, request_id: str) -> int:
        return 0

    def memory_trail(self) -> list[str]:
        return []

    def step(self) -> list[StepOutput]:
        time.sleep(self.step_s)
        going_on = [live for live in self._live if live.num_said < self.waits_after or self.may_go_on.is_set()]
        if not going_on and not self._embeddings:
            self.may_go_on.wait(0.005)
        self._num_steps += 1
        embeddings, self._embeddings = self._embeddings, []
        outputs = [
            StepOutput(request_id, 0, 0, (), "", "stop", Usage(num_tokens, 0), embedding=vector)
            for request_id, num_tokens, vector in embeddings
        ]
        return outputs + [self._advance(live) for live in going_on]

    def _advance(self, live: _Live) -> StepOutput:
        at = live.num_said
        token = live.prompt[at]
        live.num_said += 1
        text = live.decoder.decode(bytes([token]))
        if live.reasoning is not None:
            live.reasoning.push((token,))
        stopped = bool(text) and text in live.params.stop
        reason = None
        if stopped or live.num_said == len(live.prompt):
            reason = "stop"
        elif live.num_said == live.params.max_tokens:
            reason = "length"
        usage = None
        if reason:
            self._live.remove(live)
            if not any(other.request_id == live.request_id for other in self._live):
                num_thought = live.params.n * (0 if live.reasoning is None else live.reasoning.num_tokens)
                usage = Usage(len(live.prompt), live.params.n * live.num_said, 0, num_thought)
        is_hidden = stopped and not live.params.include_stop_str_in_output
        output = StepOutput(live.request_id, live.choice, at, (token,), "" if is_hidden else text, reason, usage)
        if live.params.logprobs is not None:
            output = replace(output, logprobs=(self.logprobs_of(token, live.params.logprobs),))
        if live.params.prompt_logprobs is not None and at == live.choice == 0:
            first, *rest = live.prompt
            logprobs = (self.logprobs_of(one, live.params.prompt_logprobs) for one in rest)
            output = replace(output, prompt_logprobs=(TokenLogprobs((first,), (), (bytes([first]),)), *logprobs))
        return output

    @staticmethod
    def logprobs_of(token: int, num_logprobs: int) -> TokenLogprobs:
        """Return a byte and the bytes after it, each half as likely as the one before. 127 is a special token."""
        ids = (token, *((token + i) % 256 for i in range(num_logprobs)))
        values = (-1.0, *(-1.0 - i for i in range(num_logprobs)))
        return TokenLogprobs(ids, values, tuple("<end>" if one == 127 else bytes([one]) for one in ids))

    def stats(self) -> EngineStats:
        total = self.num_kv_tokens // 16
        return EngineStats(
            kv_blocks_total=total,
            kv_blocks_free=total,
            num_running=len(self._live),
            steps=self._num_steps,
            prefill_tokens=0,
            decode_tokens=0,
            step_ms_p50=1.0,
            step_ms_p99=1.0,
        )


class Stack:
    """Redis, and an event loop in its own thread for nodes and gateways."""

    def __init__(self, redis_url: str) -> None:
        self.redis_url = redis_url
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._stops: list[Callable[[], Coroutine[Any, Any, None]]] = []

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the stack's loop. Return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(START_TIMEOUT_S)

    def start_node(self, engine: EchoEngine, **settings: Any) -> Node:
        """Start a node with `engine`."""
        return self.call(self._start_node(engine, settings))

    async def _start_node(self, engine: EchoEngine, settings: dict[str, Any]) -> Node:
        node = Node(NodeSettings.load(**{"redis_url": self.redis_url, **settings}), engine)
        ready = asyncio.Event()
        task = asyncio.create_task(node.run(ready))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()

        async def stop() -> None:
            node.stop()
            node.stop()
            await task

        self._stops.append(stop)
        return node

    def start_gateway(self, *, pepper: str = "", **settings: Any) -> str:
        """Start a gateway on a free port. Return its URL."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("PENSTOCK_KEY_PEPPER", pepper)
            return self.call(self._start_gateway({"redis_url": self.redis_url, **settings}))

    async def _start_gateway(self, settings: dict[str, Any]) -> str:
        server = make_server(GatewaySettings.load(port=0, drain_s=1, **settings))
        task = asyncio.create_task(server.serve())
        while not server.started:
            if task.done():
                task.result()
            await asyncio.sleep(0.01)

        async def stop() -> None:
            server.should_exit = True
            await task

        self._stops.append(stop)
        return f"http://127.0.0.1:{port_of(server)}"

    def client(self) -> AsyncClient:
        """Return a client of the same Redis, for use on the stack's loop."""
        return AsyncClient(self.redis_url)

    def close(self) -> None:
        """Close everything, in reverse order of the starts."""
        for stop in reversed(self._stops):
            self.call(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextmanager
def clients_with(url: str, made: Mapping[Name, str]) -> Iterator[dict[Name, httpx.Client]]:
    """Yield a client for each API key, by the key's name."""
    with ExitStack() as opened:
        yield {
            name: opened.enter_context(
                httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60)
            )
            for name, key in made.items()
        }


def port_of(server: uvicorn.Server) -> int:
    """Return the port that a started server listens on."""
    return int(server.servers[0].sockets[0].getsockname()[1])


@pytest.fixture(scope="session", autouse=True)
def _forked_parser() -> Iterator[None]:
    """These gateways start their parser process as a fork: an interpreter imports for half a second.

    Gateways that are processes themselves (test_large_answers.py) start it as outside of tests.
    """
    server = ChildProcess.session_server()
    server.open()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reading, "_PARSER", command_of(server.address, *PARSER))
        yield


@pytest.fixture(scope="module")
def redis_url(redis_url_of_file: str) -> str:
    """URL of the session's Redis, emptied for each test file instead of for each test."""
    return redis_url_of_file


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    stack = Stack(redis_url)
    yield stack
    stack.close()


@pytest.fixture(scope="module")
def shared_engine(stack: Stack) -> EchoEngine:
    engine = EchoEngine()
    stack.start_node(engine, model=MODEL, pool="echo", aliases=("echo-alias",), reattach_grace_ms=500)
    return engine


@pytest.fixture
def engine(shared_engine: EchoEngine) -> Iterator[EchoEngine]:
    """The one node's engine, without a delay unless the test sets one."""
    shared_engine.step_s = 0.0
    yield shared_engine
    shared_engine.step_s = 0.0
    shared_engine.waits_after = 1
    shared_engine.may_go_on.set()


@pytest.fixture(scope="module")
def url(stack: Stack, shared_engine: EchoEngine) -> str:
    """A gateway with default settings in front of the node."""
    return stack.start_gateway()


@pytest.fixture
def api(url: str, engine: EchoEngine) -> Iterator[openai.OpenAI]:
    """OpenAI's official client."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(url: str, engine: EchoEngine) -> Iterator[httpx.Client]:
    """A plain HTTP client, for requests that OpenAI's client would not send."""
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def routes_of(app: FastAPI) -> list[Route]:
    """The routes that OpenAPI can describe. WebSockets are none."""
    return [route for route in app.routes if isinstance(route, Route) and route.include_in_schema]
