"""Changes of a model's files: fields of JSON, entries of headers, bytes, and files that are no files.

A change is drawn from a random generator, so a number gives the same change every time.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\x1b[31mred", "../../etc/passwd", "/etc/passwd", "ü" * 50_000),
    *(0, 1, -1, 3, 4095, 2**31 - 1, 2**32 - 1, 2**62, 10**30),
    *(0.0, 0.5, -0.5, 1e-300, 1e300, float("nan"), float("inf"), -float("inf")),
    *([], {}, [1], ["x"], [None], [[]], {"a": 1}, {"": None}, {"Regex": "(a*)*b"}, {"Regex": "("}, {"String": ""}),
)
TEMPLATES = (
    *("", "{{", "{% for %}", "{% for x in y %}", "{{ 1/0 }}", "{{ messages[9].x.y }}", "{{ nothing.at.all }}"),
    *("{{ raise_exception('\x1b[31mred\x1b[0m') }}", "{% import 'x' as y %}", "{{ '\x1b]0;title\x07' }}", "\x1b[2J{%"),
    *("{% for i in range(10**9) %}x{% endfor %}", "{{ messages | tojson(indent='x') }}", "{% macro a() %}{{ a() }}"),
)
_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
_ENTRY_KINDS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""GGUF's types of numbers, and their bytes."""
_STRING, _LIST = 8, 9


@dataclass(frozen=True)
class FileChange:
    """What was changed of a model."""

    path: Path
    what: str
    field: str | None = None
    """The changed field, if only one was changed."""


def change(random: Random, path: Path) -> FileChange:
    """FileChange a file in one way. Its folder stays as it is."""
    ways: list[Callable[[Random, Path], FileChange]] = [_bytes]
    if random.random() < 0.03:
        ways = [_no_file]
    elif path.suffix == ".json" and random.random() < 0.9:
        ways = [_json]
    elif path.suffix == ".jinja":
        ways = [_template, _bytes]
    elif path.suffix == ".safetensors" and random.random() < 0.8:
        ways = [_tensor_entry]
    elif path.suffix == ".gguf" and random.random() < 0.85:
        ways = [_gguf_entry]
    return random.choice(ways)(random, path)


def _no_file(random: Random, path: Path) -> FileChange:
    kind = random.choice(("absent", "folder", "link to nothing", "link to /dev/zero", "fifo", "pointer", "itself"))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "pointer":
        path.write_bytes(_POINTER)
    elif kind != "absent":
        path.symlink_to({"itself": path.name, "link to /dev/zero": "/dev/zero"}.get(kind, "../blobs/0123"))
    return FileChange(path, kind)


def _bytes(random: Random, path: Path) -> FileChange:
    content = bytearray(path.read_bytes())
    at = random.randrange(len(content) + 1)
    # What stands at the beginning of a file counts more than weights do.
    at = min(at, random.choice((16, 256, 4096, len(content))))
    kind = random.choice(("cut", "flipped", "inserted", "zeros", "removed", "no text", "nested", "empty"))
    if kind == "cut":
        del content[at:]
    elif kind == "flipped":
        for _ in range(random.randint(1, 8)):
            place = min(at + random.randrange(64), len(content) - 1)
            content[place] = random.randrange(256)
    elif kind == "inserted":
        content[at:at] = random.randbytes(random.randint(1, 64))
    elif kind == "zeros":
        content[at : at + 32] = bytes(32)
    elif kind == "removed":
        del content[at : at + random.randint(1, 64)]
    else:
        content = bytearray({"no text": random.randbytes(64), "nested": b"[" * 100_000, "empty": b""}[kind])
    path.write_bytes(content)
    return FileChange(path, f"{kind} at {at}")


def _template(random: Random, path: Path) -> FileChange:
    text = random.choice(TEMPLATES)
    path.write_text(text)
    return FileChange(path, f"template {text!r}")


def _json(random: Random, path: Path) -> FileChange:
    content = json.loads(path.read_bytes())
    content, what, field = changed_json(random, content)
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8", errors="surrogatepass")
    return FileChange(path, what, field)


