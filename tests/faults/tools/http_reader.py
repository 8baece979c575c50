"""Reads a completion's events over HTTP until the end or a disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

import httpx
from fakes.processes.reference_engine import reference_prompt_logprobs
from faults.tools.processes import GatewayProcess
from faults.tools.work import PROMPT, Work

from penstock.contract.job import pool_of
from penstock.producer.openai.json_parts import prompt_logprobs

TIMEOUT_S = 60.0
_PAUSE_S = 0.05
"""Before a stream that broke is continued."""
JOB_HEADER = "x-penstock-job"
_ASKED = ("temperature", "n", "stop", "max_tokens", "prompt_logprobs")


def http_client() -> httpx.AsyncClient:
    """Return a client to be shared by readings: each new one would load certificates again."""
    return httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))


_COME_BACK = (429, 503)
"""No capacity, or all nodes were killed at once: retry, as after a cut connection."""


class HttpReading:
    """One request and the text that it received, until its end or a disconnect."""

    def __init__(self) -> None:
        self.job_id = ""
        self.texts: dict[int, str] = {}
        self.finishes: dict[int, str] = {}
        self.of_prompt: dict[int, list[Any]] = {}
        self.num_events = 0
        self.is_whole = False
        self.error = ""
        """The code of the error that the last request ended with."""
        self._last_id = ""

    async def read(
        self, http: httpx.AsyncClient, url: str, work: Work, *, key: str, max_events: int | None = None
    ) -> None:
        """Request with an idempotency key, disconnect after `max_events`. A second call continues the stream."""
        self.error = ""
        asked = {name: work.options[name] for name in _ASKED if name in work.options}
        body: dict[str, Any] = {"model": pool_of(work.id), "prompt": PROMPT, "stream": True, **asked}
        try:
            path, headers = f"{url}/v1/completions", {"Idempotency-Key": key, "Last-Event-ID": self._last_id}
            async with http.stream("POST", path, json=body, headers=headers) as response:
                if response.status_code in _COME_BACK:
                    return
                response.raise_for_status()
                if JOB_HEADER not in response.headers:
                    # The port of a gateway that was killed is another's by now.
                    return
                self.job_id, next_id = response.headers[JOB_HEADER], ""
                async for line in response.aiter_lines():
                    if line.startswith("id: "):
                        next_id = line.removeprefix("id: ")
                    if line.startswith("data: "):
                        self._last_id = next_id
                        self._take_in(line.removeprefix("data: "))
                    if max_events is not None and self.num_events >= max_events:
                        return
        except httpx.TransportError:
            return

    def check(self, work: Work) -> None:
        """Assert that the whole answer arrived, equal to that of a run without faults."""
        assert self.is_whole
        choices = Work(work.options | {"job_id": self.job_id}).expected()
        of_prompt = list(prompt_logprobs(reference_prompt_logprobs(work.params, PROMPT.encode())))
        want = {choices[0].index: of_prompt} if of_prompt else {}
        assert self.of_prompt == want, f"{str(self.of_prompt)[:300]} is not {str(want)[:300]}"
        assert self.texts == {choice.index: choice.text for choice in choices}
        assert self.finishes == {choice.index: choice.finish_reason for choice in choices}

    def is_part_of(self, other: HttpReading) -> bool:
        """Whether it is a prefix of the other reading."""
        return all(other.texts[choice].startswith(text) for choice, text in self.texts.items())

    def _take_in(self, data: str) -> None:
        self.num_events += 1
        if data == "[DONE]":
            self.is_whole = not self.error
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]["code"]
            return
        for said in event["choices"]:
            choice = said["index"]
            self.texts[choice] = self.texts.get(choice, "") + said["text"]
            if "prompt_logprobs" in said:
                self.of_prompt.setdefault(choice, []).extend(said["prompt_logprobs"])
            if said["finish_reason"]:
                self.finishes[choice] = said["finish_reason"]


class HttpStreams:
    """Streams that a gateway serves. A caller whose stream breaks continues it, with its idempotency key."""

    def __init__(self, redis_url: str) -> None:
        self._gateway = GatewayProcess(redis_url)
        self._works: list[Work] = []
        self.readings: list[HttpReading] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Start the gateway."""
        await asyncio.to_thread(self._gateway.__enter__)
        self._http = http_client()
        return self

    def begin(self, key: str, works: Sequence[Work]) -> None:
        """Start more streams, with an API key."""
        self._http.headers["Authorization"] = f"Bearer {key}"
        readings = [HttpReading() for _ in works]
        self._tasks += [asyncio.create_task(self._read(*one)) for one in zip(readings, works, strict=True)]
        self._works += works
        self.readings += readings

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self._http.aclose()
        await asyncio.to_thread(self._gateway.__exit__, None, None, None)

    async def _read(self, reading: HttpReading, work: Work) -> None:
        while not reading.is_whole:
            await reading.read(self._http, self._gateway.url, work, key=work.id)
            await asyncio.sleep(_PAUSE_S)

    async def problems(self, patience_s: float) -> list[str]:
        """Wait for the ends of the streams, and return what is wrong with them."""
        async with asyncio.timeout(patience_s):
            await asyncio.gather(*self._tasks)
        both = zip(self.readings, self._works, strict=True)
        return await errors_of(partial(reading.check, work) for reading, work in both)


async def errors_of(checks: Iterable[Callable[[], None]]) -> list[str]:
    """Return what is wrong with streams. Other tasks run meanwhile, such as the heartbeats of nodes."""
    errors = list[str]()
    for check in checks:
        try:
            check()
        except AssertionError as error:
            errors.append(f"stream: {error}"[:200])
        await asyncio.sleep(0)
    return errors
