"""`penstock doctor` says whether connections can outlive their gateway, and how many."""

from __future__ import annotations

import resource

import pytest

from penstock.cli.machine.kept_connections import FEW_SLOTS, check_kept_connections, judge_kept


def test_this_machine_can_keep_as_many_connections_as_it_may_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5000, 5000))
    check = check_kept_connections()
    assert check.level == "ok" and "4872 connections" in check.finding


@pytest.mark.parametrize(
    ("slots", "has_counts", "advice"),
    [(None, False, "Linux"), (9000, False, "4.19"), (FEW_SLOTS - 1, True, "LimitNOFILE"), (0, True, "LimitNOFILE")],
)
def test_what_cannot_be_kept_is_named_with_a_remedy(slots: int | None, has_counts: bool, advice: str) -> None:
    check = judge_kept(slots, has_counts=has_counts)
    assert check.level == "warn" and advice in check.advice