def changed_json(random: Random, content: Any) -> tuple[Any, str, str | None]:
    """Return changed JSON, what was changed, and the name of the innermost field around it."""
    holder: Any = None
    key: Any = None
    field: str | None = None
    at = content
    while isinstance(at, dict | list) and at and (holder is None or random.random() < 0.85):
        holder, key = at, random.choice(list(at) if isinstance(at, dict) else range(len(at)))
        field, at = key if isinstance(key, str) else field, holder[key]
    if holder is None:
        return {}, "emptied", None
    if random.random() < 0.15:
        del holder[key]
        return content, f"{field} removed", field
    if random.random() < 0.2 and isinstance(at, int | float) and not isinstance(at, bool):
        holder[key] = random.choice((at + 1, at - 1, at * 2, at // 2, -at, at * 1000, float(at), str(at)))
    elif random.random() < 0.15:
        holder[key] = random.choice(list(holder.values()) if isinstance(holder, dict) else holder)
    elif random.random() < 0.05 and isinstance(holder, dict):
        holder[f"{key}\x1b[31m"] = holder.pop(key)
    else:
        holder[key] = random.choice(VALUES)
    return content, f"{field} = {str(holder.get(key) if isinstance(holder, dict) else holder[key])[:80]!r}", field


def _tensor_entry(random: Random, path: Path) -> FileChange:
    """FileChange the header of a safetensors file."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, what, field = changed_json(random, json.loads(content[8 : 8 + size]))
    text = json.dumps(header).encode()
    size = len(text) if random.random() < 0.95 else random.choice((0, 1, len(text) - 1, 2**31, 2**63, 2**64 - 1))
    path.write_bytes(struct.pack("<Q", size) + text + content[8 + int.from_bytes(content[:8], "little") :])
    return FileChange(path, f"header: {what}", field)


# --- headers of GGUF files


def _gguf_entry(random: Random, path: Path) -> FileChange:
    content = bytearray(path.read_bytes())
    field, start, end = random.choice(list(_parts_of(content)))
    width = end - start
    if field.endswith(":text"):
        text = random.choice(("", "x", "\x1b[31mred", "llama", "gpt2", "mamba", "{{", "../../x", "ü" * 5000)).encode()
        content[start:end] = struct.pack("<Q", len(text)) + text
    elif width in (1, 2, 4, 8):
        most = (1 << 8 * width) - 1
        number = random.choice((0, 1, 2, 3, 8, 9, 64, most, most >> 1, (most >> 1) + 1, most >> 2))
        content[start:end] = number.to_bytes(width, "little")
        if width in (4, 8) and random.random() < 0.2:
            real = random.choice((0.0, -1.0, 1e30, float("inf"), float("nan")))
            content[start:end] = struct.pack("<f" if width == 4 else "<d", real)
    else:
        content[start:end] = random.randbytes(width)
    path.write_bytes(content)
    return FileChange(path, f"{field} at {start}", field.partition(":")[0] or None)


def _parts_of(content: bytearray) -> Iterator[tuple[str, int, int]]:
    """Yield the parts of a header: `key:part` and its range of bytes."""

    def number(at: int, width: int) -> int:
        return int.from_bytes(content[at : at + width], "little")

    at, num_tensors, num_entries = 24, number(8, 8), number(16, 8)
    yield from ((":magic", 0, 4), (":version", 4, 8), (":tensors", 8, 16), (":entries", 16, 24))
    for _ in range(num_entries):
        end = at + 8 + number(at, 8)
        key = content[at + 8 : end].decode()
        yield f"{key}:key", at + 8, end
        kind, at = number(end, 4), end + 4
        yield f"{key}:kind", end, at
        if kind == _STRING:
            end = at + 8 + number(at, 8)
            yield f"{key}:text", at, end
        elif kind == _LIST:
            item, count, end = number(at, 4), number(at + 4, 8), at + 12
            yield from ((f"{key}:kind of items", at, at + 4), (f"{key}:count", at + 4, end))
            for i in range(count):
                start, end = end, end + (8 + number(end, 8) if item == _STRING else _ENTRY_KINDS[item])
                if i in (0, 1, count - 1):
                    yield f"{key}:{'text' if item == _STRING else 'item'}", start, end
        else:
            end = at + _ENTRY_KINDS[kind]
            yield f"{key}:number", at, end
        at = end
    for _ in range(num_tensors):
        end = at + 8 + number(at, 8)
        name, dims, start = content[at + 8 : end].decode(), number(end, 4), end + 4
        yield f"{name}:dims", end, start
        for i in range(dims):
            yield f"{name}:dim {i}", start + 8 * i, start + 8 * i + 8
        start += 8 * dims
        yield from ((f"{name}:format", start, start + 4), (f"{name}:offset", start + 4, start + 12))
        at = start + 12
