"""`python -m hostile.report`: run the catalogue and write the results to ops/bench/results/hostile.md.

`--label` names the run in hostile.json, so that two versions of the code can be compared. The page has `after`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from hostile.attacks import ATTACKS, TABLE, Attack
from hostile.campaign import Verdict, carry_out
from hostile.stack import running_stack

from penstock.cli.demo_model import demo_model

RESULTS = Path(__file__).parents[2] / "ops" / "bench" / "results"
SHOWN = "after"
_HEAD = """# Hostile tenants

`make hostile`: each attack comes from a tenant of its own, beside two streams of another one on the same gateway and
node (the demo model). *Gap*: the time between two events of the neighbor, p99 undisturbed → during the attack / after
it, and the longest. ⚖: honest work. `hostile.json` has hold times, memory and earlier runs too.
"""


def run_one(attack: Attack, seconds: float | None, rounds: int) -> Verdict:
    """Run one attack on a new stack."""
    with running_stack(model=demo_model(), **attack.stack) as stack:
        return asyncio.run(carry_out(stack, attack, seconds=seconds, rounds=rounds))


def record(label: str, verdict: Verdict, results: Path) -> None:
    """Replace one row of one column."""
    path = results / "hostile.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known.setdefault(verdict.attack, {})[label] = verdict.as_dict()
    path.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    (results / "hostile.md").write_text(_HEAD + _table(known))


def _table(known: dict[str, dict[str, Any]]) -> str:
    ordered = [*TABLE, *(name for name in ATTACKS if name not in TABLE)]
    head = ["attack", "p99 gap ms", "longest s", "the attacker got"]
    lines = list[list[str]]()
    for name in ordered:
        if (verdict := known.get(name, {}).get(SHOWN)) is not None:
            mark = "⚖ " if ATTACKS[name].load else ""
            lines.append([mark + ATTACKS[name].what.replace("|", "\\|"), *_cells(Verdict(**verdict))])
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"\n| {' | '.join(head)} |\n{'|---' * len(head)}|\n{rows}"


def _cells(verdict: Verdict) -> list[str]:
    got = [f"{count} × {label}" for label, count in sorted(verdict.answers.items(), key=lambda item: -item[1])[:3]]
    got += [f"{figure}: {value:.2f}" for figure, value in verdict.figures.items()]
    return [
        f"{_ms(verdict.quiet_p99_s)} → {_ms(verdict.attacked_p99_s)} / {_ms(verdict.afterwards_p99_s)}",
        f"{verdict.longest_gap_s:.2f}",
        ", ".join(got),
    ]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("attacks", nargs="*", help=f"names of {', '.join(ATTACKS)}; none: those of the table; all: all")
    parser.add_argument("--label", default=SHOWN)
    parser.add_argument("--seconds", type=float, help="for how long each attack sends new requests")
    parser.add_argument("--rounds", type=int, default=1, help="how often to alternate quiet and attack")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    names = ATTACKS if args.attacks == ["all"] else args.attacks or TABLE
    for name in names:
        verdict = run_one(ATTACKS[name], args.seconds, args.rounds)
        record(args.label, verdict, args.results)
        print(f"{name}: {' | '.join(_cells(verdict))}", flush=True)
        for line in (*verdict.problems(ATTACKS[name]), *verdict.holders[:3]):
            print(f"    {line}", flush=True)


if __name__ == "__main__":
    main()
