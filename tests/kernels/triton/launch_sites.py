"""Which Triton kernels the package launches, by syntax."""

from __future__ import annotations

import ast
from pathlib import Path

from penstock.kernels import triton as package


def launched_kernels() -> set[str]:
    """Return the names of all functions that are launched: `kernel[grid](...)` or `module.kernel[grid](...)`."""
    trees = [ast.parse(path.read_text()) for path in Path(package.__path__[0]).glob("*.py")]
    calls = [node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    kernels = [func.value for func in calls if isinstance(func, ast.Subscript)]
    found = {kernel.id for kernel in kernels if isinstance(kernel, ast.Name)}
    found |= {kernel.attr for kernel in kernels if isinstance(kernel, ast.Attribute)}
    return found & {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
