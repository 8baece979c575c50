"""A model's chat template: the Jinja program that turns messages into the text that the model was trained on.

The dialect is the one that transformers gives templates, so that a checkpoint renders here as it renders there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.contract.errors import ConfigError, TooCostlyError

MAX_RENDERED_CHARS = 1 << 25
"""Of a chat with its tools; a request has at most 16 MiB, but a template may say the tools at every turn."""
MAX_RENDER_S = 10.0


class ChatTemplate:
    """One compiled template. It comes with the model, so it runs in a sandbox."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables` are the special tokens by name (`bos_token`, …). Raises ConfigError for what does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self.source = source
            self._template = environment.from_string(source, globals=dict(variables))
            self.takes_tools = "tools" in find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The chat up to where the assistant speaks. Raises whatever the template raises.

        Raises TooCostlyError for a chat whose text is too long, or takes too long.
        """
        pieces: list[str] = []
        num_chars, until_s = 0, time.monotonic() + MAX_RENDER_S
        parts = self._template.generate(messages=messages, tools=tools, documents=None, add_generation_prompt=True)
        for piece in parts:
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS or time.monotonic() > until_s:
                limits = f"{MAX_RENDERED_CHARS} characters or {MAX_RENDER_S:g} s"
                raise TooCostlyError(
                    f"messages: as the chat template renders them they take more than {limits}", param="messages"
                )
        return "".join(pieces)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it only stands around its body."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a model would read literally."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
