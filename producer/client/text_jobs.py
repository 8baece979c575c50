"""How the texts of a caller become jobs: for an encoder up to 64 in a job, else one in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from penstock.contract.errors import RequestError
from penstock.contract.job import Message, PackedPrompt
from penstock.contract.tasks import MAX_TEXT_BYTES_OF_JOB, Score, Task, TaskText, TextTask
from penstock.producer.client.request import Prompt
from penstock.queue.wire import unpack_all

_BYTES_PER_ID = 4
"""Assumed bytes of the text that a token id stands for."""


@dataclass(frozen=True, slots=True)
class TextJob:
    """One job with some of a caller's prompts."""

    prompt: Prompt
    task: Task | None
    first: int
    """The index of its first text among the caller's."""


def text_jobs(prompts: Sequence[Prompt], task: Task | None, texts_per_job: int) -> list[TextJob]:
    """Return the jobs for prompts, in their order: neighbors share a job as far as the pool takes several."""
    if texts_per_job == 1 or not isinstance(task, TextTask):
        return [TextJob(prompt, task, at) for at, prompt in enumerate(prompts)]
    jobs = list[TextJob]()
    for start, texts in _groups([_text_of(prompt) for prompt in prompts], texts_per_job):
        further = cast("tuple[TaskText, ...]", tuple(texts[1:]))
        own = cast("Task", task.model_copy(update={"texts": further, "first": start}))
        jobs.append(TextJob(prompts[start] if not further else _prompt_of(texts[0]), own, start))
    return jobs


def score_jobs(
    query: Prompt, documents: Sequence[Prompt], task: Score, texts_per_job: int, *, first: int = 0
) -> list[TextJob]:
    """Return the jobs that score documents for a query. Raises RequestError for what is not a text.

    first: the index of the first document among all prompts of the caller.
    """
    texts = [_text_of(document) for document in documents]
    asked = _text_of(query)
    if not isinstance(asked, str) or not all(isinstance(text, str) for text in texts):
        raise RequestError("a text to score must be a text, not token ids or a chat", param="prompt")
    return [
        TextJob(asked, task.model_copy(update={"texts": tuple(some), "first": first + start}), first + start)
        for start, some in _groups(texts, texts_per_job)
    ]


def require_no_own_limits(task: Score) -> None:
    """Refuse `max_tokens_per_query` and `max_tokens_per_doc` for a model that compares embeddings.

    Raises RequestError, which names all that were given.
    """
    if limits := task.own_limits:
        message = (
            f"{' and '.join(limits)}: this model compares embeddings, and only a model that scores pairs takes this. "
            "truncate_prompt_tokens shortens each text"
        )
        raise RequestError(message, param=next(iter(limits)))


def pair_jobs(firsts: Sequence[Prompt], seconds: Sequence[Prompt], task: Score) -> list[TextJob]:
    """Return a job for each pair of texts. The caller has the first text of each pair before the second one."""
    pairs = zip(firsts, seconds, strict=True)
    return [
        job
        for at, (first, second) in enumerate(pairs)
        for job in score_jobs(first, [second], task, 1, first=2 * at + 1)
    ]


def _groups(texts: Sequence[TaskText | None], limit: int) -> Iterator[tuple[int, list[TaskText | None]]]:
    """Yield the start of each group of texts, and the group. A chat, None, is alone."""
    start, group, size = 0, list[TaskText | None](), 0
    for at, text in enumerate(texts):
        own = 0 if text is None else len(text.encode()) if isinstance(text, str) else _BYTES_PER_ID * len(text)
        is_apart = text is None or (bool(group) and group[0] is None)
        if group and (is_apart or len(group) >= limit or size + own > MAX_TEXT_BYTES_OF_JOB):
            yield start, group
            start, group, size = at, [], 0
        group.append(text)
        size += own
    if group:
        yield start, group


def _text_of(prompt: Prompt) -> TaskText | None:
    """Return a prompt as a text of a task; None for a chat."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, PackedPrompt):
        if prompt.form == "messages":
            return None
        (value,) = unpack_all(prompt.data)
        return value if isinstance(value, str) else tuple(value)
    if len(prompt) and isinstance(prompt[0], (Mapping, Message)):
        return None
    return cast("tuple[int, ...]", tuple(prompt))


def _prompt_of(text: TaskText | None) -> Prompt:
    return text if isinstance(text, str) else list(text or ())
