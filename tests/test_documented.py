"""The pages name every error code, command and setting that a user meets, and what the pages name exists."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import typer
from docs_site.reference import reference_pages
from pydantic import BaseModel
from typer.main import get_command

from penstock.cli.command_line import usage_line
from penstock.cli.machine.config import PARTS
from penstock.cli.main import app
from penstock.cli.peers import COMMANDS
from penstock.contract.errors import PenstockError
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.client.settings import ClientSettings
from tests.ops.known_metrics import known_metrics
from tests.pages import blocks_of
from tests.source_tree import ROOT, Module, modules
from tests.test_documents import PAGES, text_of

ANSWERING = (
    "gateway",
    "gpu_node",
    "producer.client",
    "producer.openai",
    "producer.responses",
    "producer.files",
    "producer.stored_batches",
    "contract",
    "queue",
)
"""The packages whose errors may be the answer of a gateway."""
NOT_OVER_HTTP = {
    **dict.fromkeys(("ambiguous_name", "key_revoked", "unreadable_key", "keys_in_use"), "penstock keys"),
    **dict.fromkeys(("no_answer", "no_reader"), "penstock profile"),
    **dict.fromkeys(("batch_taken", "too_many_rows"), "the holder of a batch"),
    **dict.fromkeys(("not_a_list", "too_many_items", "no_text"), "the error of a row of a flow"),
    **dict.fromkeys(("duplicate_custom_id", "empty_file"), "client.flow"),
    "pool_in_use": "penstock pools forget",
    "tenant_in_use": "penstock tenants delete",
    "client_closed": "a client that was closed",
    "engine_stalled": "it ends a node",
    "id_conflict": "a gateway makes the ids of jobs itself",
    "job_failed": "every failed job has a code of its own",
    "result_timeout": "the `timeout` of a client in Python",
    "unavailable": "every such error has a code of its own",
}
"""Code → where it is used instead."""


def codes_in(module: Module) -> Iterator[str]:
    """The error codes that a module states: of a class, or as the argument `code`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            yield from (literal_in(keyword.value) for keyword in node.keywords if keyword.arg == "code")
            if getattr(node.func, "id", "") == "Outcome" and len(node.args) > 1:
                yield literal_in(node.args[1])
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == "code":
                yield literal_in(node.value)


def literal_in(value: ast.expr) -> str:
    """The text of a literal; empty for anything else."""
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def codes_of_scripts() -> Iterator[str]:
    """The codes with which the queue's scripts end jobs."""
    for script in (ROOT / "src/penstock/queue/scripts").rglob("*.lua"):
        yield from re.findall(r"'(?:failed|dead|cancelled|expired)', '(\w+)'", script.read_text())


def test_http_page_names_every_error_code() -> None:
    answering = tuple(f"penstock.{package}." for package in ANSWERING)
    stated = {code for module in modules().values() if module.name.startswith(answering) for code in codes_in(module)}
    stated |= {*codes_of_scripts(), "unsupported_value", "unknown_field", "method_not_allowed"}
    page = (ROOT / "docs/HTTP.md").read_text().partition("\n## Errors")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", page))
    assert {"redis_away", "node_lost", "adapter_changed"} < stated
    assert sorted(stated - named - NOT_OVER_HTTP.keys() - {""}) == []
    of_table = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| [\d, ]+ \| ([^|]+) \|", page, re.MULTILINE))))
    assert sorted(of_table - stated) == []


def test_command_page_names_every_command() -> None:
    page = (ROOT / "docs/CLI.md").read_text()
    missing = []
    for name, command in cast(Any, get_command(app)).commands.items():
        lines = " ".join(re.findall(rf"penstock {name}\b.*", page))
        words = set(re.findall(r"[a-z]+", lines))
        missing += [f"{name} {sub}" for sub in getattr(command, "commands", ()) if sub not in words]
        missing += [name] * (not lines)
    assert missing == []


@pytest.mark.parametrize(("page", "settings"), [("docs/PYTHON.md", ClientSettings), ("docs/CLI.md", CelerySettings)])
def test_settings_without_a_help_page_have_a_table(page: str, settings: type[BaseModel]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (ROOT / page).read_text(), re.MULTILINE)
    written = {name: default.strip() for name, default in rows}
    for name, field in settings.model_fields.items():
        default = "none" if field.default is None else str(field.default).lower()
        assert written.get(name) == f"`{default}`", name


# What the pages name exists: commands with their options, names of fields, codes, settings and metrics, and routes.

SHELLS = ("", "sh", "bash", "console")
PAGES_OF_TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""The changelog also names what was removed."""
FOREIGN_NAMES = {
    *("ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_MODEL", "HF_ENDPOINT", "OPENBLAS_CORETYPE", "ROLE_PASSWORD"),
    *("OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_RESOURCE_ATTRIBUTES"),
    *("MD_JSON", "PARALLEL_TOOLS", "data_files", "generate_until", "multiple_choice", "num_concurrent"),  # of clients
    *("openai_suite_plugin", "num_ctx", "web_search_20250305", "sched_switch", "connected_slaves"),
    *("process_max_fds", "process_open_fds"),
    *("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    *("router_cpu_usage_percent", "router_disk_usage_percent", "router_memory_usage_percent"),  # made of two parts
}
"""Names of other programs, which the pages explain."""
NAME = re.compile(r"(?<![\w.])[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+(?![\w…*])")
VERB = "(?:GET|POST|DELETE)"
SOURCES = ("src", "cli", "producer", "gateway", "gpu_node", "kernels", "ops", "tests", "examples")
SUFFIXES = {".py", ".lua", ".js", ".cpp", ".h", ".yml", ".yaml", ".json", ".sh", ".toml", ".conf", ".service"}
OTHER_PATHS = ("/v1", "/v1/stream")
"""The base of OpenAI's clients, and a WebSocket, which OpenAPI does not describe."""


@cache
def known_names() -> frozenset[str]:
    """Every name of the code, its tests and its files of settings, with the variables and metrics made from them."""
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    files += [*ROOT.glob("docker-compose*.yml"), ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "ops/Dockerfile"]
    found = {path.stem for path in files}
    for path in files:
        found.update(re.findall(r"[A-Za-z]\w+", path.read_text(errors="replace")))
    variables = {kind.variable_of(name) for kinds in PARTS.values() for kind in kinds for name in kind.model_fields}
    metrics = {f"{name}{end}" for name in known_metrics() for end in ("", "_total")}
    return frozenset(found | variables | {f"{one}_FILE" for one in variables} | metrics | FOREIGN_NAMES)


def commands_in(text: str) -> Iterator[list[str]]:
    """The commands of a text of shell, as words."""
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("\n", "\n;\n"), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in (*lexer, ";"):
        if set(word) <= set("();<>|&"):
            if words:
                yield words
            words = []
        else:
            words.append(word)


def own_commands(texts: Iterable[str]) -> Iterator[list[str]]:
    """The words behind each `penstock` in texts of shell."""
    for words in chain.from_iterable(commands_in(text) for text in texts if "penstock" in text):
        at = next((at for at, word in enumerate(words) if word.rpartition("/")[2] == "penstock"), None)
        if at is not None and "import" not in words:
            yield words[at + 1 :]


def problem_with(words: list[str]) -> str:
    """Parse a command as `penstock` does before it starts anything. Return its error, empty without one."""
    command: Any = get_command(app)
    context, rest = typer.Context(command, info_name="penstock"), list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        below = command.get_command(context, rest[0])
        if below is None:
            return f"no command {rest[0]!r}"
        command, rest = below, rest[1:]
    if hasattr(command, "commands"):
        return ""
    try:
        command.make_context(command.name, rest, parent=context)
    except typer.Exit:  # --help
        return ""
    except typer.TyperException as error:
        return usage_line(error)
    except PenstockError as error:
        return error.message
    return ""


@pytest.mark.parametrize("page", PAGES_OF_TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_are_taken(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block.text for block in blocks_of(page) if block.language in SHELLS]
    wrong = {shlex.join(words): said for words in own_commands(blocks) if (said := problem_with(words))}
    inline = re.findall(r"`(penstock [^`\n]+)`", text_of(page))
    named = {shlex.join(words): problem_with(words) for words in own_commands(inline)}
    # A sentence may name a command or an option without its value.
    may_be_named = re.compile(rf" is missing| needs a value|^no command '({'|'.join(COMMANDS)})'")
    wrong |= {line: said for line, said in named.items() if said and not may_be_named.search(said)}
    assert wrong == {}


@pytest.mark.parametrize("page", PAGES_OF_TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_bodies_that_a_page_sends_are_json(page: Path) -> None:
    blocks = [block.text for block in blocks_of(page) if "curl" in block.text and block.language in SHELLS]
    for words in chain.from_iterable(map(commands_in, blocks)):
        for option, body in pairwise(words):
            if option in ("-d", "--data") and body.startswith("{"):
                json.loads(body.replace("\n;\n", "\n"))  # `commands_in` ends each line of a text so


def test_a_wrong_command_of_a_page_is_noticed() -> None:
    assert problem_with(["jobs", "lst"]) == "no command 'lst'"
    assert "--limt" in problem_with(["jobs", "list", "--limt", "3"])
    assert problem_with(["serve", "demo", "--port", "many"])
    assert "MODEL is missing" in problem_with(["plan"])
    (words,) = commands_in("A=1 penstock serve \\\n  demo --port 8000  # a comment")
    assert words == ["A=1", "penstock", "serve", "demo", "--port", "8000"]


@pytest.mark.parametrize("page", PAGES_OF_TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_a_page_exist(page: Path) -> None:
    named = {name for code in re.findall(r"`([^`\n]+)`", text_of(page)) for name in NAME.findall(code)}
    assert sorted(named - known_names()) == []


@cache
def known_routes() -> tuple[re.Pattern[str], ...]:
    found = re.findall(r"^## `[A-Z]+ (/.*)`$", reference_pages()["http.md"], re.MULTILINE)
    return tuple(re.compile(re.sub(r"\{[^}]+\}", "[^/]+", route)) for route in (*found, *OTHER_PATHS))


@pytest.mark.parametrize("page", PAGES_OF_TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_routes_and_targets_of_make_in_a_page_exist(page: Path) -> None:
    text = page.read_text()
    paths = set(
        re.findall(rf"(?:127\.0\.0\.1:8000|`(?:{VERB} )?(?=/v\d)|`{VERB} )(/[\w/{{}}-]*[\w}}])(?![\w/{{}}…-])", text)
    )
    assert sorted(path for path in paths if not any(route.fullmatch(path) for route in known_routes())) == []
    targets = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    blocks = "".join(block.text for block in blocks_of(page) if block.language in SHELLS)
    wanted = {*re.findall(r"`make ([a-z][\w-]*)", text), *re.findall(r"^make ([a-z][\w-]*)", blocks, re.MULTILINE)}
    assert sorted(wanted - targets) == []


def test_the_tests_that_security_names_exist() -> None:
    root = Path(__file__).parents[1]
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", (root / "SECURITY.md").read_text()))
    assert len(named) > 30
    assert not (missing := sorted(name for name in named if not (root / name).is_file())), missing
