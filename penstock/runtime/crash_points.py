"""Moments at which a process may die without anything being lost: names for the tests that kill it there."""

from __future__ import annotations


def point(when: str, what: str) -> None:
    """Says that this process is `before` or `after` something; nothing happens. Fault tests put their function here."""
