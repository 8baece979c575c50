"""The page of results names every client, and keeps the rows of clients that did not run."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients import page
from clients.catalog import CLIENTS
from clients.running import Report

PASSED = Report(CLIENTS[1], versions={"a": "1.0", "b": "2"}, num_passed=3)
PAGE = f"before\n{page.BEGIN}\n\n| client | versions |\n|---|---|\n| {CLIENTS[0].title} | old |\n{page.END}\nafter\n"


def test_page_has_a_result_of_every_client() -> None:
    table = page.PAGE.read_text().split(page.BEGIN)[1].split(page.END)[0]
    assert [*page.rows_of(table)] == [client.title for client in CLIENTS]


def test_rows_of_clients_that_did_not_run_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "CLIENTS.md"
    written.write_text(PAGE)
    monkeypatch.setattr(page, "PAGE", written)
    page.write([PASSED])
    rows = [line for line in written.read_text().splitlines() if line.startswith("| ")][1:]
    assert rows == [
        f"| {CLIENTS[0].title} | old |",
        f"| {CLIENTS[1].title} | a 1.0, b 2 | {CLIENTS[1].covers} | 3 of 3 |",
    ]


def test_report_without_a_check_did_not_pass() -> None:
    assert not Report(CLIENTS[0]).passed
    assert not Report(CLIENTS[0], num_passed=2, problems={"stream": "no events"}).passed
    assert PASSED.passed
