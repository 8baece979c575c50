"""Variables that a request sets in the model's chat template, such as `enable_thinking`."""

from __future__ import annotations

import json
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
