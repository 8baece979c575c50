"""`penstock support-bundle`: what a bug report needs, in one archive, without secrets, prompts or completions."""

from __future__ import annotations

import asyncio
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from penstock import __version__
from penstock.cli.audit import audit_pools
from penstock.cli.machine.doctor import check_each, check_extras, check_machine
from penstock.cli.options import RedisUrl
from penstock.cli.output import write_line
from penstock.contract.errors import ConfigError, PenstockError, RequestError
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.settings import NodeSettings
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.client.settings import ClientSettings
from penstock.producer.files.storage import FilesSettings
from penstock.runtime.local_redis import running_url
from penstock.runtime.logging import LogSettings
from penstock.runtime.proxies import is_loopback
from penstock.runtime.settings import KeySettings, RedisSettings, Settings, redis_names_of
from penstock.runtime.stack_dump import offering_processes, stacks_of

T = TypeVar("T")

METRICS = ("http://127.0.0.1:8000/metrics", "http://127.0.0.1:9100/metrics", "http://127.0.0.1:9101/metrics")
"""Where a gateway, a node and a worker serve their metrics on one machine, by the documented examples."""
MAX_LOG_BYTES = 4 << 20
"""The end of each log that is kept."""
MAX_METRICS_BYTES = 8 << 20
JOURNAL_LINES = 20_000
PART_TIMEOUT_S = 60.0
"""Seconds after which a part is given up; the archive then says so in its place."""
METRICS_TIMEOUT_S = 5.0
HIDDEN = "***"
_ABOUT = """penstock support bundle, {time}

versions.json   penstock, Python, system, and installed packages
settings.json   effective settings of each part on this machine, and where each came from
doctor.json     what `penstock doctor` finds
redis.json      INFO of Redis; of several (PENSTOCK_POOLS), the INFO of each
pools.json      the pools with their nodes
audit.json      what `penstock audit` finds
metrics/        what processes on this machine measure
logs/           the ends of logs, of journald and of --log files
stacks/         where each thread of each gateway and node of this user is

Passwords, API keys, tokens and the pepper are replaced by {hidden}. Logs of penstock hold no prompts and no
completions. Tenants' names, job ids, host names and addresses are there. Read the files before you send them on.
"""
_SECRET_NAME = re.compile(r"pepper|passw|secret|token$|_headers$|api_key|access_key|credential", re.IGNORECASE)
_SECRETS = (
    (re.compile(r"(\w+://)[^\s\"']*@"), rf"\1{HIDDEN}@"),
    (re.compile(r"([?&](?:password|token|key|secret|signature)=)[^&#\s\"']*", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\b(pk-|sk-|hf_|whsec_)[A-Za-z0-9_\-+/=]{8,}"), rf"\1{HIDDEN}"),
    (re.compile(r"(--api[-_]keys?[=\s]+)\S+"), rf"\1{HIDDEN}"),
    (re.compile(r"(Bearer\s+)[A-Za-z0-9._\-+/=]{8,}", re.IGNORECASE), rf"\1{HIDDEN}"),
)
"""Passwords in URLs, secrets in queries, API keys of ours and of others, and headers."""


def support_bundle(
    output: Annotated[
        Path | None, typer.Option(help="The archive. Default: penstock-support-TIME.tar.gz in this folder.")
    ] = None,
    log: Annotated[list[Path] | None, typer.Option(help="A log file to add. Repeat it for several.")] = None,
    metrics: Annotated[
        list[str] | None, typer.Option(help="URL of a process's metrics. Repeat it. Default: the usual ports here.")
    ] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Collect versions, settings, checks, audit, metrics, logs and stacks in one archive for a bug report.

    Secrets are replaced by ***. A part that fails, as while Redis is away, is replaced by its error. Nothing is sent.

    Examples:
        penstock support-bundle
        penstock support-bundle --log node.log --metrics http://gpu-1:9100/metrics
    """
    for path in log or ():
        if not path.is_file():
            raise RequestError(f"log: {path} is no file", param="log")
    now = datetime.now(UTC)
    target = output or Path(f"penstock-support-{now:%Y%m%dT%H%M%SZ}.tar.gz")
    settings = RedisSettings.load(redis_url=redis_url)
    url = settings.redis_url or running_url(settings.runtime_dir)
    names = redis_names_of(redis_url) if url else {}
    try:
        with open(target, "xb", opener=_private) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in _members(names, log or [], metrics or METRICS, now):
                _add(archive, name, without_secrets(text), now)
    except OSError as error:
        raise ConfigError(f"output: {target}: {error.strerror}", param="output") from error
    write_line(f"{target}: read it before you send it on; {HIDDEN} stands for secrets")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _add(archive: tarfile.TarFile, name: str, text: str, now: datetime) -> None:
    content = text.encode(errors="replace")
    member = tarfile.TarInfo(f"penstock-support/{name}")
    member.size, member.mtime, member.mode = len(content), int(now.timestamp()), 0o600
    archive.addfile(member, io.BytesIO(content))


def without_secrets(text: str) -> str:
    """Return the text with every secret that is known by its form replaced."""
    for form, shown in _SECRETS:
        text = form.sub(shown, text)
    return text


def _members(
    names: Mapping[str, str], logs: Iterable[Path], metrics: Iterable[str], now: datetime
) -> Iterator[tuple[str, str]]:
    """Yield each file of the archive as its name and its text. `names`: what each URL's Redis is called."""
    yield "README.txt", _ABOUT.format(time=now.isoformat(timespec="seconds"), hidden=HIDDEN)
    yield "versions.json", _part(_versions)
    yield "settings.json", _part(effective_settings)
    yield "doctor.json", _part(lambda: _checks(names))
    for name, read in (("redis", _redis_info), ("pools", _pools), ("audit", _audit)):
        yield f"{name}.json", _part(partial(_of_each, names, read))
    for number, source in enumerate(metrics):
        yield f"metrics/{number}.txt", f"# {source}\n{_scraped(source)}"
    yield "logs/journal.txt", _journal()
    for number, path in enumerate(logs):
        yield f"logs/{number}-{path.name}", _end_of(path)
    for pid in offering_processes():
        yield f"stacks/{pid}.txt", _stacks(pid)


def _part(make: Callable[[], Any]) -> str:
    """Return a part as JSON, or its error: what is broken must not keep the rest from the archive."""
    try:
        made = make()
    except Exception as error:
        made = {"error": f"{type(error).__name__}: {getattr(error, 'message', None) or error}"}
    return json.dumps(made, indent=1, default=str, ensure_ascii=False) + "\n"


async def _in_time(work: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(PART_TIMEOUT_S):
        return await work


def _versions() -> dict[str, Any]:
    packages = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    return {
        "penstock": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "packages": dict(sorted(packages.items())),
    }


def effective_settings() -> dict[str, Any]:
    """Return each part's settings on this machine with their values, and whether each was given or is the default."""
    parts: dict[str, tuple[type[Settings], dict[str, Any]]] = {
        "redis": (RedisSettings, {}),
        "keys": (KeySettings, {}),
        "logs": (LogSettings, {}),
        "client": (ClientSettings, {}),
        "files": (FilesSettings, {}),
        "gateway": (GatewaySettings, {}),
        "worker": (CelerySettings, {}),
        # Both are needed, and need not be set on a machine without a node.
        "node": (NodeSettings, {"model": os.environ.get("PENSTOCK_NODE_MODEL") or "none", "redis_url": "unix://none"}),
    }
    found: dict[str, Any] = {name: _settings_of(kind, given) for name, (kind, given) in parts.items()}
    shown = ("PENSTOCK_", "OTEL_", "HF_", "CUDA_", "TRITON_", "CELERY_", "OMP_", "MALLOC_")
    found["variables"] = {
        name: _shown(name, value) for name, value in sorted(os.environ.items()) if name.startswith(shown)
    }
    return found


def _settings_of(kind: type[Settings], given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        settings = kind.load(**given)
    except ConfigError as error:
        return {"error": error.reason}
    return {
        name: {
            "value": _shown(name, getattr(settings, name)),
            "from": "given" if name in settings.model_fields_set and name not in given else "default",
        }
        for name in kind.model_fields
        if name not in given or name == "model"
    }


def _shown(name: str, value: Any) -> Any:
    """Return a setting's value as it may be shown. A URL only loses its password."""
    return HIDDEN if value and _SECRET_NAME.search(name) else value


def _checks(names: Mapping[str, str]) -> list[dict[str, Any]]:
    checks = asyncio.run(_in_time(check_each(names)))
    return [asdict(check) for check in [*checks, *check_machine(), *check_extras()]]


def _of_each(names: Mapping[str, str], read: Callable[[str], Coroutine[Any, Any, Any]]) -> Any:
    """Return what `read` finds in the only Redis; of several, by name, with the error of one that is away."""
    if not names:
        raise ConfigError("no Redis: set PENSTOCK_REDIS_URL or --redis-url")
    if len(names) == 1:
        return asyncio.run(_in_time(read(*names)))
    found = dict[str, Any]()
    for url, name in names.items():
        try:
            found[name] = asyncio.run(_in_time(read(url)))
        except (PenstockError, TimeoutError) as error:
            found[name] = {"error": getattr(error, "message", None) or "no answer in time"}
    return found


async def _redis_info(url: str) -> Any:
    from penstock.queue.broker.connection import connect, translated

    async with connect(url) as redis:
        with translated():
            return await redis.info("everything")


async def _pools(url: str) -> Any:
    from penstock.producer.client import AsyncClient

    async with AsyncClient(url, pools={}) as client:
        pools, _ = await client.pool_stats()
    return [asdict(pool) for pool in pools]


async def _audit(url: str) -> Any:
    return [
        {"pool": one.pool, "found": [asdict(finding) for finding in one.found]} async for one in audit_pools(url, None)
    ]


def _scraped(source: str) -> str:
    if not source.startswith(("http://", "https://")):
        return f"# not read: {source} is no HTTP URL\n"
    request = urllib.request.Request(source)
    if key := os.environ.get("PENSTOCK_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        proxies = urllib.request.ProxyHandler({} if is_loopback(source) else None)
        with urllib.request.build_opener(proxies).open(request, timeout=METRICS_TIMEOUT_S) as answer:
            return str(answer.read(MAX_METRICS_BYTES).decode(errors="replace"))
    except (OSError, ValueError) as error:
        return f"# not read: {error}; --metrics names another URL, such as http://127.0.0.1:9102/metrics\n"


def _journal() -> str:
    """Return the last lines that systemd has of penstock's units."""
    tool = shutil.which("journalctl")
    if tool is None:
        return "no journalctl on this machine\n"
    command = [tool, "--unit", "penstock*", "--lines", str(JOURNAL_LINES), "--output", "short-iso", "--no-pager"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PART_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not read: {error}\n"
    return (done.stdout[-MAX_LOG_BYTES:] or done.stderr).decode(errors="replace")


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"not read: {error}\n"


def _stacks(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{command}\n{stacks_of(pid)}"
    except OSError as error:
        return f"not read: {error}\n"
