"""The open streams of completions (`GET /v1/jobs/events`): their limit, and how far behind they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from penstock.contract.errors import BusyError

MAX_FEEDS_OF_TENANT = 64
"""Streams of completions that one tenant may have open at one gateway. Each reads Redis a few times a second."""
_FEED_RETRY_AFTER_MS = 5000


@dataclass(slots=True, eq=False)
class FeedPlace:
    """How far one stream of completions has come."""

    unsent_since_ms: int | None = None
    """When the oldest job ended whose completion was read and is not sent yet; None: there is none."""


class OpenFeeds:
    """The streams of completions that are open at this gateway."""

    def __init__(self) -> None:
        # Keyed by tenant; no text of a request.
        self._of_tenant: dict[str, set[FeedPlace]] = {}

    @contextmanager
    def counting(self, tenant: str) -> Iterator[FeedPlace]:
        """Count one more stream in the block. Raises BusyError if the tenant has too many."""
        places = self._of_tenant.setdefault(tenant, set())
        if len(places) >= MAX_FEEDS_OF_TENANT:
            message = (
                f"this tenant has {MAX_FEEDS_OF_TENANT} streams of /v1/jobs/events open at this gateway, the limit"
            )
            raise BusyError(message, retry_after_ms=_FEED_RETRY_AFTER_MS, code="too_many_feeds")
        place = FeedPlace()
        places.add(place)
        try:
            yield place
        finally:
            places.discard(place)
            if not places:
                self._of_tenant.pop(tenant, None)

    def metrics(self, now_s: float) -> Iterator[Metric]:
        """Yield the number of open streams, and how far behind the slowest is. `now_s` is Redis's time."""
        places = [place for of_tenant in self._of_tenant.values() for place in of_tenant]
        yield GaugeMetricFamily("penstock_completion_feeds", "Open streams of completions.", value=len(places))
        now = int(now_s * 1000)
        since = [place.unsent_since_ms for place in places if place.unsent_since_ms is not None]
        text = "Seconds since the end of the oldest job whose completion a reader has not taken yet; of all readers."
        lag_s = max(0, now - min(since, default=now)) / 1000
        yield GaugeMetricFamily("penstock_completion_feed_lag_seconds", text, value=lag_s)
