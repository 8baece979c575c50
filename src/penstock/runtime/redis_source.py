"""Which user of Redis a process is, and which setting said so: one line at its start, and warnings of mistakes."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from penstock.runtime.settings import without_password

log = logging.getLogger(__package__)

Role = Literal["gateway", "node", "worker"]
ROLES = ("gateway", "node", "worker", "subscriber", "admin", "operator", "replica", "sentinel", "health")
"""The users of ops/acl. A process that is another one of these has too many rights, or too few."""
VARIABLE = "PENSTOCK_REDIS_URL"


def tell_redis_source(redis_url: str, role: Role) -> None:
    """Log which user of Redis this process is, and warn of another role's user and of settings that differ."""
    user, sources = user_of(redis_url), url_sources()
    source = next((name for name, url in sources.items() if url == redis_url), "given")
    log.info("redis user", extra={"user": user, "source": source, "url": without_password(redis_url)})
    if user in ROLES and user != role:
        log.warning(
            "this process is another role's user of redis", extra={"user": user, "role": role, "source": source}
        )
    others = [name for name, url in sources.items() if url != redis_url]
    if source != "given" and others:
        log.warning("settings name different redis urls", extra={"used": source, "ignored": ", ".join(others)})


def user_of(redis_url: str) -> str:
    """Return the user that a URL names; `default` if it names none."""
    login, at, _ = urlsplit(redis_url).netloc.rpartition("@")
    return unquote(login.partition(":")[0]) if at and login.partition(":")[0] else "default"


def url_sources() -> dict[str, str]:
    """Return the URL that each source has, by its name: the variable, its file, systemd's credential."""
    paths = {f"{VARIABLE}_FILE": os.environ.get(f"{VARIABLE}_FILE")}
    if folder := os.environ.get("CREDENTIALS_DIRECTORY"):
        paths["CREDENTIALS_DIRECTORY"] = str(Path(folder, VARIABLE.lower()))
    found = {VARIABLE: os.environ.get(VARIABLE, "")}
    for name, path in paths.items():
        try:
            found[name] = Path(path).read_text().rstrip("\r\n") if path else ""
        except (OSError, UnicodeDecodeError):
            continue  # The settings refuse a file that they need and cannot read.
    return {name: url for name, url in found.items() if url}
