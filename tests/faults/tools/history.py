"""What callers were told and saw under faults, as JSON Lines, and a checker that says which promise it breaks.

`python -m faults.tools.history FILE [--as LEVEL]` checks a history that a campaign or your own program wrote. It prints
each broken promise with its line, and exits with 1 if there is one. `--as`: check the tokens of readers that asked for
less as if they had asked for this durability; a run at `memory` must then find losses.

One object a line, in the order in which things happened. `kind` is one of

    submit   job, key (optional), durability: a submission was answered
    chunk    job, reader, choice, position, tokens, durability: a reader was shown these tokens
    end      job, reader, state: a reader was told the end
    fault    name, until: what died, and the durability that its writes had to have to survive it
    kept     job, known, tokens ({choice: [...]}), ended: what Redis has of a job after the last fault, before any
             process repairs it
    record   job, state, tokens ({choice: [...]}): what Redis has at the end of the run
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

LEVELS = ("memory", "fsync", "replicated")
STATES = ("succeeded", "failed", "cancelled", "expired")
FIELDS = {
    "submit": ("job", "durability"),
    "chunk": ("job", "reader", "choice", "position", "tokens", "durability"),
    "end": ("job", "reader", "state"),
    "fault": ("name", "until"),
    "kept": ("job", "known", "tokens", "ended"),
    "record": ("job", "state", "tokens"),
}


class Broken(NamedTuple):
    """A promise that a history breaks, and the line that shows it."""

    promise: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.promise}: {self.message}"


class Recorder:
    """Writes a history."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def note(self, kind: str, **fields: Any) -> None:
        """Write one line."""
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")


@dataclass
class _Reader:
    """What one reader of a job has seen."""

    next: dict[int, int] = field(default_factory=dict)
    """By choice: the position that must come next."""
    begins: dict[int, int] = field(default_factory=dict)
    end: str = ""


@dataclass
class _Job:
    durability: str
    readers: defaultdict[str, _Reader] = field(default_factory=lambda: defaultdict(_Reader))
    tokens: defaultdict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """By choice and position: the token that the first reader saw."""
    shown: list[tuple[str, int, int, list[int]]] = field(default_factory=list)
    """Durability, choice, position and tokens of each chunk since the last fault that was compared."""
    ends: set[str] = field(default_factory=set)
    has_record: bool = False


