"""The messages of a chat that the input items of a response stand for; docs/HTTP.md has the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.producer.openai.seals import Seal
from penstock.producer.responses.compaction import opened, summary_message
from penstock.producer.responses.items import (
    AgentMessageItem,
    AnyCallItem,
    AnyItem,
    AnyResultItem,
    CompactionItem,
    MessageItem,
    ReasoningItem,
    ReferenceItem,
)


@dataclass(slots=True)
class Messages:
    """The messages of a chat that a list of items stands for."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    references: list[tuple[int, list[str]]] = field(default_factory=list)
    """Index of an empty message, and the ids of the items that belong there."""
    seals: list[tuple[int, Seal]] = field(default_factory=list)
    """Index of an item with a summary, and the seal that it must have."""
    thoughts: list[tuple[int, Seal]] = field(default_factory=list)
    """Index of a message with sealed reasoning, and a seal that it must have."""
    _waiting: list[tuple[str, Seal | None]] = field(default_factory=list)
    """Reasoning whose message has not come yet."""
    num_calls: int = 0
    joins_users: bool = False
    """Whether messages of the user that follow one another become one message."""

    def add_user(self, text: str) -> None:
        """Add a message of the user."""
        if self.joins_users and self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": "user", "content": text})

    def add_other(self, role: str, text: str, *, joins: bool) -> None:
        """Add a message of another role. One of the assistant `joins` the assistant's message before it.

        Some chat templates refuse two turns of the assistant in a row.
        """
        if joins and role == "assistant":
            self.messages[-1]["content"] = "\n".join(one for one in (self.messages[-1]["content"], text) if one)
        else:
            self.messages.append({"role": role, "content": text})

    def add_call(self, call: dict[str, Any], *, joins: bool) -> None:
        """Add a call, which `joins` the assistant's message before it."""
        if not joins:
            self.messages.append({"role": "assistant", "content": ""})
        self.messages[-1].setdefault("tool_calls", []).append(call)
        self.num_calls += 1

    def add_reference(self, item_id: str, *, joins: bool) -> None:
        """Add a reference to an item, which `joins` the references before it."""
        if joins:
            self.references[-1][1].append(item_id)
        else:
            self.references.append((len(self.messages), [item_id]))
            self.messages.append({"role": "assistant", "content": ""})

    def think(self, thought: tuple[str, Seal | None] | None) -> None:
        """Note reasoning before the next message of the assistant."""
        if thought is not None:
            self._waiting.append(thought)

    def attach_thoughts(self) -> None:
        """Give the reasoning that waits to the last message, if the assistant wrote that."""
        waiting, self._waiting = self._waiting, []
        message = self.messages[-1]
        if waiting and message["role"] == "assistant":
            earlier = [message["reasoning"]] if "reasoning" in message else []
            message["reasoning"] = "\n".join([*earlier, *(text for text, _ in waiting)])
            self.thoughts += [(len(self.messages) - 1, seal) for _, seal in waiting if seal is not None]

    def add_summary(self, index: int, content: str) -> None:
        """Add the summary that the item at this index holds."""
        text, seal = opened(content)
        self.seals.append((index, seal))
        self.add_user(summary_message(text))


def _outlives_summary(item: AnyItem) -> bool:
    """Return whether the model gets an item before a summary: what the user and the instructions say."""
    return isinstance(item, AgentMessageItem) or (isinstance(item, MessageItem) and item.role != "assistant")


def messages_of(items: Sequence[AnyItem]) -> Messages:
    """Translate items. Texts and calls of the assistant that follow one another become one message.

    A summary stands for the answers and calls before it, which a client may send again. Beside it stand the user's
    messages alone. They become one message with it, because many chat templates refuse two messages of the user in a
    row.
    """
    last = max((at for at, item in enumerate(items) if isinstance(item, CompactionItem)), default=-1)
    found = Messages(joins_users=last >= 0)
    messages = found.messages
    may_join = joins_references = False
    """Whether the last message is the assistant's, so that a call joins it; whether it stands for references."""
    for index, item in enumerate(items):
        match item:
            case _ if index < last and not _outlives_summary(item):
                continue
            case MessageItem(role="user") | AgentMessageItem():
                found.add_user(item.content)
            case CompactionItem():
                found.add_summary(index, item.encrypted_content)
            case MessageItem():
                found.add_other(item.role, item.content, joins=may_join)
            case AnyCallItem() if item.call_id is not None:
                call = {"id": item.call_id, "name": item.offered, "arguments": item.given}
                found.add_call(call, joins=may_join)
            case AnyResultItem() if item.call_id is not None:
                messages.append({"role": "tool", "content": item.text, "tool_call_id": item.call_id})
            case ReferenceItem():
                found.add_reference(item.id, joins=joins_references)
            case ReasoningItem():
                found.think(item.thought)
                continue
            case _:
                continue
        found.attach_thoughts()
        joins_references = isinstance(item, ReferenceItem)
        may_join = not joins_references and messages[-1]["role"] == "assistant"
    return found
