"""The synchronous client has the methods of the asynchronous one, with the same parameters."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping

import pytest

from penstock.producer.client.client import AsyncClient
from penstock.producer.client.control import JobControl
from penstock.producer.client.job import AsyncJob
from penstock.producer.client.sync import Client, Control, Job
from penstock.producer.client.webhooks import SyncWebhooks, Webhooks

OF_SERVICES: Mapping[type, frozenset[str]] = {
    AsyncClient: frozenset(
        (
            *("connect", "is_alive"),  # The constructor of the synchronous client connects.
            *("submit_unread", "submit_many_unread", "submit_noting", "packed_result", "listed", "api_keys"),
            *("pressure", "usage", "pool_stats", "warn_of_eviction"),
            *("servers", "runs", "dead", "files", "batches", "feed"),
        )
    ),
    AsyncJob: frozenset(("batches", "packed_result", "ended_result", "renew", "present")),
    JobControl: frozenset(("change", "finished", "start", "stop", "continue_bulk", "keep_continuing")),
    Webhooks: frozenset(("queue", "disable", "secrets_of", "notify", "subscribed", "known_of", "check")),
}
"""What gateways, workers and commands use beside; they are asynchronous."""
PARAMETERS_OF_SERVICES = {"served_pool": {"key", "hides_models"}}
PAIRS = [(Client, AsyncClient), (Job, AsyncJob), (Control, JobControl), (SyncWebhooks, Webhooks)]


def attributes_of(kind: type) -> set[str]:
    """Return the public attributes that the constructor sets."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__)))  # type: ignore[misc]
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "self"}


def names_of(kind: type) -> set[str]:
    return {name for name in {*vars(kind), *attributes_of(kind)} if not name.startswith("_")}


def parameters_of(kind: type, name: str) -> list[tuple[str, object, object, str]]:
    """Return name, kind and default of each parameter, and what keyword arguments there are."""
    parameters = inspect.signature(getattr(kind, name)).parameters.values()
    beside = PARAMETERS_OF_SERVICES.get(name, set())
    return [
        (one.name, one.kind, one.default, str(one.annotation) if one.kind is one.VAR_KEYWORD else "")
        for one in parameters
        if one.name not in beside
    ]


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS)
def test_both_clients_have_the_same_names(sync: type, asynchronous: type) -> None:
    assert names_of(sync) - names_of(asynchronous) == set()
    assert names_of(asynchronous) - names_of(sync) - OF_SERVICES[asynchronous] == set()


@pytest.mark.parametrize(
    ("sync", "asynchronous", "name"),
    [
        (*pair, name)
        for pair in PAIRS
        for name in sorted(names_of(pair[0]))
        if inspect.isfunction(getattr(pair[0], name, None))
    ],
)
def test_a_method_of_both_clients_has_the_same_parameters(sync: type, asynchronous: type, name: str) -> None:
    wanted = [(*others, annotation.replace("tasks.", "")) for *others, annotation in parameters_of(asynchronous, name)]
    assert parameters_of(sync, name) == wanted


def test_both_clients_are_made_alike() -> None:
    assert parameters_of(Client, "__init__") == parameters_of(AsyncClient, "__init__")
