"""Scrapes of a gateway that show Redis as it is now."""

from __future__ import annotations

import re
import time

import httpx
from fakes.waiting import wait_until

_AGE = re.compile(r"^penstock_redis_read_age_seconds\{.*\} (\S+)$", re.MULTILINE)


def scraped(http: httpx.Client) -> str:
    """Return the metrics of a gateway that has read each of its Redis since this call began.

    A scrape waits only a moment for the look at Redis that it asks for. Then it shows what was read before.
    """
    began_s = time.monotonic()

    def look() -> tuple[str, bool]:
        asked_s = time.monotonic()
        text = http.get("/metrics").raise_for_status().text
        ages_s = [float(age) for age in _AGE.findall(text)]
        return text, bool(ages_s) and max(ages_s) <= asked_s - began_s

    return wait_until(look, lambda seen: seen[1])[0]
