"""The documentation as a site: every page is found, generated pages have the code's names, and all links hold."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from docs_site.links import broken_links
from docs_site.pages import menu, named_pages, write_sources
from docs_site.reference import reference_pages
from typer.main import get_command

import penstock
from penstock.cli.machine.config import PARTS
from penstock.cli.main import app
from penstock.cli.peers import PEERS
from tests.pages import PAGES, blocks_of
from tests.source_tree import ROOT

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
FOREIGN = {
    "--via-celery",
    "--pool",
    "--concurrency",
    "--loglevel",
    "--from-literal",
    "--detach",
    "--build",
    "--no-build",
    "--no-deps",
    "--no-log-prefix",
    "--rm",
    "--volumes",
    "--no-auth-warning",
    "--find-links",
    *("--app-dir", "--workers", "--workdir", "--noreload", "--retry", "--retry-delay", "--retry-connrefused"),
}
"""Flags of Celery, kubectl, Docker, redis-cli, pip, uvicorn, Django and curl that pages name."""


def options_of(command: Any) -> set[str]:
    found = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for sub in getattr(command, "commands", {}).values():
        found |= options_of(sub)
    return found


def test_the_menu_names_pages_that_exist_and_every_page_of_docs(tmp_path: Path) -> None:
    write_sources(tmp_path / "site")
    source = tmp_path / "site/source"
    named = set(named_pages(menu()))
    assert [name for name in sorted(named) if not (source / name).is_file()] == []
    pages = {str(path.relative_to(ROOT)) for folder in ("docs", "docs/howto") for path in (ROOT / folder).glob("*.md")}
    assert pages <= named


def test_the_site_has_the_files_that_operators_need_as_an_archive(tmp_path: Path) -> None:
    write_sources(tmp_path / "site")
    with tarfile.open(tmp_path / "site/source/ops/penstock-ops.tar.gz") as archive:
        names = {entry.name for entry in archive if entry.isfile()}
    folders = {str(Path(name).parent) for name in names}
    assert {"ops/acl", "ops/deploy/systemd", "ops/observe/dashboards", "ops/deploy/kubernetes/base/gateway"} <= folders
    assert {"ops/acl/make_users.sh", "ops/observe/alerts.yml", "ops/redis.conf"} <= names
    page = (tmp_path / "site/source/ops/deploy/systemd/index.md").read_text()
    assert "[penstock-ops.tar.gz](../../penstock-ops.tar.gz)" in page


def test_the_reference_has_every_command_and_setting() -> None:
    pages = reference_pages()
    settings = {kind.variable_of(name) for kinds in PARTS.values() for kind in kinds for name in kind.model_fields}
    shared = {name for name in settings if name.endswith("_REDIS_URL") and name != "PENSTOCK_REDIS_URL"}
    assert [name for name in sorted(settings - shared) if f"`{name}`" not in pages["settings.md"]] == []
    assert "### `penstock pools declare`" in pages["commands.md"]
    assert len(re.findall(r"^### `penstock ", pages["commands.md"], re.MULTILINE)) > 40
    assert "| `stream_diverged` | `StreamDivergedError` |" in pages["errors.md"]
    assert "P:queue:<l>:<tenant>" in pages["redis_keys.md"]


def test_the_reference_has_every_route_metric_and_public_name() -> None:
    pages = reference_pages()
    routes = re.findall(r"^## `([A-Z]+ /.*)`$", pages["http.md"], re.MULTILINE)
    assert {"POST /v1/chat/completions", "GET /v1/jobs/{job_id}", "POST /v1/batches"} <= set(routes)
    assert "| `max_tokens` | integer or null |" in pages["http.md"]
    shown = set(re.findall(r"^\| `(penstock_\w+)` \| \w+ \|.*\| \S", pages["metrics.md"], re.MULTILINE))
    # What METRICS.md names is what the processes report (tests/ops/test_runbook.py).
    named = set(re.findall(r"`(penstock_\w+)`", (ROOT / "ops/METRICS.md").read_text()))
    assert len(shown) > 100
    assert sorted(named - shown) == []
    names = set(re.findall(r"^### `(?:async )?(\w+)", pages["python.md"], re.MULTILINE))
    assert names >= set(penstock.__all__) - {"__version__"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_flags_of_the_tutorial_and_the_how_to_pages_exist(page: Path) -> None:
    text = re.sub(r"^\| vLLM \|.*?\n\n", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    # The page for users of other servers names those servers' options.
    peers = PEERS if page.stem == "moving" else ()
    text = re.sub(r"--\w+", lambda found: found[0].replace("_", "-"), text)
    known = options_of(get_command(app)) | FOREIGN | {*peers}
    assert sorted(set(FLAG.findall(text)) - known) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_block_runs_in_a_test_or_says_why_not(page: Path) -> None:
    blocks = blocks_of(page)
    assert len(blocks) == len(re.findall(r"^```\w*$", page.read_text(), re.MULTILINE)) // 2
    assert [block.text for block in blocks if block.way != "not run" and block.language not in ("sh", "python")] == []


def test_a_link_without_a_target_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#here"></a><a href="c.html"></a><script src="https://x/y.js">')
    (tmp_path / "b.html").write_text('<h2 id="there"></h2><a href="a.html"></a>')
    assert broken_links(tmp_path) == [
        "a.html: loads https://x/y.js",
        "a.html: no heading b.html#here",
        "a.html: no page c.html",
    ]


@pytest.mark.slow
@pytest.mark.process
def test_the_site_builds_and_all_links_hold(tmp_path: Path) -> None:
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("zensical is not installed")
    env = os.environ | {"PYTHONPATH": str(ROOT / "ops")}
    words = (sys.executable, "-m", "docs_site", str(tmp_path / "site"))
    run = subprocess.run(words, env=env, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr
    html = tmp_path / "site/html"
    assert len(list(html.rglob("*.html"))) > 60
    assert (html / "docs/howto/tuning.html").is_file()
