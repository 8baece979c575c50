"""`python -m faults.mutants`: each guard of the queue is taken away in a copy of the source, and its tests must fail.

One guard at a time. If a mutant survives, no test would notice the loss of that guard. If its text is no longer found,
the guard has moved and this list must follow.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from faults.tools.report import record

ROOT = Path(__file__).parents[2]
SCRIPTS = "penstock/queue/scripts"
TESTS = "tests/queue/scripts/test_"
_COPIED = ("penstock", "producer", "gateway", "gpu_node", "kernels", "tests", "ops", "pyproject.toml")
_FAILED = 1
"""pytest's exit status when tests ran and some failed."""


@dataclass(frozen=True)
class Mutant:
    """A guard's text in one script, what stands there instead, and the tests that hold it."""

    guard: str
    file: str
    text: str
    instead: str
    tests: str


MUTANTS = (
    Mutant("lease compare", "prelude", " and job.lease == lease", "", "emit.py"),
    Mutant("index compare", "emit", "if index > length then", "if false then", "emit.py"),
    Mutant("call replay", "take", "if call == last.call then", "if false then", "take.py"),
    Mutant("sweep guard", "sweep", "now - last > config.lease_ms / 2", "false", "sweep.py"),
    Mutant(
        "held ids",
        "heartbeat",
        "elseif tonumber(string.match(job.lease, '^(%d+):')) <= answered then",
        "elseif false then",
        "sweep.py",
    ),
    Mutant("silence of a predecessor", "succeed", "if silent >= silence then", "if true then", "succeed.py"),
    Mutant("the dead stay dead", "sweep", "'(0', '+inf'", "'-inf', '+inf'", "succeed.py"),
    Mutant(
        "a seat's holder",
        "prelude",
        "if string.match(seats[at + 1], '%S+$') == node then",
        "if true then",
        "succeed.py",
    ),
    Mutant("loss counting", "sweep", "elseif not string.find(nodes, entry, 1, true) then", "else", "sweep.py"),
    Mutant("reservation expiry", "take", " and tonumber(till) > now then", " then", "capacity.py"),
    Mutant("virtual time entry", "queue", "math.max(owed, now), job.tenant", "owed, job.tenant", "policy.py"),
    Mutant("idempotency body", "submit", "job.body ~= body or ", "", "submit.py"),
    Mutant("tenant check", "attach", " or job.tenant ~= tenant", "", "readers.py"),
    Mutant("terminal once", "cancel", "if is_terminal(job.state) then return job.state end", "", "end.py"),
    Mutant(
        "each asked once", "take", "is_listed(lacks, node) and may_be_elsewhere(job, lacks)", "false", "adapters.py"
    ),
    Mutant(
        "bound of waiting tasks",
        "submit",
        "is_light and redis.call('ZCARD'",
        "false and redis.call('ZCARD'",
        "tasks.py",
    ),
    Mutant("tasks need no KV capacity", "submit", "if not is_light and queued > 0", "if queued > 0", "tasks.py"),
    Mutant(
        "tasks need none of their tenant's either",
        "submit",
        "if not is_light and tenant_queued",
        "if tenant_queued",
        "tasks.py",
    ),
    Mutant("tasks take no tokens of a rate", "submit", "if is_light then per_minute.tokens = 0 end", "", "tasks.py"),
    Mutant("debt at another rate", "submit", "tonumber(stated_rate) ~= ms_per_unit", "false", "limits.py"),
    Mutant(
        "debt of the other unit",
        "submit",
        "  rate_until = math.max(rate_until, due)",
        "  if limit_of_unit > 0 then rate_until = math.max(rate_until, due) end",
        "limits.py",
    ),
    Mutant(
        "corrected debt at another rate", "queue", "tonumber(stated or '') or ms_per_token", "ms_per_token", "usage.py"
    ),
    Mutant("refund beside an unpaid debt", "queue", "tonumber(jobs or '') or 0) - now)", "0) - now)", "usage.py"),
    Mutant("tasks of a full node", "take", "if task_slots == 0 then return true end", "", "tasks.py"),
    Mutant("tasks hold no KV cache", "take", "is_task(job) and 0 or ", "", "tasks.py"),
    Mutant("a node for an isolated job", "take", "if not is_for_isolated then", "if true then", "tasks.py"),
    Mutant("tasks that another node took", "take", "or job.state ~= 'queued') then", ") then", "tasks.py"),
    Mutant("stale tasks are forgotten", "take", "ZREM', P .. ':tasks', id", "ZREM', P .. ':tasks', ''", "tasks.py"),
    Mutant(
        "each job ends once", "take", "over[#over + 1], tried[job.id] = job, true", "over[#over + 1] = job", "tasks.py"
    ),
    Mutant("taken tasks leave their index", "queue", "redis.call('ZREM', P .. ':tasks', job.id)", "", "tasks.py"),
    Mutant(
        "returned tasks enter it again",
        "queue",
        "redis.call('ZADD', P .. ':tasks'",
        "redis.call('ZREM', P .. ':tasks'",
        "tasks.py",
    ),
    Mutant("tenant of a response", "delete_response", "or job.tenant ~= tenant ", "", "responses.py"),
    Mutant("only stored responses", "delete_response", "or not is_stored ", "", "responses.py"),
    Mutant("deleted open response", "delete_response", "'cancel', '1')", "'cancel', '')", "responses.py"),
    Mutant("bytes of a deleted response", "delete_response", "or name == 'response'", "", "responses.py"),
    Mutant("a response is read again", "deliver", " or response_life(job)", "", "responses.py"),
    Mutant("life of a response's result", "queue", "if keep then return keep end", "", "responses.py"),
    Mutant(
        "life of a response's record",
        "queue",
        "if keep then redis.call('PEXPIRE'",
        "if false then redis.call('PEXPIRE'",
        "responses.py",
    ),
    Mutant("log in place of a result", "queue", "result_bytes == 0 and response_life(job) or 0", "0", "responses.py"),
    Mutant("bound of past leases", "queue", "if count > MAX_PAST_LEASES then", "if false then", "job_ledger.py"),
    Mutant("first take", "take", "job.revision == '' and 'taken' or 'retaken'", "'taken'", "job_ledger.py"),
    Mutant(
        "expired jobs leave their list",
        "queue",
        "if id then redis.call('ZREM', P .. ':jobs:'",
        "if false then redis.call('ZREM', P .. ':jobs:'",
        "job_ledger.py",
    ),
    Mutant(
        "bytes of a moved record",
        "queue",
        "(has_moved and MOVED_RECORD_BYTES or RECORD_BYTES)",
        "RECORD_BYTES",
        "stored_bytes.py",
    ),
    Mutant("life of hourly usage", "queue", "USAGE_HOURS * HOUR_MS, job", "USAGE_DAYS * DAY_MS, job", "usage.py"),
    Mutant("positions of delayed jobs", "positions", " or DELAYED_JOB end", " or 0 end", "positions.py"),
    Mutant("positions of begun jobs", "positions", " and first == '' and", " and", "positions.py"),
    Mutant(
        "progress is not stored",
        "emit",
        "if progress ~= '' then push(job, progress)",
        "if progress ~= '' then redis.call('RPUSH', log, progress)",
        "emit.py",
    ),
    Mutant("readers guard", "prelude", "or not can_trust_heartbeats(config, now) then", "then", "readers.py"),
)


