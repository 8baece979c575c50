"""Copies the repository's pages, and what they link to, into a folder that Zensical reads."""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from docs_site.reference import reference_pages

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
Nav = Mapping[str, "str | Nav"]

OPERATORS_FILES = Path("ops/penstock-ops.tar.gz")
"""An archive that only the site has, for installations from wheels, which have no clone."""
_OPERATED = ("ops/acl", "ops/deploy", "ops/observe")
"""Folders of that archive. A link to it stands at the head of their pages."""

NAV: Nav = {
    "Home": "index.md",
    "Start": {
        "Tutorial": "docs/tutorial.md",
        "Run a chat application": "docs/howto/chat_app.md",
        "Run a batch every night": "docs/howto/nightly_batch.md",
        "Search a folder": "docs/howto/search.md",
        "Build flows of jobs": "docs/howto/flows.md",
        "Use your own Celery app": "docs/howto/celery_shop.md",
        "In a FastAPI app": "docs/howto/fastapi.md",
        "In a notebook": "docs/howto/notebook.md",
        "In a Django/Celery app": "docs/howto/django.md",
        "Run agents": "docs/howto/agents.md",
        "Stream tokens from Redis": "docs/howto/redis_channels.md",
        "Serve many LoRA adapters": "docs/howto/lora_fleet.md",
        "Move from vLLM or Ollama": "docs/howto/moving.md",
        "Move from another queue": "docs/howto/from_queues.md",
        "Examples": "examples/index.md",
        "Limits": "docs/LIMITS.md",
    },
    "Use": {
        "HTTP": "docs/HTTP.md",
        "HTTP by route": "reference/http.md",
        "Fields of requests": "docs/FIELDS.md",
        "Sizes": "docs/SIZES.md",
        "Errors": "reference/errors.md",
        "Python": "docs/PYTHON.md",
        "Python by name": "reference/python.md",
        "Command line": "docs/CLI.md",
        "Commands": "reference/commands.md",
        "Settings": "reference/settings.md",
        "Clients": "docs/CLIENTS.md",
        "Models": "docs/MODELS.md",
    },
    "Operate": {
        "Runbook": "ops/RUNBOOK.md",
        "Run with Docker Compose": "docs/howto/compose.md",
        "Run on Kubernetes": "docs/howto/kubernetes.md",
        "Kubernetes": "ops/deploy/kubernetes/index.md",
        "systemd": "ops/deploy/systemd/index.md",
        "Proxies": "ops/deploy/proxies/index.md",
        "Tune a node": "docs/howto/tuning.md",
        "Dashboards and alerts": "ops/observe/index.md",
        "Metrics": "ops/METRICS.md",
        "Metrics by name": "reference/metrics.md",
        "Traces": "ops/TRACING.md",
        "Capacity": "docs/CAPACITY.md",
        "Clocks": "docs/CLOCKS.md",
        "States of the queue": "docs/QUEUE.md",
        "Ranks": "docs/RANKS.md",
        "Several Redis": "docs/POOLS.md",
        "Users of Redis": "ops/acl/index.md",
        "Security": "SECURITY.md",
        "Releases and upgrades": "docs/RELEASE.md",
    },
    "Understand": {
        "What is promised": "docs/PROMISES.md",
        "Architecture": "docs/ARCHITECTURE.md",
        "Protocol": "docs/PROTOCOL.md",
        "Keys in Redis": "reference/redis_keys.md",
        "Numbers": "docs/NUMBERS.md",
        "Departures": "docs/DEPARTURES.md",
        "Glossary": "docs/GLOSSARY.md",
        "Contributing": "CONTRIBUTING.md",
        "Changes": "CHANGELOG.md",
    },
}
"""The menu. Pages of docs/ that it does not name come under More; so the site has every page that is linked."""


def menu() -> Nav:
    """Return the whole menu."""
    named = set(named_pages(NAV))
    found = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "docs").glob("**/*.md"))}
    more = {_title(path): page for page, path in found.items() if page not in named}
    return {**NAV, "More": more} if more else NAV


def _title(path: Path) -> str:
    return path.read_text().partition("\n")[0].lstrip("# ")


