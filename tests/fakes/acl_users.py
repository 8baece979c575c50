"""The users of ops/acl as tests load them. Each user's password is its name."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fakes.waiting import wait_until

from penstock.runtime.embedded_redis import find_redis_server

ACL = Path(__file__).parents[2] / "ops/acl"
ROLES = ("gateway", "node", "worker", "admin")
OBSERVER = "user watcher on >watcher ~* &* +@all\n"
"""The tests' own user: it reads Redis's log of refusals, and what no role may see."""
REFUSED = re.compile(
    r"NOPERM|NOAUTH|WRONGPASS|no permission|ACL failure|refuses this user|rejected the credentials"
    r"|user executing the script can't|can't (?:run|access)",
    re.IGNORECASE,
)
"""How Redis and Valkey (6.2 to 8), redis-py, Celery and penstock write that a user may not do something."""


def rules_of(role: str) -> str:
    """Return a role's line from the repository."""
    return (ACL / f"{role}.acl").read_text()


def with_passwords(rules: str) -> str:
    """Return the rules with each role's name as its password."""
    return re.sub(r"@(\w+)_PASSWORD@", lambda match: match[1].lower(), rules)


def all_rules() -> str:
    """Return the rules of all files of the folder, as operators put them into one ACL file."""
    return "".join(path.read_text() for path in sorted(ACL.glob("*.acl")))


def refusals_in(log: str) -> list[str]:
    """Return the lines of a log that report a missing permission."""
    return [line for line in log.splitlines() if REFUSED.search(line)]


def confined(role: str, pool: str, user: str) -> str:
    """Return a role's line for one pool under another name, as ops/acl/README.md says. The password is the name."""
    line = rules_of(role).replace(f"user {role} ", f"user {user} ").replace("{*}", f"{{{pool}}}")
    return line.replace(" ~penstock:pools", "").replace(f"@{role.upper()}_PASSWORD@", user)


@contextmanager
def serving(folder: Path, rules: str) -> Iterator[Path]:
    """The socket of a Redis with only these users. Each one's password is its name."""
    rules += "user watcher on >watcher +acl\n"
    (folder / "users.acl").write_text(with_passwords(rules))
    socket = folder / "s"
    options = ("--port", "0", "--unixsocket", str(socket), "--aclfile", str(folder / "users.acl"), "--save", "")
    process = subprocess.Popen([find_redis_server(), *options, "--dir", str(folder)], stdout=subprocess.DEVNULL)
    wait_until(socket.exists, meanwhile=lambda: process.poll() is None)
    yield socket
    process.kill()
    process.wait()


def url_of(server: Path, role: str) -> str:
    return f"unix://{role}:{role}@{server}"
