"""The allowed number of findings per folder, from `allowed.toml`. Its totals may only fall."""

from __future__ import annotations

import tomllib
from pathlib import Path

Counts = dict[str, dict[str, int]]

FILE = Path(__file__).with_name("allowed.toml")
_HEAD = """# How often each language rule is still broken, by folder. What is not named has nothing left, and stays so.
# Written by: make language LANGUAGE=--lower, which refuses a total that has grown.
"""


def allowed() -> Counts:
    """Return the committed counts."""
    return tomllib.loads(FILE.read_text()) if FILE.exists() else {}


def toml_of(counts: Counts) -> str:
    """Return the text of `allowed.toml` for these counts."""
    tables = (
        "\n".join([f"[{rule}]  # {sum(folders.values())}", *(f'"{name}" = {count}' for name, count in folders.items())])
        for rule, folders in counts.items()
    )
    return "\n".join([_HEAD, "\n\n".join(tables)]) + "\n"


def problem_of_lowering(before: Counts, now: Counts) -> str | None:
    """Return an error if a rule's total has grown, else None. Folders may be renamed."""
    for rule, folders in now.items():
        limit = sum(before[rule].values()) if rule in before else None
        if limit is not None and sum(folders.values()) > limit:
            return f"{rule}: {sum(folders.values())} findings, but {limit} are written down; mend the new ones first"
    return None


def differences(written: Counts, now: Counts) -> list[str]:
    """Return one line for each folder whose count differs from the committed one."""
    said = []
    for rule, folders in now.items():
        limits = written.get(rule, {})
        for folder in sorted({*folders, *limits}):
            count, limit = folders.get(folder, 0), limits.get(folder, 0)
            if count != limit:
                todo = f"'--rule {rule} {folder}'" if count > limit else "--lower"
                said.append(f"{folder}: {count} × {rule}, {limit} written down: make language LANGUAGE={todo}")
    return said
