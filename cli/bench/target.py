"""The server under load: its model, the bodies of its requests, and the probes before the load."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from random import Random
from typing import Any

from penstock.cli.bench.connection import MAX_WHOLE_BYTES, Address, AnswerRecorder, Connections, request_bytes
from penstock.cli.bench.prompts import Prompt, RequestRecord, TokenRatio, words
from penstock.contract.errors import RequestError, UnavailableError

_FEW_WORDS, _MANY_WORDS = 16, 144
"""Words of the prompts of the two probes."""
PROBE_TIMEOUT_S = 120.0
"""Seconds for the answer to the first request. A server may load its model for that request."""
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class _WholeAnswer(AnswerRecorder):
    """Collects the body of an answer that is not a stream."""

    def __init__(self) -> None:
        super().__init__(RequestRecord(0.0))
        self.status = 0
        self.body = b""

    def begin(self, status: int, content_type: str) -> None:
        self.status = status

    def feed(self, data: bytes, now_s: float) -> None:
        if len(self.body) < MAX_WHOLE_BYTES:
            self.body += data

    def end(self, now_s: float) -> None:
        pass


@dataclass(frozen=True)
class Target:
    """The server's address, and what every request of the load has in common."""

    address: Address
    path: str
    model: str
    headers: Mapping[str, str]
    extra_body: Mapping[str, Any]
    asks_for_usage: bool = True

    @property
    def is_chat(self) -> bool:
        """Whether prompts are sent as messages."""
        return self.path.endswith("/chat/completions")

    def request(self, prompt: Prompt, max_tokens: int) -> bytes:
        """Return the HTTP request for a prompt. Raises RequestError for messages to a completions endpoint."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "stream": True}
        if self.asks_for_usage:
            body["stream_options"] = {"include_usage": True}
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        elif isinstance(prompt, str):
            body["prompt"] = prompt
        else:
            raise RequestError("endpoint: prompts that are messages need --endpoint chat", param="endpoint")
        text = json.dumps(body | dict(self.extra_body), ensure_ascii=False).encode(errors="replace")
        return request_bytes(self.address, "POST", self.path, self.headers, text)


def path_of(endpoint: str) -> str:
    """Return the path of `chat`, `completions`, or a path that ends like theirs. Raises RequestError."""
    path = _PATHS.get(endpoint, endpoint)
    if not path.startswith("/") or not path.endswith("/completions"):
        raise RequestError("endpoint: must be chat, completions, or a path that ends in /completions", param="endpoint")
    return path


async def first_model(connections: Connections, headers: Mapping[str, str]) -> str:
    """Return the first model of /v1/models. Raises UnavailableError or RequestError."""
    answer = _WholeAnswer()
    request = request_bytes(connections.address, "GET", "/v1/models", headers)
    await connections.exchange(request, answer, time.perf_counter(), PROBE_TIMEOUT_S)
    if answer.record.error:
        raise _unreachable(connections.address, answer.record)
    if answer.status == HTTPStatus.UNAUTHORIZED:
        problem = "the server refuses the API key" if "Authorization" in headers else "the server requires an API key"
        raise RequestError(f"api_key: {problem}; give --api-key or OPENAI_API_KEY", param="api_key")
    try:
        if answer.status != HTTPStatus.OK:
            raise ValueError(f"HTTP {answer.status}")
        return str(json.loads(answer.body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise RequestError(f"model: /v1/models names none ({error}); give --model", param="model") from error


async def probed(target: Target, connections: Connections) -> tuple[Target, TokenRatio, list[str]]:
    """Send two short requests. Return the target with options that the server accepts, its tokens per word, and notes.

    A server that refuses `stream_options` is asked without it. Raises UnavailableError or RequestError.
    """
    notes = []
    few = await _probe(target, connections, _FEW_WORDS)
    if few.error in ("HTTP 400", "HTTP 422") and target.asks_for_usage:
        without = replace(target, asks_for_usage=False)
        if not (again := await _probe(without, connections, _FEW_WORDS)).error:
            target, few = without, again
            notes.append("The server refuses stream_options.include_usage.")
    if few.error in ("cannot connect", "timeout"):
        raise _unreachable(target.address, few)
    if few.error:
        raise RequestError(f"the server refuses a short request: {few.error}: {few.detail}")
    many = await _probe(target, connections, _MANY_WORDS)
    if few.prompt_tokens is None or many.prompt_tokens is None:
        notes.append("The server reports no usage: one word of a prompt counts as one token.")
        return target, TokenRatio(), notes
    return target, TokenRatio.measured((_FEW_WORDS, few.prompt_tokens), (_MANY_WORDS, many.prompt_tokens)), notes


async def _probe(target: Target, connections: Connections, num_words: int) -> RequestRecord:
    record = RequestRecord(0.0)
    request = target.request(words(Random(), num_words), 1)
    await connections.exchange(request, AnswerRecorder(record), time.perf_counter(), PROBE_TIMEOUT_S)
    return record


def _unreachable(address: Address, record: RequestRecord) -> UnavailableError:
    message = f"no answer from {address.host_header}: {record.error}: {record.detail}; --base-url names another server"
    return UnavailableError(message)
