"""The synchronous caller of a run: its prompts are read on the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from penstock.contract.errors import UnavailableError
from penstock.producer.client.calls.run import Answer, Run, Step
from penstock.producer.client.loop_thread import LoopThread
from penstock.producer.client.request import Prompt


def run_in_thread(loop: LoopThread, run: Run, prompts: Iterator[Prompt]) -> Generator[Answer, None, None]:
    """Run all prompts and yield their answers."""
    end: Callable[[Coroutine[Any, Any, None]], object] = loop.call
    try:
        while (step := loop.call(run.next_step())) is not Step.END:
            if isinstance(step, Answer):
                yield step
            else:
                # On this thread, because an open file or a database cursor may belong to it.
                loop.call(run.offer(partial(_given, next(prompts, Step.END))))
    except GeneratorExit:
        # Without waiting: the garbage collector may close this generator on the loop's own thread.
        end = loop.post
        raise
    finally:
        with suppress(UnavailableError):
            end(run.close())


async def _given(prompt: Prompt | Step) -> Prompt | Step:
    return prompt
