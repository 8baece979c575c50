"""The table of keys names the scripts that write each key, as far as the scripts' text shows it."""

from __future__ import annotations

import re
from collections import defaultdict
from importlib.resources import files

from penstock.queue import keys
from penstock.queue.broker.script_text import SHARED_PARTS, shared_text

READS = re.compile(
    r"H?(GET|MGET|GETALL|VALS|LEN|KEYS)|Z(SCORE|COUNT|CARD|RANK|(REV)?RANGE(BYSCORE)?)|S(CARD|MEMBERS|ISMEMBER|RANDMEMBER)"
)
OTHER_READS = {
    "ZMSCORE",
    "LLEN",
    "LRANGE",
    "XLEN",
    "XRANGE",
    "XREVRANGE",
    "STRLEN",
    "EXISTS",
    "INFO",
    "TIME",
    "PUBLISH",
}
NAMED = {
    "end_job": "end",
    "ring_doorbell": "ring",
    "ring_doorbells": "ring",
    "requeue": "requeue",
    "release_delayed": "release",
    "release_waiting": "release",
    "submit_successor": "submit",
}
"""Functions of the scripts that the table has as writers themselves."""
SCRIPTS = {
    path.name.removesuffix(".lua"): path.read_text()
    for path in files("penstock.queue").joinpath("scripts").iterdir()
    if path.name.endswith(".lua")
    and path.name
    not in ("audit.lua", "change.lua", "erase.lua", "files.lua", "forget.lua", "schedules.lua", "webhooks.lua")
}
SHARED = "".join(map(shared_text, SHARED_PARTS))
WRITERS_OF_ARGUMENTS = set(re.findall(r"local function (\w+)\(key, ", SHARED))
"""Functions that write the key that their caller names."""
KEY_FUNCTIONS = dict(re.findall(r"local function (\w+_key)\(\w+\) return P \.\. ':(\w+)", SHARED)) | {"lists": "jobs"}


def _split(text: str) -> list[str]:
    """Text at its commas outside of brackets, up to the bracket that closes what is around it."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth < 0:
            break
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _key(expression: str, variables: dict[str, str]) -> str | None:
    if found := re.match(r"P \.\. ':(\w+)", expression):
        return found[1]
    if expression == "KEYS[1]":
        return "config"
    word = re.match(r"\w*", expression)
    assert word is not None
    return KEY_FUNCTIONS.get(word[0]) or variables.get(word[0])


def _writes(text: str) -> set[str]:
    """The keys that a piece of a script writes by itself, but for writes of nothing, which change none."""
    variables: dict[str, str] = {}
    for names, values in re.findall(r"local ([\w, ]+) = (.+)", text):
        found = zip(names.split(", "), _split(values), strict=False)
        variables |= {name: key for name, value in found if (key := _key(value, {}))}
    text = re.sub(r"\bpcall\((\w+), ", r"\1(", text)
    written = set()
    for command, rest in re.findall(r"(?:redis\.p?call|\bsure)\('(\w+)', (?=(.+))", text):
        key, *values = _split(rest)
        if not READS.fullmatch(command) and command not in OTHER_READS and values != ["''"]:
            written.add(_key(key, variables) or key)
    for name, rest in re.findall(r"^ +(\w+)\((?=(.+))", text, flags=re.MULTILINE):
        if name in WRITERS_OF_ARGUMENTS:
            written.add(_key(_split(rest)[0], variables) or rest)
    return written


def _functions() -> dict[str, str]:
    bodies: dict[str, str] = {}
    for head in re.finditer(r"^( *)(?:local )?function (?:\w+\.)?(\w+)", SHARED, flags=re.MULTILINE):
        body = SHARED[head.end() :].split(f"\n{head[1]}end\n")[0]
        body = body.split("\n")[0] if re.match(r".* end\n", body) else body
        # A function that only calls one of a `late` table has its name.
        if head[2] not in WRITERS_OF_ARGUMENTS and len(body) > len(bodies.get(head[2], "")):
            bodies[head[2]] = body
    return bodies


def _reached(text: str, functions: dict[str, str], seen: frozenset[str]) -> set[str]:
    """What a piece of a script and the functions that it calls write, but for those that the table names."""
    written = _writes(text)
    for name in set(re.findall(r"\b(\w+)\(", text)) & functions.keys() - NAMED.keys() - seen:
        written |= _reached(functions[name], functions, seen | {name})
    return written


def _found() -> dict[str, set[str]]:
    functions, writers = _functions(), defaultdict(set)
    texts = defaultdict(str, SCRIPTS)
    for name, said in NAMED.items():
        texts[said] += functions[name]
    for writer, text in texts.items():
        for key in _reached(text, functions, frozenset()):
            writers[key].add(writer)
    # The one loop over names of keys.
    assert writers.pop("P .. set") == {"sweep"}
    return dict(writers)


def _table() -> dict[str, set[str]]:
    lines = (keys.__doc__ or "").splitlines()
    head = next(line for line in lines if line.split()[:2] == ["key", "type"])
    first, last = head.index("writers"), head.index("content")
    said: dict[str, str] = defaultdict(str)
    name = ""
    for line in lines[lines.index(head) + 1 : lines.index("    channel")]:
        if found := re.match(r"    P:(\w+)(:<t>:open)?", line):
            name = "tenant" if found[2] else found[1]
        if found or not line[:first].strip():
            said[name] += " " + line[first:last]
    return {name: set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", text))) for name, text in said.items()}


def test_the_table_names_every_script_that_writes_a_key() -> None:
    known = SCRIPTS.keys() | NAMED.values()
    table = {name: writers & known for name, writers in _table().items() if writers != {"scripts"}}
    found = {
        name: writers for name, writers in _found().items() if name not in ("job", "counts", "events", "node_events")
    }
    assert {name: writers for name, writers in table.items() if writers} == found