def named_pages(nav: Nav) -> Iterator[str]:
    """Yield the paths that a menu names."""
    for target in nav.values():
        if isinstance(target, str):
            yield target
        else:
            yield from named_pages(target)


def write_sources(folder: Path) -> None:
    """Write the configuration and all pages to `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    source = folder / "source"
    for name, text in reference_pages().items():
        _write(source / "reference" / name, text)
    waiting = [path for page in named_pages(menu()) if (path := _origin(page)).is_file()]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        text, targets = _converted(path)
        _write(source / _name(path), text)
        for target in targets - seen:
            seen.add(target)
            if target.suffix == ".md":
                waiting.append(target)
            else:
                _copy(target, source / target.relative_to(ROOT))
    _write_archive(source / OPERATORS_FILES)
    (folder / "zensical.toml").write_text(_configuration())


def _write_archive(path: Path) -> None:
    """Write the files that operators need, with the same bytes each time but for the time in the head of gzip."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        # Containers are built in a clone.
        if entry.name.endswith((".py", "__pycache__", "/compose")):
            return None
        entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "root", "root"
        return entry

    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name in (*_OPERATED, "ops/redis.conf"):
            archive.add(ROOT / name, name, filter=plain)


def _origin(page: str) -> Path:
    """Return the file of the repository that becomes a page; each README.md is the index of its folder."""
    path = ROOT / page
    return path.with_name("README.md") if path.name == "index.md" else path


def _name(path: Path) -> Path:
    relative = path.relative_to(ROOT)
    return relative.with_name("index.md") if relative.name == "README.md" else relative


def _converted(path: Path) -> tuple[str, set[Path]]:
    """Return a page's text for the site, and the files that it links to. A link to a folder becomes plain text."""
    targets = set[Path]()

    def link(match: re.Match[str]) -> str:
        mark, shown, address = match.groups()
        name, hash_sign, anchor = address.partition("#")
        if "://" in address or address.startswith("mailto:") or not name:
            return match[0]
        target = Path(os.path.normpath(path.parent / name))
        if target.is_dir() and (target / "README.md").is_file():
            target = target / "README.md"
        if not target.is_file():
            return shown
        targets.add(target)
        there = os.path.relpath(_name(target), _name(path).parent)
        return f"{mark}[{shown}]({there}{hash_sign}{anchor})"

    parts = _CODE.split(path.read_text())
    text = "".join(part if number % 2 else _LINK.sub(link, part) for number, part in enumerate(parts))
    if str(path.relative_to(ROOT)).startswith(_OPERATED):
        title, _, rest = text.partition("\n")
        there = os.path.relpath(OPERATORS_FILES, _name(path).parent)
        shown = f"[{OPERATORS_FILES.name}]({there})"
        text = f"{title}\n\nAll files of this page are in the archive {shown}, in its folder `ops`.\n{rest}"
    return text, targets


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _copy(origin: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(origin, path)


def _configuration() -> str:
    return f"""\
[project]
site_name = "penstock"
site_description = "LLM inference from a durable queue"
site_url = ""
docs_dir = "source"
site_dir = "html"
nav = {_toml_of(menu())}

[project.theme]
language = "en"
font = false
features = ["content.code.copy", "navigation.footer", "navigation.path", "navigation.top", "search.highlight"]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle.icon = "lucide/sun"
toggle.name = "Switch to dark mode"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle.icon = "lucide/moon"
toggle.name = "Switch to light mode"

[project.plugins.search]

[project.plugins.offline]

[project.markdown_extensions.toc]
permalink = true
toc_depth = 3
slugify.object = "pymdownx.slugs.slugify"
slugify.kwds.case = "lower"

[project.markdown_extensions.pymdownx.highlight]

[project.markdown_extensions.pymdownx.superfences]

[project.markdown_extensions.tables]
"""


def _toml_of(nav: Nav) -> str:
    """Return a menu as an inline array of TOML."""
    items = (
        f"{{ {json.dumps(title)} = {json.dumps(target) if isinstance(target, str) else _toml_of(target)} }}"
        for title, target in nav.items()
    )
    return f"[{', '.join(items)}]"
