"""The table of results in docs/CLIENTS.md."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from clients.catalog import CLIENTS
from clients.running import Report

PAGE = Path(__file__).resolve().parents[2] / "docs/CLIENTS.md"
BEGIN, END = "<!-- begin: made by `make clients` -->", "<!-- end -->"
_HEAD = "| client | versions | what is checked | checks passed |\n|---|---|---|---|\n"


def write(reports: Iterable[Report]) -> None:
    """Replace the rows of these reports. Rows of other clients stay."""
    before, rest = PAGE.read_text().split(BEGIN)
    table, after = rest.split(END)
    rows = rows_of(table) | {report.client.title: row_of(report) for report in reports}
    ordered = "".join(rows[client.title] for client in CLIENTS if client.title in rows)
    PAGE.write_text(f"{before}{BEGIN}\n\n{_HEAD}{ordered}\n{END}{after}")


def rows_of(table: str) -> dict[str, str]:
    """Return the rows of a table by their first cell."""
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return {row.split("|")[1].strip(): f"{row}\n" for row in rows}


def row_of(report: Report) -> str:
    """Return the row of a report."""
    versions = ", ".join(f"{package} {version}" for package, version in report.versions.items())
    result = f"{report.num_passed} of {report.num_checks}"
    return f"| {report.client.title} | {versions} | {report.client.covers} | {result} |\n"
