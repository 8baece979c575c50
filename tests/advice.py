"""What the product's messages name: options, variables, commands and pages, as the source's texts have them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from tests.source_tree import Module, modules

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
VARIABLE = re.compile(r"(?<!\w)PENSTOCK_[A-Z0-9_]*[A-Z0-9](?!\w)")
PAGE = re.compile(r"(?<![/\w.])(?:docs|ops)/[\w/.-]*\w")
COMMAND = re.compile(r"`penstock ([^`]+)`|\(penstock ([a-z ]+)\)")
MIN_WORDS = 3
"""A shorter text is a name in a table, or a part of a command line."""


@dataclass(frozen=True, slots=True)
class MessageText:
    """One text of the source. `{}` stands for a value."""

    module: str
    text: str

    @property
    def names(self) -> tuple[str, ...]:
        """The options, variables and pages that it names."""
        return tuple(one for pattern in (OPTION, VARIABLE, PAGE) for one in pattern.findall(self.text))

    @property
    def commands(self) -> tuple[str, ...]:
        """The words after `penstock` of the commands that it names."""
        return tuple(first or second for first, second in COMMAND.findall(self.text))


@cache
def texts() -> tuple[MessageText, ...]:
    """Return every text of the product that names something, except docstrings and help texts."""
    found = (MessageText(module.name, text) for module in modules().values() for text in _texts_in(module))
    return tuple(one for one in found if one.names or one.commands)


def _texts_in(module: Module) -> Iterator[str]:
    no_text = {id(part) for node in ast.walk(module.tree) for part in _not_said(node)}
    for node in ast.walk(module.tree):
        text = "" if id(node) in no_text else _text_of(node)
        if len(text.split()) > MIN_WORDS:
            yield text


def _not_said(node: ast.AST) -> Iterable[ast.AST]:
    """Yield the parts of a text, which are read as one; docstrings; and help texts, which `--help` shows."""
    if isinstance(node, ast.JoinedStr):
        return node.values
    if isinstance(node, ast.Expr):
        return [node.value]
    return ast.walk(node.value) if isinstance(node, ast.keyword) and node.arg == "help" else []


def _text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values)
    return ""
