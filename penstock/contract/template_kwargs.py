"""Variables that a request sets in the model's chat template, such as `enable_thinking`."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, StringConstraints

from penstock.contract.tools import json_of

MAX_TEMPLATE_KWARGS = 64
MAX_TEMPLATE_KWARGS_CHARS = 1 << 14
"""Characters of a request's template variables as JSON text."""
CONTINUES = "continue_final_message"
"""Whether the answer continues the last message instead of beginning a new one."""
GENERATION_PROMPT = "add_generation_prompt"
"""Whether the rendered chat ends with the beginning of an assistant message."""
THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables by which requests turn the reasoning of a model on or off. A template uses one of them, or none."""
_OPPOSITES = {"think": "think_open", "think_open": "think"}
_OF_THE_CHAT = ("messages", "tools", "documents")
"""Variables that the request sets through other fields, or that no request may set."""


def _as_text(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(value)


def _variables(text: str) -> str:
    variables = json_of(text)
    if not isinstance(variables, dict):
        raise ValueError("must be an object")
    if len(variables) > MAX_TEMPLATE_KWARGS:
        raise ValueError(f"must have at most {MAX_TEMPLATE_KWARGS} members")
    for name in variables:
        if not name.isidentifier():
            raise ValueError("each name must be one that a template can use: letters, digits and underscores")
        if name in _OF_THE_CHAT:
            raise ValueError(f"must not set {name}")
    for name in (CONTINUES, GENERATION_PROMPT):
        if not isinstance(variables.get(name, False), bool):
            raise ValueError(f"{name} must be true or false")
    if variables.get(CONTINUES) and variables.get(GENERATION_PROMPT):
        raise ValueError(f"{CONTINUES} and {GENERATION_PROMPT} exclude each other")
    return text


TemplateKwargs = Annotated[
    str, BeforeValidator(_as_text), StringConstraints(max_length=MAX_TEMPLATE_KWARGS_CHARS), AfterValidator(_variables)
]
"""The variables as the text of a JSON object."""


def thinking_setting(name: str, value: bool) -> str:
    """Return how a pool's record names the setting of a thinking variable."""
    return f"{name}={json.dumps(value)}"


def reasoning_parser_for(parser: str, thinking_switches: Collection[str], template_kwargs: str | None) -> str:
    """Return the reasoning parser of an answer whose request sets these variables.

    `parser` is that of requests without variables. With a setting of `thinking_switches`, the template does the
    opposite: it opens the reasoning, or leaves it closed.
    """
    if parser not in _OPPOSITES or template_kwargs is None:
        return parser
    variables = json.loads(template_kwargs)
    if variables.get(CONTINUES) or variables.get(GENERATION_PROMPT) is False:
        return "think"  # The prompt ends before the place where the template opens the reasoning.
    settings = {thinking_setting(name, value) for name, value in variables.items() if isinstance(value, bool)}
    return parser if settings.isdisjoint(thinking_switches) else _OPPOSITES[parser]
