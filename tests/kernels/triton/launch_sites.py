"""Which Triton kernels the package launches, by syntax."""

from __future__ import annotations

import ast
from pathlib import Path

from penstock.kernels import triton as package


def launched_kernels() -> set[str]:
    """Return the names of all functions that are launched on a grid: `kernel[grid](...)`."""
    trees = [ast.parse(path.read_text()) for path in Path(package.__path__[0]).glob("*.py")]
    found = {
        node.func.value.id
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
    }
    return found & {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