class Copy:
    """The source in a folder of its own, and tests that run on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)
        # Not the folder itself, where `kernels` would hide a package of that name.
        (folder / "path").mkdir()
        (folder / "path" / "penstock").symlink_to(folder / "penstock")

    def test(self, files: set[str]) -> int:
        """pytest's exit status."""
        env = os.environ | {"PYTHONPATH": str(self._folder / "path"), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
        tests = sorted(TESTS + file for file in files)
        return subprocess.run([*command, *tests], cwd=self._folder, env=env, capture_output=True).returncode

    def kills(self, mutant: Mutant) -> bool:
        """Whether the mutant's tests notice that its guard is gone."""
        path = self._folder / SCRIPTS / f"{mutant.file}.lua"
        text = path.read_text()
        if text.count(mutant.text) != 1:
            raise SystemExit(f"{mutant.guard}: {mutant.text!r} occurs {text.count(mutant.text)} times in {path.name}")
        try:
            path.write_text(text.replace(mutant.text, mutant.instead))
            return self.test({mutant.tests}) == _FAILED
        finally:
            path.write_text(text)


def main() -> int:
    """Tries all mutants, or those named; answers how many live."""
    parser = argparse.ArgumentParser()
    parser.add_argument("guards", nargs="*", help="all when none is named")
    names = parser.parse_args().guards
    mutants = [mutant for mutant in MUTANTS if not names or mutant.guard in names]
    alive = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder))
        if copy.test({mutant.tests for mutant in mutants}) != 0:
            raise SystemExit("the tests fail without any mutant")
        for mutant in mutants:
            killed = copy.kills(mutant)
            alive += [] if killed else [mutant]
            print(f"{'killed' if killed else 'ALIVE'}  {mutant.guard}  ({TESTS}{mutant.tests})", flush=True)
    if not names and not alive:
        record(
            "Mutants: guards taken away, one at a time",
            "all",
            {"killed": len(mutants) - len(alive), "of": len(mutants)},
        )
    return len(alive)


if __name__ == "__main__":
    sys.exit(main())
