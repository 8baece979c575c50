"""Folders whose files this process may run or believe: no other user can have written them.

A cache holds compiled code, chat templates and weights. If another user may write one of its folders, that user
decides what this process runs and what every prompt becomes. So each folder from the root down must belong to this
user or to root, and no other user may write it. A sticky folder such as /tmp may lie above such a folder.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.contract.errors import ConfigError

GROUP_VARIABLE = "PENSTOCK_CACHE_GROUP"
"""Names the group of a team that shares a cache. Its members can run code as each other."""
_ROOT = 0


class UntrustedError(OSError):
    """Another user owns a folder or file, or may write it. The text says what to do."""

    def __init__(self, path: Path, problem: str, remedy: str) -> None:
        super().__init__(errno.EPERM, f"{problem}; {remedy}", str(path))


@dataclass(frozen=True, slots=True)
class Account:
    """The user of this process, and the group that is trusted as well."""

    uid: int
    gids: frozenset[int]
    team: int | None = None

    @classmethod
    def current(cls) -> Self:
        """Read the ids of this process, and the team from the environment. Raises ConfigError for an unknown group."""
        name = os.environ.get(GROUP_VARIABLE, "")
        try:
            team = None if not name else int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
        except KeyError:
            message = f"{GROUP_VARIABLE}: there is no group {name!r}; `getent group` lists the groups"
            raise ConfigError(message, param="cache_group") from None
        return cls(os.geteuid(), frozenset((*os.getgroups(), os.getegid())), team)

    def trusts_owner(self, uid: int) -> bool:
        """Return whether files of a user count as this account's own."""
        return uid in (self.uid, _ROOT) or (self.team is not None and _is_member(uid, self.team))

    def trusts_group(self, gid: int) -> bool:
        """Return whether a group has no member beside this account, or is the team.

        Such a group has the id 0 or the user's name. Otherwise it is a group of the process that the system does not
        know, as Kubernetes gives one to a pod (`fsGroup`).
        """
        if gid == self.team:
            return True
        own = _user_name(self.uid)
        try:
            group = grp.getgrgid(gid)
        except KeyError:
            return gid in self.gids
        if gid == _ROOT:
            return {*group.gr_mem} <= {own, "root"}
        others = {user.pw_name for user in pwd.getpwall() if user.pw_gid == gid} | {*group.gr_mem}
        return group.gr_name == own and others <= {own}


def trusted_folder(path: Path, *, remedy: str = "set PENSTOCK_CACHE to a folder of your own") -> Path:
    """Return a folder with its links resolved; create what is missing, for this user alone.

    Raises UntrustedError if another user may change what is below one of its folders, and OSError if one cannot be
    created or read.
    """
    account = Account.current()
    try:
        folder = path.resolve()
    except RuntimeError:
        raise OSError(errno.ELOOP, "too many links", str(path)) from None
    for part in (*reversed(folder.parents), folder):
        try:
            found = part.lstat()
        except FileNotFoundError:
            _make(part)
            found = part.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(part))
        # In a sticky folder, only the owner of an entry may replace it, and each entry is checked.
        may_be_shared = part != folder and bool(found.st_mode & stat.S_ISVTX)
        _check(part, found, account, remedy, may_be_shared=may_be_shared)
    return folder


def check_files(folder: Path) -> None:
    """Raise UntrustedError if another user owns, or may write, one of the files in a trusted folder."""
    account = Account.current()
    for path in folder.rglob("*"):
        _check_entry(path, account)


def check_file(path: Path) -> None:
    """Raise UntrustedError if another user owns a file or may write it, and OSError if it is a link or missing."""
    _check_entry(path, Account.current())


def _check_entry(path: Path, account: Account) -> None:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "a link is not followed here", str(path))
    _check(path, found, account, f"remove {path}")


def open_own(path: Path, mode: int = 0o600) -> int:
    """Open a file for reading and writing, without following a link; create it with `mode` if it is missing.

    Raises UntrustedError for a file of another user, before a byte of it changes.
    """
    account = Account.current()
    mode |= 0 if account.team is None else 0o060
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "this is no regular file", str(path))
        _check(path, found, account, f"remove {path}")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def close_to_others(path: Path) -> None:
    """Take from other users the right to write a new file, or a new folder with all that it holds."""
    for each in _with_content(path):
        mode = stat.S_IMODE(each.lstat().st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not each.is_symlink():
            each.chmod(mode & ~(stat.S_IWGRP | stat.S_IWOTH))


def _with_content(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir():
        yield from path.rglob("*")


def _make(folder: Path) -> None:
    team = Account.current().team
    try:
        folder.mkdir(mode=0o700)
        if team is not None:
            os.chown(folder, -1, team)
            folder.chmod(0o2770)
    except FileExistsError:
        # Another process was faster, and it is checked as every folder.
        pass


def _check(path: Path, found: os.stat_result, account: Account, remedy: str, *, may_be_shared: bool = False) -> None:
    if not account.trusts_owner(found.st_uid):
        raise UntrustedError(path, f"it belongs to user {_user_name(found.st_uid)}", remedy)
    if may_be_shared:
        return
    if found.st_mode & stat.S_IWOTH:
        raise UntrustedError(path, "every user may write it", f"`chmod o-w {path}`, or {remedy}")
    if found.st_mode & stat.S_IWGRP and not account.trusts_group(found.st_gid):
        group = _group_name(found.st_gid)
        remedies = f"`chmod g-w {path}`, or {remedy}, or name a group of your team in {GROUP_VARIABLE}"
        raise UntrustedError(path, f"the group {group} may write it", remedies)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _is_member(uid: int, gid: int) -> bool:
    try:
        user = pwd.getpwuid(uid)
        return user.pw_gid == gid or user.pw_name in grp.getgrgid(gid).gr_mem
    except KeyError:
        return False
