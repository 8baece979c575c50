"""The help texts of settings: the docstrings of their fields, and their defaults.

Pydantic can read such docstrings as well, but when it creates the class. That takes 20 ms at the start of each process
that has the settings, also of those that never print a help text.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.cli.command_line.help_page import default_in_words


def docstrings_of(settings: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of a class's fields by name, without line breaks. Empty if there is no source code."""
    found: dict[str, str] = {}
    for parent in reversed(settings.__mro__):
        if issubclass(parent, BaseModel) and not parent.__module__.startswith("pydantic"):
            found |= _docstrings_in(parent.__module__).get(parent.__qualname__, {})
    return {name: text for name, text in found.items() if name in settings.model_fields}


def with_default(text: str, field: FieldInfo) -> str:
    """Return a help text that names the field's default, if it has one."""
    has_default = not field.is_required() and field.default_factory is None and field.default not in (None, ())
    return f"{text} Default: {default_in_words(field.default)}." if has_default else text


@cache
def _docstrings_in(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the docstrings of all fields in a module: by the name of the class, and by that of the field."""
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:
        return {}
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {each.name: _docstrings_of_class(each) for each in classes}


def _docstrings_of_class(definition: ast.ClassDef) -> dict[str, str]:
    return {
        field.target.id: " ".join(after.value.value.split())
        for field, after in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }
