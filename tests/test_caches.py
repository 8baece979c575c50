"""A comment above every cache, and every table keyed by a text, says whose it is.

A cache that tenants share by text tells one of them by an answer's time or numbers whether another one sent that text.
So what a caller's text keys has the tenant in its key. The tables are found in the syntax trees.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gpu_node.engine.sequence import salted_root
from penstock.gpu_node.engine.structured.compiler import GrammarCompiler
from penstock.gpu_node.engine.text.encoder import ChatEncoder
from penstock.queue import keys
from tests.source_tree import ROOT, modules

OWNERS = ("# Keyed by tenant", "# Keyed by id: ", "# Of one request", "# Of one user")
"""How the comment above a cache or a table, or behind it, begins.

- *Keyed by tenant*: a caller's text may be a part of the key, because the tenant is another.
- *Keyed by id*: penstock or the operator makes the keys, or they say nothing of a tenant.
- *Of one request*: one request, connection or record has the table.
- *Of one user*: the table belongs to a command on a terminal, or to our own code and files. No request reaches it.
"""

TIMING_CHANNELS = {
    "word cache": "the library tokenizers keeps the tokens of single words of all texts that it encodes",
    "string cache": "the library pydantic keeps short strings of the JSON that it parses",
}
"""Caches of libraries, which tenants share. SECURITY.md names each by these words."""

CACHES = {"lru_cache", "cache", "cached", "cachedmethod", "LRUCache", "TTLCache", "LFUCache", "TLRUCache", "FIFOCache"}
TABLES = {"dict", "OrderedDict", "defaultdict", "WeakValueDictionary"}
TEXTS = ("str", "bytes", "Any", "object", "Key")
"""Parts of an annotation whose values may be texts. Other keys are numbers and objects with an identity."""


def last_name(node: ast.expr) -> str:
    """The last part of a dotted name, of what is called, or of what is subscripted."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def may_be_text(kind: ast.expr | None) -> bool:
    """Whether the keys of a table of this type may be texts; so if the type does not say what its keys are."""
    if not isinstance(kind, ast.Subscript):
        return True
    key = kind.slice.elts[0] if isinstance(kind.slice, ast.Tuple) else kind.slice
    return any(word in ast.unparse(key) for word in TEXTS)


def is_empty_table(value: ast.expr) -> bool:
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.Call) and last_name(value) == "field":
        factories = [one.value for one in value.keywords if one.arg == "default_factory"]
        return any(last_name(one) in TABLES for one in factories)
    return isinstance(value, ast.Call) and last_name(value) in TABLES and not value.args


def is_kept(target: ast.expr, node: ast.AST, outer: set[ast.AST]) -> bool:
    """Whether a value outlives a function's call: an attribute of `self`, or a name of a module or a class."""
    if isinstance(target, ast.Attribute):
        return isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")
    return isinstance(target, ast.Name) and node in outer


