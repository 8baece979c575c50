"""Print the findings of the language check, or lower the allowed numbers: `python -m language [FOLDER …]`."""

from __future__ import annotations

import argparse
import sys

from language.allowed import FILE, allowed, problem_of_lowering, toml_of
from language.passages import ROOT
from language.rules import RULES, all_findings, counts_of


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="make language")
    parser.add_argument("paths", nargs="*", help="print the findings in these folders and files only")
    parser.add_argument("--rule", choices=RULES, help="print the findings of one rule only")
    parser.add_argument("--counts", action="store_true", help="print how many each folder has instead")
    parser.add_argument("--lower", action="store_true", help="write the counts down; refused where a total has grown")
    given = parser.parse_args()
    if given.lower:
        _lower()
    elif given.counts:
        _print_counts()
    else:
        for finding in all_findings():
            place = str(finding.passage.path.relative_to(ROOT))
            if given.rule in (None, finding.rule) and (not given.paths or place.startswith(tuple(given.paths))):
                print(finding)


def _lower() -> None:
    counts = counts_of(all_findings())
    if problem := problem_of_lowering(allowed(), counts):
        sys.exit(problem)
    FILE.write_text(toml_of(counts))


def _print_counts() -> None:
    counts = counts_of(all_findings())
    folders = sorted({folder for of_rule in counts.values() for folder in of_rule})
    print(f"{'':30}" + "".join(f"{rule:>9}" for rule in RULES))
    for folder in folders:
        print(f"{folder:30}" + "".join(f"{counts[rule].get(folder, 0):9}" for rule in RULES))
    print(f"{'all':30}" + "".join(f"{sum(counts[rule].values()):9}" for rule in RULES))


if __name__ == "__main__":
    main()
