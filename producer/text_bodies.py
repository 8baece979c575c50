"""Bodies with texts that a model computes whole: which model answers them, their jobs, and how errors name a text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.contract.errors import InvariantError, PenstockError, RequestError
from penstock.contract.pool import PoolRecord
from penstock.contract.tasks import GENERATE, QUERY, Score, Task, TextTask
from penstock.producer.client import AsyncClient
from penstock.producer.client.pool_choice import NOT_ABLE, NOT_DOING, choose_pool, is_made_for
from penstock.producer.client.text_calls import NUMBERED
from penstock.producer.client.text_jobs import TextJob, pair_jobs, require_no_own_limits, score_jobs, text_jobs
from penstock.producer.parsed_body import ParsedBody
from penstock.queue.broker.producer import ServedPool

FIRST_PROMPT = "first prompt"
"""The entry of `ParsedBody.names` for a first prompt that has a field of its own, such as a query."""
PAIRED_PROMPT = "paired prompt"
"""The entry for every other prompt, beginning with the first, where prompts come in pairs of two fields."""


def pool_among(pools: Iterable[ServedPool], body: ParsedBody, model: str | None, *, hides_models: bool) -> ServedPool:
    """Return the pool for a body among these: one that can do its task, or else one of its other tasks.

    Raises what `choose_pool` raises.
    """
    known, refusals = list(pools), list[RequestError]()
    for kind in _ordered_kinds(known, body, model):
        try:
            return choose_pool(known, model, kind=kind, hides_models=hides_models)
        except RequestError as error:
            if error.code != NOT_ABLE:
                raise
            refusals.append(error)
    raise _joined(refusals)


async def pool_for(client: AsyncClient, body: ParsedBody, model: str | None, *, hides_models: bool) -> ServedPool:
    """Do the same as `pool_among` with the pools that a client knows."""
    refusals = list[RequestError]()
    for kind in _ordered_kinds([*(await client.pools()).values()], body, model):
        try:
            return await client.served_pool(model, kind=kind, hides_models=hides_models)
        except RequestError as error:
            if error.code != NOT_ABLE:
                raise
            refusals.append(error)
    raise _joined(refusals)


def _joined(refusals: Sequence[RequestError]) -> RequestError:
    """Return one error of all kinds of jobs that a model cannot do, each with the models that can."""
    if not refusals:
        raise InvariantError("no kind of job was tried")
    first, *others = refusals
    further = (f" Nor can it {one.message.partition(NOT_DOING)[2]}." for one in others)
    message = f"{first.message}.{''.join(further)}" if others else first.message
    return RequestError(message, code=NOT_ABLE, param=first.param)


def _ordered_kinds(pools: Sequence[ServedPool], body: ParsedBody, model: str | None) -> list[str]:
    """Return the kinds of jobs that answer a body, the best one first.

    Where no model is named, kinds for which a model was made come first: any model that generates text can also embed.
    """
    kinds = list[str]()
    kinds += [GENERATE] if body.task is None else [task.kind for task in (body.task, *body.other_tasks)]
    if model is not None or len(kinds) == 1:
        return kinds
    return sorted(kinds, key=lambda kind: not any(pool.is_alive and is_made_for(pool, kind) for pool in pools))


def task_for(body: ParsedBody, record: PoolRecord | None) -> Task | None:
    """Return what a pool's jobs do for a body: its task, or the first other one that the pool knows."""
    if body.task is None or record is None:
        return body.task
    tasks = body.task, *body.other_tasks
    return next((task for task in tasks if task.kind in record.kinds), tasks[-1])


def text_jobs_of(body: ParsedBody, record: PoolRecord) -> list[TextJob]:
    """Return the jobs of a body with texts: by pairs, if the pool scores these and the body compares texts.

    Raises RequestError for what is not a text.
    """
    task = task_for(body, record)
    if not isinstance(task, TextTask):
        raise InvariantError("the body has no texts")
    if not isinstance(task, Score):
        if isinstance(body.task, Score):
            require_no_own_limits(body.task)
        return text_jobs(body.prompts, task, record.texts_per_job)
    if PAIRED_PROMPT in body.names:
        return pair_jobs(body.prompts[::2], body.prompts[1::2], task)
    return score_jobs(body.prompts[0], body.prompts[1:], task, record.texts_per_job, first=1)


@contextlib.contextmanager
def naming_prompt(body: ParsedBody, index: int) -> Iterator[None]:
    """Let an error of the block name the prompt that it is about, if there are several.

    index: of the prompt, or of the first prompt of a job with several. Such a job's errors say which one it is.
    """
    try:
        yield
    except PenstockError as error:
        before, told = error.param or "", NUMBERED.fullmatch(error.param or "")
        name = before
        if before == QUERY:
            name = _query_name(body.names, index)
        elif told is not None or before == "prompt":
            is_only = len(body.prompts) == 1
            name = "prompt" if is_only else _prompt_name(body.names, index if told is None else int(told[1]))
        if name != before:
            error.param = name
            if before != "prompt" and error.message.startswith(f"{before}:"):
                error.message = name + error.message.removeprefix(before)
        raise


def _query_name(names: Mapping[str, str], index: int) -> str:
    """Return the name of the text that others are compared with, in the job of the prompt at `index`."""
    if (paired := names.get(PAIRED_PROMPT)) is not None:
        return f"{paired}[{index // 2}]"
    return names.get(FIRST_PROMPT, QUERY)


def _prompt_name(names: Mapping[str, str], index: int) -> str:
    """Return the name of a prompt among several; `rename` then replaces `prompt` by the caller's name."""
    if (first := names.get(FIRST_PROMPT)) is not None:
        return first if index == 0 else f"prompt[{index - 1}]"
    if (paired := names.get(PAIRED_PROMPT)) is not None:
        return f"prompt[{index // 2}]" if index % 2 else f"{paired}[{index // 2}]"
    return f"prompt[{index}]"