def placed(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield caches, and tables that begin empty and whose keys may be texts: name and statement."""
    nodes = list(ast.walk(tree))
    outer: set[ast.AST] = {*tree.body} | {one for node in nodes if isinstance(node, ast.ClassDef) for one in node.body}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(last_name(one) in CACHES for one in node.decorator_list):
                yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target, kind = (
                (node.target, node.annotation) if isinstance(node, ast.AnnAssign) else (node.targets[0], None)
            )
            if not is_kept(target, node, outer):
                continue
            is_cache = any(isinstance(one, ast.Call) and last_name(one) in CACHES for one in ast.walk(node.value))
            called = node.value.func if isinstance(node.value, ast.Call) else None
            if kind is not None and last_name(kind) == "Mapping":
                continue  # A record, which nothing adds to.
            if is_cache or (is_empty_table(node.value) and may_be_text(kind or called)):
                yield last_name(target), node


def unowned(tree: ast.Module, source: str) -> Iterator[str]:
    """Yield the caches and tables of a module without a comment that says whose they are."""
    lines = source.split("\n")
    for name, node in placed(tree):
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(one.lineno for one in decorators)])
        behind = lines[node.lineno - 1].rpartition("  #")[2]
        if not (lines[first - 2].lstrip().startswith(OWNERS) or f"#{behind}".startswith(OWNERS)):
            yield f"{first}: {name}"


def test_a_comment_above_every_cache_and_every_table_keyed_by_a_text_says_whose_it_is() -> None:
    found = [
        f"{module.path}:{one}"
        for module in modules().values()
        if not module.name.startswith("penstock.kernels")  # They see arrays, never texts.
        for one in unowned(module.tree, module.path.read_text())
    ]
    assert found == [], f"write one of these above it, with the tenant in its key if a caller's text is: {OWNERS}"


@pytest.mark.parametrize(("above", "is_found"), [("", True), ("# A cache.", True), ("# Keyed by tenant.", False)])
def test_a_table_needs_its_comment(above: str, is_found: bool) -> None:
    source = f"import x\n{above}\nknown: WeakValueDictionary[str, A] = WeakValueDictionary()"
    assert [*unowned(ast.parse(source), source)] == ["3: known"] * is_found


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n def __init__(self):\n  self.known: dict[str, int] = {}",
        "class A:\n def __init__(self):\n  self.known = {}",
        "class A:\n def __init__(self):\n  self.known = OrderedDict[bytes, int]()",
        "class A:\n known: dict[tuple[int, str], int] = field(default_factory=dict)",
        "class A:\n def __init__(self):\n  self.known: LRUCache[int, int] = LRUCache(9)",
        "class A:\n def __init__(self, f):\n  self.known = lru_cache(9)(f)",
        "known: WeakValueDictionary[str, A] = WeakValueDictionary()",
        "@functools.lru_cache(maxsize=None)\ndef known(text): ...",
        "@cache\ndef known(text): ...",
    ],
)
def test_a_new_cache_is_found(source: str) -> None:
    assert [name for name, _ in placed(ast.parse(source))] == ["known"]


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n def __init__(self):\n  self.known: dict[int, str] = {}",
        "def f():\n known: dict[str, int] = {}",
        "FIXED = {'a': 1}",
    ],
)
def test_a_table_of_numbers_or_of_one_call_is_none(source: str) -> None:
    assert not [name for name, _ in placed(ast.parse(source))]


def test_security_names_the_timing_channels_that_remain() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert [words for words in TIMING_CHANNELS if words not in text] == []


def test_a_redis_key_with_a_callers_text_has_the_tenant() -> None:
    """The other functions take names that penstock or an operator makes, and ids whose records name their tenant."""
    made = {
        "endpoint_id",
        "event_id",
        "bulk_id",
        "file_id",
        "batch_id",
        "state",
        "pool",
        "job_id",
        "node_id",
        "tenant",
        "level",
        "day",
        "hour",
        "profile_id",
        "process",
        "kind",
    }
    given_by_callers = {
        name
        for name, function in inspect.getmembers(keys, inspect.isfunction)
        if function.__module__ == keys.__name__
        and inspect.signature(function).return_annotation in ("str", "bytes")
        and not inspect.signature(function).parameters.keys() <= made
    }
    assert given_by_callers == {"idempotency", "key_hash", "own_channel", "tagged"}
    assert keys.tagged("p", "a", "x") != keys.tagged("p", "b", "x")
    assert keys.own_channel("p.x", "a", "name") != keys.own_channel("p.x", "b", "name")
    assert keys.idempotency("p", "a", keys.key_hash("x")) != keys.idempotency("p", "b", keys.key_hash("x"))


SALTS = st.tuples(st.text(max_size=3) | st.none(), st.text(max_size=3) | st.none(), st.text(max_size=3) | st.none())


@given(SALTS, SALTS)
def test_prefixes_have_one_root_only_if_tenant_salt_and_adapter_are_equal(
    one: tuple[str | None, str | None, str | None], other: tuple[str | None, str | None, str | None]
) -> None:
    assert (salted_root(*one) == salted_root(*other)) == (one == other)


def test_a_salt_cannot_be_moved_into_the_tenant() -> None:
    assert salted_root("a", "bc", None) != salted_root("ab", "c", None)
    assert len({salted_root("a", salt, None) for salt in (None, "None", "", "a")}) == 4


def test_services_with_such_caches_take_the_tenant() -> None:
    assert "tenant" in inspect.signature(GrammarCompiler.prepare).parameters
    assert "owner" in inspect.signature(ChatEncoder.encode).parameters
