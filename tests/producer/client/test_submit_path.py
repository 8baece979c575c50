"""A request passes few files and shapes between `AsyncClient.submit` and the submit script."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

import pytest
from fakes.fake_node import MODEL, FakeNode
from pydantic import BaseModel

import penstock
from penstock.contract.job import SamplingParams
from penstock.contract.tenant import Terms
from penstock.gateway.request.generation import GenerationRequest
from penstock.gateway.request.jobs import open_jobs
from penstock.producer.client import AsyncClient
from penstock.producer.client.request import pack_prompt_of
from penstock.producer.parsed_body import ParsedBody
from penstock.queue.broker.submitting import SharedCalls

MAX_FILES = 10
"""Files with a function that gets the request, or a part of it, in any form."""
MAX_CALLED_FILES = 22
"""Files with any function that runs on the way; one of them looks for the trace of the caller."""
MAX_SHAPES = 10
"""Classes, dicts, tuples, closures and bytes that hold the request on the way."""
NUM_SHAPES_OF_MESSAGES = 4
"""A chat's messages: as a list and as a tuple, and each as a dict and as a `Message`."""
MARK = "marked"
"""Part of the prompt and of a stop string, by which a value that holds one of them is found."""
ROOT = Path(penstock.__file__).resolve().parent.parent


class PathTracer:
    """Records the files and the shapes through which one request passes, in one task."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        self.files: set[str] = set()
        self.shapes: dict[str, str] = {}
        """Shape to the function where it was found first."""
        self._seen: dict[int, tuple[object, str]] = {}
        self._begun = self._ended = False

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace what this task calls in the block, from `AsyncClient.submit` to the call that its job shares."""
        task = asyncio.current_task()

        def profile(frame: FrameType, event: str, value: object) -> None:
            if event in ("call", "return") and asyncio.current_task() is task:
                self._look(frame, value if event == "return" else None)

        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _look(self, frame: FrameType, returned: object) -> None:
        code = frame.f_code
        self._begun |= code in (AsyncClient.submit.__code__, AsyncClient.submit_noting.__code__)
        self._ended |= code is SharedCalls.add.__code__
        if not self._begun or self._ended or (file := file_of(code)) is None:
            return
        self.called.add(file)
        for value in (*frame.f_locals.values(), returned):
            if holds_mark(value):
                self.files.add(file)
                if not isinstance(value, str):
                    self.shapes.setdefault(self._shape_of(value), code.co_qualname)

    def _shape_of(self, value: object) -> str:
        """Return the shape of a value. A dict that grows keeps its shape."""
        return self._seen.setdefault(id(value), (value, shape_of(value)))[1]


def file_of(code: CodeType) -> str | None:
    """Return the product's file with this code, or None."""
    path = Path(code.co_filename)
    inside = path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / ".venv")
    name = str(path.relative_to(ROOT)) if inside else "tests"
    return None if name.startswith("tests") else name


def holds_mark(value: Any) -> bool:
    """Return whether a value contains the mark, at any depth."""
    match value:
        case str():
            return MARK in value
        case bytes():
            return MARK.encode() in value
        case dict():
            return any(map(holds_mark, value.values()))
        case tuple() | list():
            return any(map(holds_mark, value))
        case BaseModel():
            return any(map(holds_mark, value.__dict__.values()))
        case FunctionType():
            return any(holds_mark(cell.cell_contents) for cell in value.__closure__ or () if cell != CellType())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(holds_mark(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False


def shape_of(value: object) -> str:
    """Return the name of a value's shape: its class, and for a dict its keys, for a tuple its length."""
    if isinstance(value, dict):
        return f"dict of {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return value.__qualname__ if isinstance(value, FunctionType) else type(value).__name__


async def submit_by_arguments(client: AsyncClient) -> None:
    """Submit as a Python caller does."""
    await client.submit(f"a {MARK} prompt", model=MODEL, max_tokens=4, stop=f"a {MARK} end")


async def submit_chat(client: AsyncClient) -> None:
    """Submit a chat as a Python caller does."""
    messages = [{"role": "user", "content": f"a {MARK} prompt"}]
    await client.submit(messages, model=MODEL, max_tokens=4, stop=[f"a {MARK} end"])


async def submit_by_gateway(client: AsyncClient) -> None:
    """Submit a small body as the gateway does."""
    params = SamplingParams(max_tokens=4, stop=f"a {MARK} end")
    body = ParsedBody(MODEL, [f"a {MARK} prompt"], params)
    async with open_jobs(client, GenerationRequest(body, {"tenant": "acme", "terms": Terms(weight=2.0)})):
        pass


async def submit_packed_by_gateway(client: AsyncClient) -> None:
    """Submit a large body as the gateway does, with a prompt packed in another process."""
    params = SamplingParams(max_tokens=4, stop=f"a {MARK} end")
    body = ParsedBody(MODEL, [pack_prompt_of(f"a {MARK} prompt")], params)
    async with open_jobs(client, GenerationRequest(body)):
        pass


WAYS = [submit_by_arguments, submit_chat, submit_by_gateway, submit_packed_by_gateway]


@pytest.mark.parametrize("submit", WAYS)
async def test_request_reaches_the_script_through_few_files_and_shapes(
    submit: Callable[[AsyncClient], Awaitable[None]], client: AsyncClient, told_node: FakeNode
) -> None:
    await submit(client)  # fetches the copies of pools and pressure
    tracer = PathTracer()
    with tracer.tracing():
        await submit(client)
    assert "penstock/queue/wire.py" in tracer.files, "the tracer saw the request on its way"
    assert "bytes" in tracer.shapes
    num_of_messages = NUM_SHAPES_OF_MESSAGES if submit is submit_chat else 0
    assert len(tracer.files) <= MAX_FILES, sorted(tracer.files)
    assert len(tracer.called) <= MAX_CALLED_FILES, sorted(tracer.called)
    print(sorted(tracer.files))
    print(tracer.shapes)
    assert len(tracer.shapes) - num_of_messages <= MAX_SHAPES, tracer.shapes
