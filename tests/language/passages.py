"""Passages of prose in the repository's files: paragraphs of docstrings, comments, pages, messages and help texts."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "src", "cli", "producer", "gateway", "gpu_node", "kernels", "ops", "tests", "examples")
COMMENT_MARKS = {".cpp": "//", ".h": "//", ".js": "//", ".lua": "--"}
"""Suffix → what begins a comment."""
DEFINITIONS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
_TEXT_KEYWORDS = {"help", "short_help", "epilog", "description"}
_DEFINITIONS = {
    ".lua": re.compile(r"\bfunction\s+(\w+)\s*\(([^)]*)\)|\blocal\s+(?!function\b)([\w ,]+)|\bfor\s+([\w ,]+)\s+in\b"),
    ".js": re.compile(r"\b(?:function|class)\s+(\w+)|\b(?:const|let|var)\s+(\w+)|^\s+(?:async )?(\w+)\(([\w ,]*)\) \{"),
}
"""Suffix → a definition of a function, its parameters, a class or variables."""
_DIRECTIVE = re.compile(r"#?\s*(noqa|type:|ruff:|pragma:|!|-\*-|fmt:|mypy:|NOLINT|luacheck:)")


@dataclass(frozen=True)
class Passage:
    """One paragraph: sentences that belong together, and the line where they begin."""

    path: Path
    line: int
    text: str


def files() -> list[Path]:
    """Return every file with prose, except the check's own files, which quote the words that it refuses."""
    found = sorted(ROOT.glob("*.md"))
    for folder in FOLDERS:
        found += sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md", *COMMENT_MARKS})
    return [path for path in found if not _is_linked(path) and Path(__file__).parent not in path.parents]


def _is_linked(path: Path) -> bool:
    return any(parent.is_symlink() for parent in (path, *path.parents) if parent.is_relative_to(ROOT))


def passages_of(path: Path) -> Iterator[Passage]:
    """Return the passages of one file."""
    text = path.read_text()
    if path.suffix == ".py":
        found = _of_python(text, nodes_of(path))
    elif path.suffix == ".md":
        found = _of_page(text)
    else:
        found = _of_comments(_comment_lines(text, COMMENT_MARKS[path.suffix]))
    for line, said in found:
        if re.search("[A-Za-z]", said):
            yield Passage(path, line, said)


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return every node of a Python source."""
    # Python 3.11 refuses a source while whose reading the garbage collector has run finalizers.
    gc.disable()
    try:
        return list(ast.walk(ast.parse(path.read_text())))
    finally:
        gc.freeze()  # They stay. Each full collection would look at all of them.
        gc.enable()


def _of_python(text: str, nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    yield from _of_comments(_python_comments(text, nodes))
    for node in nodes:
        if isinstance(node, DEFINITIONS):
            for said in (statement.value for statement in node.body if isinstance(statement, ast.Expr)):
                if isinstance(said, ast.Constant) and isinstance(said.value, str):
                    yield from _paragraphs(said.value, said.lineno)
        elif isinstance(node, ast.Call):
            yield from ((told.lineno, _text_of(told)) for told in _messages_of(node))


def names_of(path: Path) -> Iterator[Passage]:
    """Return the names that a source defines: its own, and those of classes, functions, parameters and variables.

    Names of Python's variables are left out: most are the parameters and functions that they come from.
    """
    yield Passage(path, 1, path.stem)
    if path.suffix == ".py":
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield Passage(path, node.lineno, node.name)
            elif isinstance(node, ast.arg):
                yield Passage(path, node.lineno, node.arg)
    elif (definition := _DEFINITIONS.get(path.suffix)) is not None:
        mark = COMMENT_MARKS[path.suffix]
        for line, text in enumerate(path.read_text().split("\n"), 1):
            for match in definition.finditer(text.partition(mark)[0]):
                yield from (
                    Passage(path, line, name) for name in re.findall(r"\w+", " ".join(filter(None, match.groups())))
                )


def _messages_of(call: ast.Call) -> Iterator[ast.expr]:
    """Return the texts in a call that users read: a log's event, an error's message, a help text."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    is_log = isinstance(call.func, ast.Attribute) and name in _LOG_METHODS
    if call.args and (is_log or name.endswith(("Error", "_error")) or name in ("print", "echo")):
        yield call.args[0]
    yield from (keyword.value for keyword in call.keywords if keyword.arg in _TEXT_KEYWORDS)


