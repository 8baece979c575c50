"""The events of a job's ledger are in order of time and name the nodes."""

from __future__ import annotations

from penstock.contract.output import JobLedger, LedgerEvent, PastLease


def test_job_that_waits_has_one_event() -> None:
    assert JobLedger("queued", 5).events() == [LedgerEvent("queued", 5)]


def test_events_of_one_millisecond_keep_their_order() -> None:
    leases = (PastLease("a", 5, 5, "lost"), PastLease("b", 5, 5, "lacking"))
    ledger = JobLedger(
        "succeeded", 5, 5, 5, 5, node_id="c", retaken_ms=5, past_leases=leases, num_past_leases=2, preemptions=0
    )
    assert [(event.event, event.node_id) for event in ledger.events()] == [
        ("queued", ""),
        ("taken", "a"),
        ("node_lost", "a"),
        ("moved", "b"),
        ("given_back", "b"),
        ("moved", "c"),
        ("first_token", ""),
        ("finished", "c"),
    ]


def test_first_token_is_in_order_of_time_in_the_ledger() -> None:
    lease = PastLease("a", 10, 30, "pressure")
    ledger = JobLedger("running", 5, 10, 20, node_id="a", retaken_ms=40, past_leases=(lease,), num_past_leases=1)
    assert [(event.event, event.at_ms) for event in ledger.events()] == [
        ("queued", 5),
        ("taken", 10),
        ("first_token", 20),
        ("preempted", 30),
        ("taken", 40),
    ]
