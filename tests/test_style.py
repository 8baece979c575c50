"""Sizes that ruff has no rule for: past a limit, look for the missing name."""

from __future__ import annotations

import ast
from collections import Counter

from tests.source_tree import Module, modules

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 80


def num_body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement to the last; signature and docstring are no code."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def functions_of(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_files_are_short() -> None:
    lengths = {module.path: len(module.path.read_text().splitlines()) for module in modules().values()}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    def is_too_long(module: Module, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        limit = MAX_KERNEL_LINES if module.name.startswith("penstock.kernels") else MAX_FUNCTION_LINES
        return num_body_lines(function) > limit

    functions = [(module, function) for module in modules().values() for function in functions_of(module)]
    assert [f"{at.path}:{one.lineno}: {one.name}" for at, one in functions if is_too_long(at, one)] == []


def test_modules_say_what_they_are_for() -> None:
    assert [module.path for module in modules().values() if not ast.get_docstring(module.tree)] == []


def test_a_class_name_exists_once() -> None:
    classes = [
        node.name for module in modules().values() for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)
    ]
    numbers = Counter(name for name in classes if not name.startswith("_"))
    assert {name for name, number in numbers.items() if number > 1} == set()