class Checker:
    """Reads a history line by line."""

    def __init__(self, at_least: str = "memory") -> None:
        """`at_least`: the durability that all readers are taken to have asked for."""
        self._at_least = at_least
        self._jobs: dict[str, _Job] = {}
        self._keys: dict[str, str] = {}
        self._until = "memory"
        self._line = 0

    def check(self, lines: Iterable[str]) -> list[Broken]:
        """Return what is broken, in the order of the lines; at the end, the jobs that have no record."""
        found = list[Broken]()
        for self._line, line in enumerate(lines, 1):
            found += self._of_line(line)
        if any(job.has_record for job in self._jobs.values()):
            for job_id, job in self._jobs.items():
                if not job.has_record:
                    found.append(self._broken("each accepted job ends", f"{job_id} has no record"))
        return found

    def _broken(self, promise: str, message: str) -> Broken:
        return Broken(promise, self._line, message)

    def _of_line(self, line: str) -> Iterator[Broken]:
        try:
            one = json.loads(line)
            kind = one["kind"]
            values = {name: one[name] for name in FIELDS[kind]}
            if kind == "submit":
                values["key"] = one.get("key")
        except (ValueError, KeyError, TypeError) as error:
            yield self._broken("the history is complete", f"this is no line of a history ({error})")
            return
        if kind == "fault":
            self._until = values["until"]
            return
        if kind != "submit" and values["job"] not in self._jobs:
            yield self._broken("only accepted jobs run", f"{values['job']} was never accepted")
            return
        yield from getattr(self, f"_{kind}")(**values)

    def _submit(self, job: str, durability: str, key: str | None) -> Iterator[Broken]:
        if key is not None and self._keys.setdefault(key, job) != job:
            yield self._broken("a repeated submission finds its job", f"key {key} has {self._keys[key]} and {job}")
        known = self._jobs.setdefault(job, _Job(durability))
        known.durability = max(known.durability, durability, key=LEVELS.index)

    def _chunk(
        self, job: str, reader: str, choice: int, position: int, tokens: list[int], durability: str
    ) -> Iterator[Broken]:
        known = self._jobs[job]
        seen = known.readers[reader]
        at = seen.next.setdefault(choice, position)
        seen.begins.setdefault(choice, position)
        name = f"{reader} of {job}, choice {choice}"
        if seen.end:
            yield self._broken("nothing comes behind the end", f"{name}: tokens from {position} on")
        if position != at:
            promise = "no token is lost" if position > at else "no token is repeated"
            yield self._broken(promise, f"{name}: {position} comes where {at} must come")
        seen.next[choice] = position + len(tokens)
        for place, token in enumerate(tokens, position):
            if known.tokens[choice].setdefault(place, token) != token:
                message = f"{name}: token {place} is {token}, and was {known.tokens[choice][place]}"
                yield self._broken("a token that was shown stays", message)
        known.shown.append((max(durability, self._at_least, key=LEVELS.index), choice, position, tokens))

    def _end(self, job: str, reader: str, state: str) -> Iterator[Broken]:
        known = self._jobs[job]
        if state not in STATES:
            yield self._broken("each accepted job ends", f"{job}: {state!r} is no end")
        if known.readers[reader].end:
            yield self._broken("a job ends once", f"{reader} of {job} was told two ends")
        known.readers[reader].end = state
        known.ends.add(state)
        if len(known.ends) > 1:
            yield self._broken("a job ends once", f"{job} ended {' and '.join(sorted(known.ends))}")

    def _kept(self, job: str, known: bool, tokens: dict[str, list[int]], ended: bool) -> Iterator[Broken]:
        told = self._jobs[job]
        if self._until == "memory" or (not known and LEVELS.index(told.durability) < LEVELS.index(self._until)):
            pass
        elif not known:
            yield self._broken(f"an accepted job survives ({told.durability})", f"{job} is gone")
        for durability, choice, position, shown in told.shown if self._until != "memory" else ():
            if durability != self._until:
                continue
            there = tokens.get(str(choice), [])[position : position + len(shown)]
            if there != shown:
                message = f"{job}, choice {choice}: tokens {position} to {position + len(shown) - 1} were shown"
                yield self._broken(f"a token that was shown survives ({durability})", f"{message}; Redis has {there}")
        if any(reader.end for reader in told.readers.values()) and not ended and self._at_least == self._until:
            yield self._broken(f"an end that was shown survives ({self._until})", f"{job} is open again")
        told.shown.clear()

    def _record(self, job: str, state: str, tokens: dict[str, list[int]]) -> Iterator[Broken]:
        known = self._jobs[job]
        if known.has_record:
            yield self._broken("a job ends once", f"{job} has two records")
        known.has_record = True
        if state not in STATES:
            yield self._broken("each accepted job ends", f"{job} is {state or 'unknown'}")
        if known.ends - {state}:
            yield self._broken("a job ends once", f"{job} is {state}, and a reader was told {min(known.ends)}")
        for name, seen in known.readers.items():
            for choice, end in seen.next.items():
                there = tokens.get(str(choice), [])
                if seen.end == "succeeded" and end != len(there):
                    yield self._broken("no token is lost", f"{name} of {job} saw {end} of {len(there)} tokens")
                for place in range(seen.begins[choice], min(end, len(there))):
                    if there[place] != known.tokens[choice][place]:
                        message = f"{job}: token {place} is {there[place]}, and {known.tokens[choice][place]} was shown"
                        yield self._broken("a token that was shown stays", message)
                        break


def main() -> None:
    """Check a file. The exit status is 1 if it breaks a promise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path, help="a history as JSON Lines; - is stdin")
    parser.add_argument(
        "--as", dest="at_least", choices=LEVELS, default="memory", help="check as if all had asked this"
    )
    args = parser.parse_args()
    lines = sys.stdin if str(args.file) == "-" else args.file.read_text().splitlines()
    found = Checker(args.at_least).check(lines)
    for one in found:
        print(one)
    print(f"{len(found)} broken promises", file=sys.stderr)
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
