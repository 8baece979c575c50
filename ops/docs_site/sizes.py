"""The tables of docs/SIZES.md. `make fields` writes the page: the values are read from the code."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from penstock.gpu_node.model.architecture.limits import ADAPTER_LIMITS, CONFIG_LIMITS, QUANTIZATION_LIMITS, ROPE_LIMITS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/SIZES.md"
BEGIN, END = "<!-- begin: made by `make fields` -->", "<!-- end -->"
"""The lines between which the page holds the tables."""
_TITLES = {
    "gateway": "The gateway",
    "producer": "Clients and batches",
    "gpu_node": "Nodes",
    "src": "The queue, and what all processes share",
}
"""Tables of limits that no field of a request has, by the folder of the code."""
_MINUTE_MS, _HOUR_MS = 60_000, 3_600_000


def value_in_lua(text: str, name: str) -> int:
    """Return the value that a line such as `local ONE, OTHER = 1, 2` gives to a name."""
    for names, values in re.findall(r"^ *local ([\w, ]+) = ([\d, ]+)", text, re.MULTILINE):
        if name in names.split(", "):
            return int(values.split(", ")[names.split(", ").index(name)])
    raise KeyError(name)


def value_in_python(text: str, name: str) -> int:
    """Return the value of a constant, or the default of a setting."""
    for node in _nodes_of(text):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == name:
                value = _default_in(node.value) if isinstance(node.value, ast.Call) else node.value
                return int(eval(compile(ast.Expression(value), name, "eval"), {}))
    raise KeyError(name)


@cache
def _nodes_of(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def _default_in(field: ast.Call) -> ast.expr:
    return next(keyword.value for keyword in field.keywords if keyword.arg == "default")


def tables() -> str:
    """Return the tables as Markdown."""
    limits = tomllib.loads(Path(__file__).with_name("sizes.toml").read_text())
    return "\n".join([*_asked(limits["asked"]), *_inside(limits["inside"]), *_of_model_files()])


def _asked(rows: dict[str, list[str]]) -> Iterator[str]:
    yield from ("## What a request may ask for\n", "| field | limit | why | where |", "|---|---|---|---|")
    for place, (field, why) in rows.items():
        yield f"| {field} | {_limit(place)} | {why} | `{place}` |"
    yield ""


def _inside(rows: dict[str, str]) -> Iterator[str]:
    for folder, title in _TITLES.items():
        yield from (f"## {title}\n", "| what | limit | where |", "|---|---|---|")
        for place in (place for place in rows if place.startswith(f"{folder}/")):
            yield f"| {rows[place]} | {_limit(place)} | `{place}` |"
        yield ""


def _of_model_files() -> Iterator[str]:
    yield from ("## Numbers in a model's files\n", "| file | fields | range |", "|---|---|---|")
    tables = {
        "`config.json`": CONFIG_LIMITS,
        "in it: `rope_parameters`": ROPE_LIMITS,
        "in it: `quantization_config`": QUANTIZATION_LIMITS,
        "`adapter_config.json`": ADAPTER_LIMITS,
    }
    for file, limits in tables.items():
        fields = defaultdict[str, list[str]](list)
        for field, limit in limits.items():
            fields[str(limit)].append(f"`{field}`")
        for limit, names in fields.items():
            yield f"| {file} | {', '.join(names)} | {limit} |"
    yield ""


def _limit(place: str) -> str:
    """Return a limit with the unit that its name ends with."""
    file, _, name = place.partition(":")
    text = (ROOT / file).read_text()
    value = value_in_lua(text, name) if file.endswith(".lua") else value_in_python(text, name)
    match name.lower().rpartition("_")[2]:
        case "bytes":
            return _in_units(value, (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
        case "ms":
            return _in_units(value, (_HOUR_MS, "h"), (_MINUTE_MS, "min"), (1000, "s"), (1, "ms"))
        case "chars":
            return f"{value:,} characters"
        case "percent":
            return f"{value} %"
        case "mib":
            return f"{value} MiB"
        case "s":
            return f"{value} s"
    return f"{value:,}"


def _in_units(value: int, *units: tuple[int, str]) -> str:
    size, unit = next((size, unit) for size, unit in units if value % size == 0)
    return f"{value // size:,} {unit}"


def main() -> None:
    """Replace the tables of the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
