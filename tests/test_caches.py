"""Every cache, and every table keyed by a text, is on a list. What a caller's text keys has the tenant in its key.

A cache that tenants share by text tells one of them by an answer's time or numbers whether another one sent that text.
The entries are found in the syntax trees, so a new one fails here until it is on a list with its reason.
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

BY_TENANT = {
    "gpu_node.engine.kv_cache.block_pool:_num_cached": "tenant; no text of a request",
    "gpu_node.engine.kv_cache.block_pool:_rings": "tenant; no text of a request",
    "gpu_node.engine.kv_cache.block_pool:_used_at": "tenant; no text of a request",
    "gpu_node.engine.kv_cache.block_pool:_weights": "tenant; no text of a request",
    "gpu_node.engine.kv_cache.manager:_index": "hashes that chain from salted_root(tenant, cache_salt, adapter)",
    "queue.job_cost:_windows": "(tenant, classes of lengths); '' is the sum over all tenants",
    "gpu_node.engine.policy.by_policy:_held": "tenant; no text of a request",
    "gpu_node.engine.policy.by_policy:_weights": "tenant; no text of a request",
    "gpu_node.engine.structured.compiler:_known": "_Key: (tenant, digest of the text)",
    "gpu_node.engine.structured.compiler:_num_ended": "_Key",
    "gpu_node.engine.structured.compiler:_pending": "_Key; the single flight of trials",
    "gpu_node.engine.structured.compiler:_used": "_Key",
    "gpu_node.engine.structured.lanes:_waiting": "tenant; trials in order of arrival",
    "gpu_node.engine.text.encoder:_known": "(Owner, piece of a chat or plain prompt); an Owner is (tenant, cache_salt)",
    "gpu_node.taking.preparation:_trials_of": "tenant",
    "gpu_node.taking.preparation:_chats_of": "tenant; no text of a request",
    "gpu_node.taking.preparation:_long_prompts_of": "tenant; no text of a request",
    "gpu_node.taking.preparation:_tasks_of": "tenant; no text of a request",
    "producer.client.job:_of_tenant": "tenant, then a number; never looked up by a text",
    "gateway.open_feeds:_of_tenant": "tenant; no text of a request",
    "gateway.budget:_claims": "tenant; no text of a request",
    "gateway.budget:_waiting": "tenant; no text of a request",
    "queue.policy:_queues": "tenant; no text of a request",
    "queue.policy_state:debts": "tenant; no text of a request",
    "queue.policy_state:last": "tenant; no text of a request",
    "queue.policy_state:this": "tenant; no text of a request",
    "queue.policy_state:times": "tenant; no text of a request",
}
"""Tables of all tenants. What their keys are made of."""

BY_ID = {
    "gpu_node.engine.async_engine:_streams": "id of a request",
    "gpu_node.engine.engine:_finished_usage": "id of a request",
    "gpu_node.engine.engine:_requests": "id of a request",
    "gpu_node.engine.timings:_ended": "id of a request",
    "gpu_node.engine.timings:running": "id of a request",
    "gpu_node.engine.search.searches:_beams": "id of a request",
    "gpu_node.engine.search.searches:_best_of": "id of a request",
    "gpu_node.engine.policy.policy:_slots": "digest of an adapter, which the operator chose",
    "gpu_node.jobs.ledger:_by_lease": "lease",
    "gpu_node.jobs.ledger:_failing": "a part of the node",
    "gpu_node.jobs.ledger:_jobs": "job id",
    "gpu_node.publishing.outbox:_waiters": "lease",
    "gpu_node.model.lora.library:_read": "digest of an adapter, which the operator chose",
    "gpu_node.model.ranks.group:_started": "number of a rank",
    "gpu_node.model.torch_cpu.load:_read": "tensor of a checkpoint",
    "gpu_node.service.health:_troubles": "part of the node",
    "gpu_node.publishing.outbox:_dirty": "job id",
    "producer.batch.results:failed": "part of one batch file",
    "producer.batch.task_leases:_known": "Celery's id of a delivery",
    "producer.batch.task_leases:_seen": "Celery's id of a delivery",
    "producer.batch.worker_metrics:_started_s": "Celery's id of a task",
    "producer.client.pools:_of": "pool",
    "producer.client.webhooks:_remembered": "tenant",
    "producer.client.completions:_ids": "job id",
    "producer.client.inbox:_detaching": "job id",
    "producer.client.inbox:_pools": "pool",
    "queue.broker.pools:known": "pool",
    "queue.broker.scripts:_read": "pool",
    "producer.client.inbox:_feeds": "job id",
    "producer.client.inbox:_last_heartbeat_s": "job id",
    "gateway.http.entry:_is_allowed": "Host header, of a gateway without keys: it has one tenant",
}
"""Tables of all tenants, keyed by names that penstock or the operator makes, or that say nothing of a tenant."""

OF_ONE_REQUEST = {
    "gateway.message_batches.splitting:_numbers",
    "gateway.openai.encoder:_frames",
    "gateway.openai.encoder:_num_prompt_tokens",
    "gateway.openai.encoder:_prompt_ids",
    "gateway.openai.encoder:_readers",
    "gateway.responses.encoder:_members",
    "gateway.responses.items:arguments",
    "gateway.websocket.session:_streams",
    "gpu_node.engine.structured.quoted_grammar:_definitions",
    "gpu_node.engine.structured.schema.facts:properties",
    "gpu_node.engine.structured.schema.facts:ranges",
    "queue.broker.admin:jobs",
    "producer.stored_batches.rows:models",
    "producer.stored_batches.row_client:open_jobs",
    "contract.pool:adapters",
    "contract.pool:jobs_by_tenant",
    "contract.pool:sampling_defaults",
    "contract.pool:times_of_hour",
    "contract.pool:troubles",
}
"""Tables that one request, connection or record has."""

OF_ONE_USER = {
    "cli.bench.connection:_headers",
    "cli.main:_load",
    "cli.option_words:_sampling",
    "cli.option_words:notices",
    "cli.option_words:problems",
    "cli.options:_docstrings_in",
    "cli.top.reader:_seen",
    "contract.fields:names_at",
    "gateway.api_docs.openapi:body_schemas",
    "gpu_node.model.architecture.families:families",
    "gpu_node.model.checkpoint.stored_tensors:_can_dequantize",
    "gpu_node.model.checkpoint.methods:methods",
    "gpu_node.model.torch_cpu.load:can_prepack",
    "queue.broker.scripts:_digest",
    "queue.files.records_audit:hashes",
    "queue.files.records_audit:members",
    "queue.broker.scripts:_part",
    "queue.broker.scripts:source",
}
"""Tables of a command on a terminal, and of penstock's own code and model files. No request reaches their keys."""

