"""Write into docs/MODELS.md which of transformers' classes its runner computes: `python -m docs_site.model_classes`.

Each class is tried with a small random model, which takes some minutes in all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from fixtures.small_transformers import classes, outcome_of

PAGE = Path(__file__).parents[2] / "docs" / "MODELS.md"
BEGIN, END = "<!-- classes -->", "<!-- end of classes -->"


def main() -> None:
    """Try all classes and write the table."""
    outcomes: dict[str, str] = {}
    for architecture in classes():
        with tempfile.TemporaryDirectory() as folder:
            outcomes[architecture] = outcome_of(architecture, Path(folder))
    PAGE.write_text(with_table(PAGE.read_text(), outcomes))


def with_table(page: str, outcomes: Mapping[str, str]) -> str:
    """Return the page with a table of outcomes: "" for a class that is computed, else why it is not."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join((before + BEGIN, "", *_rows(outcomes), "", END + after))


def _rows(outcomes: Mapping[str, str]) -> Iterator[str]:
    yield "| class | runner transformers |"
    yield "|---|---|"
    for architecture, outcome in sorted(outcomes.items(), key=lambda pair: pair[0].lower()):
        yield f"| `{architecture}` | {outcome or 'computes it'} |"


if __name__ == "__main__":
    main()
