"""A model that says what a message of the conversation tells it to say, for clients that must get certain answers.

The last message with SCRIPT holds a list of answers in JSON. The model gives the one whose number is that of the
assistant's messages since then. So a repeated request, or a session that a client resumes, gets the same answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.contract.calls.writing import written_calls
from penstock.contract.tool_formats import BY_NAME, FORMATS, ToolFormat
from penstock.producer.parsing.parsed_text import AnswerFormat
from tests.gateway.conftest import ByteTokenizer, EchoEngine

SCRIPT = "SCRIPT: "
"""What stands before the list. Clients add more text after it."""
NO_SCRIPT = "There is no script."
END_OF_SCRIPT = "The script has no more answers."


def script_of(*answers: str) -> str:
    """Return the text that makes the model give these answers, one after another."""
    return SCRIPT + json.dumps(answers)


def call_text(name: str, **arguments: Any) -> str:
    """Return the text of a call in the format hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripted_answer(messages: Sequence[dict[str, Any]]) -> str:
    """Return what the model says next."""
    for at in range(len(messages) - 1, -1, -1):
        _, mark, script = messages[at]["content"].partition(SCRIPT)
        if mark:
            answers, _ = json.JSONDecoder().raw_decode(script)
            number = sum(message["role"] == "assistant" for message in messages[at + 1 :])
            return str(answers[number]) if number < len(answers) else END_OF_SCRIPT
    return NO_SCRIPT


def in_format(form: ToolFormat, answer: str) -> str:
    """Return an answer of a script, whose calls have the format hermes, as a model of another format writes it.

    An answer without such calls stays as it is.
    """
    if form == FORMATS["hermes"]:
        return answer
    said = AnswerFormat(FORMATS["hermes"]).read(answer)
    if not said.calls:
        return answer
    return said.content + written_calls(form, [(call.name, json.loads(call.arguments)) for call in said.calls])


class ScriptedTokenizer(ByteTokenizer):  # type: ignore[misc]
    """One token per byte. A chat is encoded as the answer to it, which the engine then echoes."""

    def __init__(self, tool_format: str) -> None:
        super().__init__()
        self.tool_format = BY_NAME[tool_format]

    def encode_chat(self, messages: Sequence[dict[str, Any]], *rest: Any, **options: Any) -> list[int]:
        """Return the bytes of the answer."""
        super().encode_chat(messages, *rest, **options)
        return list(in_format(self.tool_format, scripted_answer(messages)).encode())


class ScriptedEngine(EchoEngine):  # type: ignore[misc]
    """Gives the answers of scripts."""

    max_prompt_tokens = 1 << 17

    def __init__(self, tool_format: str = "hermes") -> None:
        super().__init__()
        self.tokenizer = ScriptedTokenizer(tool_format)
        self.max_model_len = self.max_prompt_tokens
        self.num_kv_tokens = 1 << 20
        self.window_tokens = None