def _text_of(node: ast.expr) -> str:
    """Return a literal's text, with `x` for each value of an f-string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "x"
    return ""


def _python_comments(text: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, int, str]]:
    """Return line, column and text of each comment. Ten times as fast as `tokenize`."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for node in nodes:
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)):
            last = node.end_lineno or node.lineno
            for line in range(node.lineno, last + 1):
                start = node.col_offset if line == node.lineno else 0
                end = (node.end_col_offset or 0) if line == last else 1 << 30
                spans.setdefault(line, []).append((start, end))
    for number, line_text in enumerate(text.split("\n"), 1):
        if "#" not in line_text:
            continue
        for match in re.finditer("#", line_text):
            at = len(line_text[: match.start()].encode())
            if not any(start <= at < end for start, end in spans.get(number, ())):
                yield number, match.start(), line_text[match.end() :]
                break


def _comment_lines(text: str, mark: str) -> Iterator[tuple[int, int, str]]:
    """Return line, column and text of each comment of a source of C++ or Lua."""
    inside = False
    for number, line in enumerate(text.split("\n"), 1):
        if inside or (mark == "//" and line.lstrip().startswith("/*")):
            inside = "*/" not in line
            yield number, 0, line.strip().strip("/*").strip()
        elif (at := re.sub(r'"(\\.|[^"\\])*"', lambda found: "_" * len(found[0]), line).find(mark)) >= 0:
            # One behind code speaks of its own line.
            yield number, at if not line[:at].strip() else -number, line[at + len(mark) :].strip("-[]/")


def _of_comments(lines: Iterable[tuple[int, int, str]]) -> Iterator[tuple[int, str]]:
    """Return passages: comments in the same column on consecutive lines are one text."""
    block: list[str] = []
    begin, next_at = 0, (0, 0)
    for number, column, said in lines:
        if _DIRECTIVE.match(said.strip()):
            continue
        if (number, column) != next_at:
            yield from _paragraphs("\n".join(block), begin)
            block, begin = [], number
        block.append(said.strip())
        next_at = (number + 1, column)
    yield from _paragraphs("\n".join(block), begin)


def _paragraphs(text: str, line: int) -> Iterator[tuple[int, str]]:
    """Return paragraphs and list items of a docstring or comment, without indented examples and drawings."""
    lines = text.split("\n")
    margin = min((len(one) - len(one.lstrip()) for one in lines[1:] if one.strip()), default=0)
    held: list[str] = []
    begin = line
    for number, one in enumerate(lines, line):
        body = one[margin:] if number > line else one
        if not body.strip() or body.startswith("    ") or re.match(r"\s*([-*•]|\d+\.|\w+:) ", body):
            yield begin, " ".join(held)
            held, begin = [], number
        if body.strip() and not body.startswith("    "):
            begin = begin if held else number
            held.append(body.strip())
    yield begin, " ".join(held)


def _of_page(text: str) -> Iterator[tuple[int, str]]:
    """Return paragraphs, list items, headings and table cells of a Markdown page, without code blocks."""
    held: list[str] = []
    begin, fenced = 1, False
    for number, line in enumerate(text.split("\n"), 1):
        said = line.strip()
        fence = said.startswith(("```", "~~~"))
        ends = fence or fenced or not said or re.match(r"([-*+]|\d+\.|#+|>|\|) ?", said)
        if ends and held:
            yield begin, " ".join(held)
            held = []
        fenced ^= fence
        if fence or fenced or not said:
            continue
        if said.startswith("|"):
            yield from ((number, cell.strip()) for cell in re.split(r"(?<!\\)\|", said.strip("|")))
        else:
            begin = begin if held else number
            held.append(re.sub(r"^([-*+]|\d+\.|#+|>) ", "", said))
    yield begin, " ".join(held)
