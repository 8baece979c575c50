"""Makes the secrets of docker-compose.yml, each once: a user of Redis for each role, and the pepper of the API keys.

    python make_secrets.py FOLDER RULES        FOLDER has a folder for each role, a volume that only its service mounts;
                                               RULES is the folder with *.acl (ops/acl)

A secret that is there is kept, so that every start may run this. To change one, delete its file and run it again.
`users.acl` is written anew each time, from the passwords and the rules.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path

ROLES = ("gateway", "node", "worker", "admin")
_PASSWORD_IN_URL = re.compile(r"redis://(\w+):([0-9A-Za-z_-]+)@")
_PLACEHOLDER = re.compile(r"@([A-Z]+)_PASSWORD@")
_SHARED_KEYS = re.compile(r" ~penstock:(pools|keys)")


class SecretError(Exception):
    """A secret or a rule cannot be used."""


def make(folder: Path, rules: Path, address: str, pepper: str, s3: tuple[str, str] | None) -> None:
    """Write what is missing. `s3`: the endpoint and the bucket's user of an object store in these containers."""
    passwords = {}
    for role in ROLES:
        url = _once(folder / role / "redis_url", f"redis://{role}:{secrets.token_hex(32)}@{address}/0")
        found = _PASSWORD_IN_URL.match(url)
        if found is None or found[1] != role:
            raise SecretError(f"{folder / role / 'redis_url'} must be redis://{role}:PASSWORD@{address}/0")
        passwords[role] = found[2]
    pepper = _once(folder / "gateway/key_pepper", pepper or secrets.token_hex(32))
    _write(folder / "admin/key_pepper", pepper)
    _write(folder / "redis/users.acl", users_of(rules, passwords))
    if s3 is not None:
        _make_s3(folder, *s3)


def users_of(rules: Path, passwords: dict[str, str]) -> str:
    """Return the users of Redis: the rules with the passwords in them."""
    lines = []
    for path in sorted(rules.glob("*.acl")):
        line = path.read_text().strip()
        if any(found[1].lower() not in passwords for found in _PLACEHOLDER.finditer(line)):
            continue  # a role that no service has, such as a subscriber
        if not line.startswith("user node "):
            # Redis 7 can make keys read-only: only the admin makes API keys and lists pools.
            line = _SHARED_KEYS.sub(r" %R~penstock:\1", line)
        lines.append(_PLACEHOLDER.sub(lambda found: passwords[found[1].lower()], line))
    if not lines:
        raise SecretError(f"no *.acl in {rules}")
    return "".join(f"{line}\n" for line in lines)


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
    try:
        make(
            folder,
            rules,
            os.environ.get("REDIS_ADDRESS", "redis:6379"),
            os.environ.get("KEY_PEPPER", ""),
            (endpoint, "penstock") if endpoint else None,
        )
    except (SecretError, OSError) as error:
        sys.stderr.write(f"secrets: {error}\n")
        return 1
    sys.stdout.write("secrets: each role has its own\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
