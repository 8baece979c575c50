"""A model's chat template: the Jinja program that turns messages into the text format that the model was trained on.

The dialect is that of transformers, so a checkpoint's template renders the same text here.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.contract.errors import ConfigError, TooCostlyError
from penstock.contract.template_kwargs import CONTINUES, GENERATION_PROMPT

MAX_RENDERED_CHARS = 1 << 25
"""Limit of a rendered chat with its tools. A request has at most 16 MiB, but a template may repeat the tools."""
MAX_RENDER_S = 10.0
"""Limit of the time that rendering a chat may take."""
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


class ChatTemplate:
    """One compiled template. It comes with the model, so it runs in a sandbox."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables`: the special tokens by name (`bos_token`, …). Raises ConfigError if it does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self.source = source
            self._template = environment.from_string(source, globals=dict(variables))
            self.takes_tools = "tools" in find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
        now: datetime | None = None,
    ) -> str:
        """Return the chat as text, up to where the assistant's answer begins. Raises whatever the template raises.

        `variables` are those of `template_kwargs.py`. `now` is the time that the template may print; None: the clock's.
        Raises TooCostlyError if the text becomes too long or takes too much time.
        """
        variables = {"strftime_now": (now or datetime.now()).strftime, **variables}
        if not variables.get(CONTINUES):
            return self._render(messages, tools, {GENERATION_PROMPT: True, **variables})
        # The text is cut after the last message's content, where the template would close the message.
        *earlier, last = messages
        mark = secrets.token_hex(16)
        marked = [*earlier, {**last, "content": last["content"] + mark}]
        text = self._render(marked, tools, {**variables, GENERATION_PROMPT: False})
        at = text.rfind(mark)
        if at < 0:
            raise ValueError("the template does not show the last message's content, so it cannot be continued")
        return text[:at]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        pieces: list[str] = []
        num_chars, until_s = 0, time.monotonic() + MAX_RENDER_S
        parts = self._template.generate({**variables, "messages": messages, "tools": tools, "documents": None})
        for piece in parts:
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS or time.monotonic() > until_s:
                limits = f"{MAX_RENDERED_CHARS} characters or {MAX_RENDER_S:g} s"
                raise TooCostlyError(f"messages: the rendered chat takes more than {limits}", param="messages")
        return "".join(pieces)


class _Generation(Extension):
    """`{% generation %}` marks assistant messages for training. At inference only its body is rendered."""

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
    """Encode JSON without escapes for HTML, which Jinja's own filter adds and a model would read literally."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
