"""The tables of sizes in docs/PROTOCOL.md and of limits in SECURITY.md agree with the code."""

from __future__ import annotations

import ast
import re

import pytest

from penstock.contract.priority import NUM_LEVELS, NUM_PRIORITIES
from tests.source_tree import ROOT

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "h": 3_600_000}
ROW = re.compile(r"^\| [^|]+ \| ([\d,]+) ?(\w*) \| `([^`:]+):(\w+)` \|$", re.MULTILINE)
ROWS = [match.groups() for match in ROW.finditer((ROOT / "docs/PROTOCOL.md").read_text())]
LIMIT = re.compile(r"^\| [^|]+ \| ([\d,]+) ?(\w*) \| [^|]+ \| `([^`:]+):(\w+)` \|$", re.MULTILINE)
LIMITS = [match.groups() for match in LIMIT.finditer((ROOT / "SECURITY.md").read_text())]


def value_in_lua(text: str, name: str) -> int:
    """Of a line such as `local ONE, OTHER = 1, 2`."""
    for names, values in re.findall(r"^ *local ([\w, ]+) = ([\d, ]+)", text, re.MULTILINE):
        if name in names.split(", "):
            return int(values.split(", ")[names.split(", ").index(name)])
    raise AssertionError(name)


def value_in_python(text: str, name: str) -> int:
    """Of a constant, or of a setting with this default."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == name:
                value = default_in(node.value) if isinstance(node.value, ast.Call) else node.value
                return int(eval(compile(ast.Expression(value), name, "eval")))
    raise AssertionError(name)


def default_in(field: ast.Call) -> ast.expr:
    """The default that a call of `Field` names."""
    return next(keyword.value for keyword in field.keywords if keyword.arg == "default")


def test_there_are_such_tables() -> None:
    assert len(ROWS) > 30
    in_table = (ROOT / "SECURITY.md").read_text().partition("| field | limit |")[2].count("\n| ")
    assert len(LIMITS) == in_table > 20
    assert all("_" in name for _, _, _, name in ROWS)


@pytest.mark.parametrize("row", [*ROWS, *LIMITS], ids=lambda row: f"{row[2]}:{row[3]}")
def test_limit_is_what_the_code_says(row: tuple[str, str, str, str]) -> None:
    number, unit, file, name = row
    value = value_in_lua if file.endswith(".lua") else value_in_python
    assert value((ROOT / file).read_text(), name) == int(number.replace(",", "")) * UNITS[unit]


def test_there_are_as_many_classes_and_levels_in_lua() -> None:
    prelude = (ROOT / "src/penstock/queue/scripts/prelude.lua").read_text()
    assert value_in_lua(prelude, "CLASSES") == NUM_PRIORITIES
    assert value_in_lua(prelude, "LEVELS") == NUM_LEVELS
