"""The summary of a conversation: the request for it, and the seal that binds it to its tenant and model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.producer.openai import seals
from penstock.producer.openai.seals import Seal

MAX_SUMMARY_TOKENS = 8192
"""Most tokens of the summary of any conversation."""
MIN_SUMMARY_LIMIT = 1024
"""Most tokens of the summary of a short conversation. A model that reasons before every answer needs them too."""
BYTES_PER_SUMMARY_TOKEN = 4
"""A summary may have a token for so many bytes of its conversation: about as many tokens as the conversation has."""
MIN_THRESHOLD = 1000
"""Fewest tokens from which on `context_management` shortens a conversation, as at OpenAI."""
MIN_SUMMARY_TOKENS = 128
"""A conversation that leaves fewer tokens, and whose summary needs more, is refused."""
_ASK = """\
Write a summary of the conversation up to here. The summary and the messages of the user are all that remains of it, \
and the work goes on from them. So say:

- what the user wants, with every requirement and preference that still holds;
- what was done and decided, and for what reason;
- what must stay exact: names, paths, commands, numbers, and the words of errors;
- what is not finished, and the next step.

Leave out what no longer matters. Do not go on with the work, and call no tool. Answer with the summary alone."""
_UNREADABLE = "not a summary that /v1/responses/compact of this service made, or one that was cut or changed"


def asking(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the request for a summary. It joins a last message of the user.

    Many chat templates refuse two messages of the user in a row.
    """
    if messages and messages[-1]["role"] == "user":
        *before, last = messages
        return [*before, {**last, "content": f"{last['content']}\n\n{_ASK}"}]
    return [*messages, {"role": "user", "content": _ASK}]


def summary_limit(num_bytes: int) -> int:
    """Return the most tokens of the summary of a conversation with texts and tool calls of `num_bytes` UTF-8 bytes.

    A small model may not find the end of its summary. The limit ends it once it is longer than what it sums up.
    """
    return min(MAX_SUMMARY_TOKENS, max(MIN_SUMMARY_LIMIT, num_bytes // BYTES_PER_SUMMARY_TOKEN))


def summary_message(text: str) -> str:
    """Return the message of the user that shows the model a summary."""
    return f"The conversation before this was shortened to a summary:\n<summary>\n{text}\n</summary>"


def sealed(text: str, key: bytes, *, tenant: str, model: str) -> str:
    """Return a summary with its seal, as a text without special characters."""
    return seals.sealed("summary", text, key, tenant=tenant, model=model)


def opened(content: str) -> tuple[str, Seal]:
    """Return the summary, and the seal that is not checked yet. Raises ValueError for what is no sealed summary."""
    try:
        return seals.opened("summary", content)
    except ValueError:
        raise ValueError(_UNREADABLE) from None


def is_genuine(seal: Seal, key: bytes, *, tenant: str, model: str) -> bool:
    """Return whether the summary was sealed with this key for this tenant and model."""
    return seals.is_genuine("summary", seal, key, tenant=tenant, model=model)
