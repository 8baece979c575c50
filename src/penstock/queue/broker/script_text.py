"""The text of each Lua script: its own file, behind the shared definitions that it uses.

Lua creates every function of a script anew at each call, also those that the call does not use. With all shared
definitions, that was a quarter of Redis's time for a short job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import NamedTuple

_EVERYWHERE = ("prelude", "messages")
_QUEUEING = ("damage", "jobs", "writes", "virtual_time", "lists", "queue", "waiting", "rare", "stored", "ending")
SHARED_PARTS = (*_EVERYWHERE, *_QUEUEING)
"""In their order: a part uses those before it."""
_WITHOUT_QUEUE = frozenset(
    (
        "attach",
        "declare",
        "detach",
        "emit",
        "join",
        "leave",
        "positions",
        "reader_heartbeat",
        "schedules",
        "untold",
        "webhooks",
    )
)
"""Scripts that neither queue nor end a job."""
_WITHOUT_POOL = frozenset(("files",))
"""Scripts whose keys belong to no pool. They are whole in themselves."""

_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_FUNCTION = re.compile(r"(?:local )?function ([\w.]+)\(")
_LOCALS = re.compile(r"local ([\w, ]+?)(?: =|$)")
_ASSIGNED = re.compile(r"(\w+) = ")


class _Definition(NamedTuple):
    """A statement at the beginning of a line, up to the next one."""

    names: frozenset[str]
    """What it defines; empty for a statement that every script needs."""
    uses: frozenset[str]
    """The words in it that may be names of other definitions."""
    text: str

    @property
    def is_declaration(self) -> bool:
        """Whether this declares names without a function, so that a `do` block may follow and define them."""
        return bool(self.names) and "function" not in self.text.partition("\n")[0]


# Of one user, or of our own code and files.
@cache
def source(name: str) -> str:
    """Return a script's text, preceded by the shared definitions that it uses.

    What follows the parts that all scripts share is a function of its own. A new function that uses a name from outside
    of that copies a pointer; for a name inside of it Lua searches all names that are in use.
    """
    own = _text(f"{name}.lua")
    used = _used(name, own)
    texts = {part: "\n".join(one.text for one in _definitions(part) if one in used) for part in _shared_parts(name)}
    everywhere, queueing = (
        "\n".join(texts[part] for part in parts if part in texts) for parts in (_EVERYWHERE, _QUEUEING)
    )
    if not queueing:
        return "\n".join(filter(None, (everywhere, own)))
    return "\n".join((everywhere, "return (function()", queueing, own, "end)()"))


def _used(name: str, own: str) -> set[_Definition]:
    """Return the shared definitions that a script uses, and those that these use."""
    left = {definition for part in _shared_parts(name) for definition in _definitions(part)}
    used, words = set[_Definition](), set(_words(own))
    while new := {one for one in left if not one.names or not one.names.isdisjoint(words)}:
        left -= new
        used |= new
        words.update(*(one.uses for one in new))
    return used


def whole_source(name: str) -> str:
    """Return a script's text behind the whole shared parts, for tools that read it."""
    return "\n".join((*(shared_text(part) for part in _shared_parts(name)), _text(f"{name}.lua")))


def shared_text(part: str) -> str:
    """Return the text of a shared part."""
    return _text(f"shared/{part}.lua")


def _shared_parts(name: str) -> tuple[str, ...]:
    if name in _WITHOUT_POOL:
        return ()
    return _EVERYWHERE if name in _WITHOUT_QUEUE else SHARED_PARTS


# Of one user, or of our own code and files.
@cache
def _text(path: str) -> str:
    return (resources.files("penstock.queue") / "scripts" / path).read_text(encoding="utf-8")


# Of one user, or of our own code and files.
@cache
def _definitions(part: str) -> list[_Definition]:
    """Split a shared part into its definitions.

    A `do` block defines the names of the `local` statement before it, and belongs to it.
    """
    found: list[_Definition] = []
    for text in _statements(shared_text(part)):
        names = _defined(text)
        if text.startswith("do") and found and found[-1].is_declaration:
            names, text = found[-1].names, f"{found[-1].text}\n{text}"
            found.pop()
        found.append(_Definition(names, frozenset(_words(text)), text))
    return found


def _statements(text: str) -> Iterator[str]:
    """Yield the statements of a script that begin at the margin, without its lines of comment."""
    lines: list[str] = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("--"):
            continue
        if lines and not line.startswith((" ", "end")):
            yield "\n".join(lines)
            lines = []
        lines.append(line)
    if lines:
        yield "\n".join(lines)


def _defined(statement: str) -> frozenset[str]:
    first = statement.partition("\n")[0]
    if defined := _FUNCTION.match(first) or _ASSIGNED.match(first):
        return frozenset((defined[1],))
    names = _LOCALS.match(first)
    return frozenset(name.strip() for name in names[1].split(",")) if names else frozenset()


def _words(text: str) -> Iterator[str]:
    """Yield each name in a text; of `a.b.c` also `a` and `a.b`, but not `b`."""
    for name in set(_NAME.findall(text)):
        while name:
            yield name
            name = name.rpartition(".")[0]