TIMING_CHANNELS = {
    "word cache": "the library tokenizers keeps the tokens of single words of all texts that it encodes",
    "string cache": "the library pydantic keeps short strings of the JSON that it parses",
}
"""Caches of libraries, which tenants share. SECURITY.md names each by these words."""

CACHES = {"lru_cache", "cache", "cached", "cachedmethod", "LRUCache", "TTLCache", "LFUCache", "TLRUCache", "FIFOCache"}
TABLES = {"dict", "OrderedDict", "defaultdict", "WeakValueDictionary"}
TEXTS = ("str", "bytes", "Any", "object", "Key")
"""Parts of an annotation whose values may be texts. Other keys are numbers and objects with an identity."""
HEADER = "penstock."


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


def tables_in(tree: ast.Module) -> Iterator[str]:
    """Yield the names of caches, and of tables that begin empty and whose keys may be texts."""
    nodes = list(ast.walk(tree))
    outer: set[ast.AST] = {*tree.body} | {one for node in nodes if isinstance(node, ast.ClassDef) for one in node.body}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(last_name(one) in CACHES for one in node.decorator_list):
                yield node.name
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
                yield last_name(target)


def found() -> set[str]:
    places = set()
    for module in modules().values():
        if not module.name.startswith("penstock.kernels"):  # They see arrays, never texts.
            places |= {f"{module.name.removeprefix(HEADER)}:{name}" for name in tables_in(module.tree)}
    return places


def test_every_cache_and_every_table_keyed_by_a_text_is_on_a_list() -> None:
    listed = {*BY_TENANT, *BY_ID, *OF_ONE_REQUEST, *OF_ONE_USER}
    assert len(listed) == sum(map(len, (BY_TENANT, BY_ID, OF_ONE_REQUEST, OF_ONE_USER)))
    known = found()
    unlisted, gone = sorted(known - listed), sorted(listed - known)
    assert not unlisted, f"put it on a list of this file, with the tenant in its key if a caller's text is: {unlisted}"
    assert not gone, f"take it off its list: {gone}"


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
    assert list(tables_in(ast.parse(source))) == ["known"]


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n def __init__(self):\n  self.known: dict[int, str] = {}",
        "def f():\n known: dict[str, int] = {}",
        "FIXED = {'a': 1}",
    ],
)
def test_a_table_of_numbers_or_of_one_call_is_none(source: str) -> None:
    assert not list(tables_in(ast.parse(source)))


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
    }
    given_by_callers = {
        name
        for name, function in inspect.getmembers(keys, inspect.isfunction)
        if function.__module__ == keys.__name__
        and inspect.signature(function).return_annotation in ("str", "bytes")
        and not inspect.signature(function).parameters.keys() <= made
    }
    assert given_by_callers == {"idempotency", "key_hash", "own_channel"}
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
