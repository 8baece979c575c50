"""How a model reasons, as its chat template shows it: marks, variables, and what stands behind the reasoning."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from penstock.contract.errors import RequestError, TooCostlyError, UnavailableError
from penstock.contract.tools import GENERATION_PROMPT, THINKING_VARIABLES, ReasoningParserName, thinking_setting
from penstock.gpu_node.engine.text.chat import NO_VARIABLES, ChatTemplate, found_marks, reasoning_marks_of

_EFFORT = re.compile(r"\breasoning_effort\b")
_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Members of a message in which templates take its reasoning."""
_MAX_CLOSING_CHARS = 256


def reasoning_parser_of(template: ChatTemplate) -> ReasoningParserName:
    """Return the reasoning parser, by the template's use of its marks and whether it opens it for the assistant."""
    if found_marks(template) is None:
        return "none"
    with suppress(TooCostlyError):
        return "think_open" if _opens_reasoning(template, NO_VARIABLES) else "think"
    return "think"


def thinking_switches_of(template: ChatTemplate) -> tuple[str, ...]:
    """Return the settings of thinking variables with which the template does not do what it does without them.

    Without them, it opens the reasoning for the assistant or leaves it closed.
    """
    if found_marks(template) is None:
        return ()
    try:
        is_open = _opens_reasoning(template, NO_VARIABLES)
        return tuple(
            thinking_setting(name, value)
            for name in THINKING_VARIABLES
            for value in (False, True)
            if _opens_reasoning(template, {name: value}) != is_open
        )
    except TooCostlyError:
        return ()


def takes_effort(template: ChatTemplate) -> bool:
    """Return whether the template has the variable of a reasoning effort."""
    return _EFFORT.search(template.source) is not None


@dataclass(frozen=True, slots=True)
class EarlierReasoning:
    """How a template shows the reasoning of earlier messages."""

    key: str | None
    """The member of a message in which it takes the reasoning; None if it shows none."""
    closing: str
    """What it writes between the reasoning and the text of an answer: the closing mark, and white space."""


def earlier_reasoning_of(template: ChatTemplate, marks: tuple[str, str]) -> EarlierReasoning:
    """Return how a template shows an answer that has reasoning. It renders one chat."""
    found = {key: secrets.token_hex(8) for key in _KEYS}
    said = secrets.token_hex(8)
    answer = {"role": "assistant", "content": said, **found}
    text = ""
    with suppress(RequestError, UnavailableError):  # The template may not accept this chat.
        text = template.render([{"role": "user", "content": "x"}, answer], None, {GENERATION_PROMPT: False})
    key = next((key for key, thought in found.items() if thought in text), None)
    if key is None:
        return EarlierReasoning(None, marks[1])
    between, _, rest = text.partition(found[key])[2].partition(said)
    is_usable = rest and marks[1] in between and len(between) <= _MAX_CLOSING_CHARS
    is_blank = not between.replace(marks[1], "", 1).strip()
    return EarlierReasoning(key, between if is_usable and is_blank else marks[1])


def _opens_reasoning(template: ChatTemplate, variables: Mapping[str, bool]) -> bool:
    try:
        text = template.render([{"role": "user", "content": "x"}], None, variables)
        return text.rstrip().endswith(reasoning_marks_of(template)[0].rstrip())
    except TooCostlyError:
        raise  # It would take as long again with other variables.
    except RequestError:
        # The template may not accept this message.
        return False
