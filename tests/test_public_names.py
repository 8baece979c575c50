"""What `from penstock import …` gives: every error, every settings class, and fully annotated types."""

from __future__ import annotations

import ast
import inspect
import pydoc
import subprocess
import sys
from typing import get_type_hints

import pytest

import penstock
from penstock.contract.job import QueueFields, QueueOptions
from penstock.contract.output import Chunk, Outcome, Result
from penstock.contract.sampling import SamplingOptions
from penstock.runtime.settings import Settings
from tests.source_tree import ROOT, modules

WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "triton", "fastapi", "celery"):
    sys.modules[name] = None
import penstock
for name in penstock.__all__:
    getattr(penstock, name)
"""


def classes_below(root: str, home: str = "penstock") -> set[str]:
    """Names of the public classes that derive from `root`, itself included, in the modules whose name begins so."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for module in modules().values()
        if module.name.startswith(home)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {root}
    while more := {name for name, its in bases.items() if its & found} - found:
        found |= more
    return {name for name in found if not name.startswith("_")}


def test_the_whole_tree_of_errors_is_public() -> None:
    errors = classes_below("PenstockError", "penstock.contract.errors")
    assert len(errors) > 15
    assert errors <= set(penstock.__all__)


def test_all_settings_are_public() -> None:
    settings = classes_below("Settings") - {Settings.__name__}
    assert len(settings) >= 6
    assert settings | {"EngineConfig"} <= set(penstock.__all__)


def test_every_public_name_is_there_without_torch_or_a_web_framework() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_type_checkers_import_is_what_is_loaded() -> None:
    tree = ast.parse((ROOT / "src/penstock/__init__.py").read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    homes = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert homes == penstock._HOME_OF
    assert {*homes, "__version__"} == set(penstock.__all__)


def test_a_job_is_what_submit_returns() -> None:
    assert penstock.Client.submit.__annotations__["return"] == penstock.Job.__name__
    assert get_type_hints(penstock.Client.attach)["return"] is penstock.Job
    assert get_type_hints(penstock.AsyncClient.attach)["return"] is penstock.AsyncJob


@pytest.mark.parametrize("client", [penstock.Client, penstock.AsyncClient])
@pytest.mark.parametrize(
    ("method", "listed", "background"),
    [
        ("submit", penstock.SubmitOptions, True),
        ("stream", penstock.SubmitOptions, False),
        ("generate", penstock.GenerateOptions, True),
        ("map", penstock.GenerateOptions, True),
        ("map_unordered", penstock.GenerateOptions, True),
    ],
)
def test_help_lists_every_option_with_its_default(client: type, method: str, listed: type, background: bool) -> None:
    options = inspect.signature(getattr(client, method)).parameters
    prompts = "prompt" if listed is penstock.SubmitOptions else "prompts"
    assert {"self", prompts, *listed.__annotations__} == set(options)
    shown = pydoc.plain(pydoc.render_doc(getattr(client, method)))
    for option in ("max_tokens: int | None = None", "temperature: float = 1.0", f"background: bool = {background}"):
        assert option in shown
    if listed is penstock.GenerateOptions:
        for option in (
            "timeout: float | None = None",
            "check: bool = True",
            "max_in_flight: int = 256",
            "needs_reader: bool = True",
        ):
            assert option in shown
    assert "See `" not in shown


@pytest.mark.parametrize(
    ("options", "base"),
    [
        (penstock.JobOptions, SamplingOptions),
        (penstock.SubmitOptions, penstock.JobOptions),
        (penstock.GenerateOptions, penstock.JobOptions),
    ],
)
def test_help_explains_every_option(options: type, base: type) -> None:
    own = set(options.__annotations__) - set(base.__annotations__)
    assert own
    shown = inspect.getdoc(options) or ""
    assert [name for name in own if f"\n{name}: " not in shown] == []


def test_keyword_arguments_are_the_fields_of_the_records() -> None:
    assert [*SamplingOptions.__annotations__] == [*penstock.SamplingParams.model_fields]
    assert [*QueueOptions.__annotations__] == [*QueueFields.model_fields]


def test_no_public_class_shows_an_address(redis_url: str) -> None:
    secret = redis_url.replace("://", "://:s3cret@")
    shown = [repr(penstock.AsyncClient(secret)), repr(Chunk("demo.1", 0)), repr(Result("demo.1", Outcome("succeeded")))]
    with penstock.Client(redis_url, tenant="acme") as client:
        shown.append(repr(client))
        assert repr(client) == f"<Client {redis_url} tenant=acme connected>"
    assert repr(client).endswith("closed>")
    assert [text for text in shown if " at 0x" in text or "s3cret" in text] == []
