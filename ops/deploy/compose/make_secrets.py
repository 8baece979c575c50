"""Makes the secrets of docker-compose.yml, each once: a user of Redis for each role, and the pepper of the API keys.

    python make_secrets.py FOLDER RULES        FOLDER has a folder for each role, a volume that only its service mounts;
                                               RULES is the folder with *.acl (ops/acl)

A secret that is there is kept, so that every start may run this. To change one, delete its file and run it again.
`users.acl` is written anew each time, from the passwords and the rules.

With OUTSIDE_ADDRESS, which docker-compose.redis.yml sets, programs outside the containers get users too: FOLDER/outside
has the URLs of a Python client, and of a subscriber for each tenant of SUBSCRIBER_TENANTS.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

ROLES = ("gateway", "node", "worker", "admin")
CLIENT, SUBSCRIBER = "client", "subscriber"
_RULES_OF_CLIENT = "gateway"
"""A client in a process of its own does what a gateway does."""
_TENANT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PASSWORD_IN_URL = re.compile(r"rediss?://([\w-]+):([0-9A-Za-z_-]+)@")
_PLACEHOLDER = re.compile(r"@([A-Z]+)_PASSWORD@")
_SHARED_KEYS = re.compile(r" ~penstock:(pools|keys)")


class SecretError(Exception):
    """A secret or a rule cannot be used."""


@dataclass(frozen=True)
class Outside:
    """Programs outside the containers: the address at which they reach Redis, and the tenants with a subscriber."""

    address: str
    tenants: tuple[str, ...]


def make(
    folder: Path, rules: Path, address: str, pepper: str, s3: tuple[str, str] | None, outside: Outside | None = None
) -> None:
    """Write what is missing. `s3`: the endpoint and the bucket's user of an object store in these containers."""
    passwords = {}
    for role in ROLES:
        url = _once(folder / role / "redis_url", f"redis://{role}:{secrets.token_hex(32)}@{address}/0")
        found = _PASSWORD_IN_URL.match(url)
        if found is None or found[1] != role or not url.startswith("redis://"):
            raise SecretError(f"{folder / role / 'redis_url'} must be redis://{role}:PASSWORD@{address}/0")
        passwords[role] = found[2]
    pepper = _once(folder / "gateway/key_pepper", pepper or secrets.token_hex(32))
    _write(folder / "admin/key_pepper", pepper)
    users = users_of(rules, passwords)
    if outside is not None:
        users += users_outside(folder / "outside", rules, outside)
    _write(folder / "redis/users.acl", users)
    if s3 is not None:
        _make_s3(folder, *s3)


def users_of(rules: Path, passwords: dict[str, str]) -> str:
    """Return the users of Redis for the services: the rules with the passwords in them."""
    lines = []
    for path in sorted(rules.glob("*.acl")):
        line = _rule(path)
        if any(found[1].lower() not in passwords for found in _PLACEHOLDER.finditer(line)):
            continue  # a role that no service has, such as a subscriber
        lines.append(_PLACEHOLDER.sub(lambda found: passwords[found[1].lower()], line))
    if not lines:
        raise SecretError(f"no *.acl in {rules}")
    return "".join(f"{line}\n" for line in lines)


def users_outside(folder: Path, rules: Path, outside: Outside) -> str:
    """Return the users of Redis for programs outside the containers, and write the URL of each to the folder.

    A password is kept; the address in its URL is the present one.
    """
    users = [(CLIENT, _rule(rules / f"{_RULES_OF_CLIENT}.acl"))]
    for tenant in outside.tenants:
        if not _TENANT.fullmatch(tenant):
            raise SecretError(f"SUBSCRIBER_TENANTS: {tenant!r} is no tenant: 1 to 64 letters, digits, - or _")
        rule = _rule(rules / f"{SUBSCRIBER}.acl").replace(":channel:default:", f":channel:{tenant}:")
        users.append((f"{SUBSCRIBER}-{tenant}", rule))
    for old in set(folder.glob("*_url")) - {folder / f"{user}_url" for user, _ in users}:
        old.unlink()
    lines = []
    for user, rule in users:
        path = folder / f"{user}_url"
        kept = _PASSWORD_IN_URL.match(path.read_text()) if path.exists() else None
        password = kept[2] if kept else secrets.token_hex(32)
        scheme, _, address = outside.address.partition("://")
        _write(path, f"{scheme}://{user}:{password}@{address}/0")
        rule = re.sub(r"^user \S+", f"user {user}", rule)
        lines.append(_PLACEHOLDER.sub(password, rule))
    return "".join(f"{line}\n" for line in lines)


def _rule(path: Path) -> str:
    line = path.read_text().strip()
    # Redis 7 can make keys read-only: only the admin makes API keys and lists pools, a node its own one.
    return line if path.stem == "node" else _SHARED_KEYS.sub(r" %R~penstock:\1", line)


def _make_s3(folder: Path, endpoint: str, user: str) -> None:
    password = _once(folder / "s3/password", secrets.token_hex(20))
    _write(folder / "s3/user", user)
    for role in ("gateway", "worker", "admin"):
        credentials = f"[default]\naws_access_key_id = {user}\naws_secret_access_key = {password}\n"
        _write(folder / role / "aws_credentials", credentials)
        _write(folder / role / "aws_config", f"[default]\nendpoint_url = {endpoint}\nregion = us-east-1\n")


def _once(path: Path, new: str) -> str:
    """Return the secret in a file; write `new` if there is none."""
    if path.exists() and (kept := path.read_text().strip()):
        return kept
    _write(path, new)
    return new


def _write(path: Path, text: str) -> None:
    """Write a file whole, readable by the user of the service that mounts its volume, which is another one."""
    if not path.parent.is_dir():
        raise SecretError(f"{path.parent} is no folder: the volume of that role is missing")
    part = path.with_name(f"{path.name}.new")
    part.write_text(text)
    part.chmod(0o444)
    part.replace(path)


def main() -> int:
    """Make the secrets of the folder in the first argument, from the rules in the second."""
    folder, rules = map(Path, sys.argv[1:])
    endpoint = os.environ.get("S3_ENDPOINT", "")
    outside = os.environ.get("OUTSIDE_ADDRESS", "")
    try:
        make(
            folder,
            rules,
            os.environ.get("REDIS_ADDRESS", "redis:6379"),
            os.environ.get("KEY_PEPPER", ""),
            (endpoint, "penstock") if endpoint else None,
            Outside(outside, tuple(os.environ.get("SUBSCRIBER_TENANTS", "").split())) if outside else None,
        )
    except (SecretError, OSError) as error:
        sys.stderr.write(f"secrets: {error}\n")
        return 1
    sys.stdout.write("secrets: each role has its own\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
