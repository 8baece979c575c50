"""Print the findings of the language check: `python -m language [FOLDER …]`."""

from __future__ import annotations

import argparse

from language.passages import ROOT
from language.rules import ADVICE, RULES, all_findings


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="make language")
    parser.add_argument("paths", nargs="*", help="print the findings in these folders and files only")
    parser.add_argument("--rule", choices=[*RULES, ADVICE], help="print the findings of one rule only")
    given = parser.parse_args()
    for finding in all_findings():
        place = str(finding.passage.path.relative_to(ROOT))
        if given.rule in (None, finding.rule) and (not given.paths or place.startswith(tuple(given.paths))):
            print(finding)


if __name__ == "__main__":
    main()
