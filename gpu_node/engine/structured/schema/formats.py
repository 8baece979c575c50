"""Formats of strings whose pattern in the library allows more than the standards: a pattern beside it for each."""

from __future__ import annotations

ENFORCED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats that answers keep to. Any other `format` is an annotation, as the standard has it."""
_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
"""The numbers up to 99 that four divides, without 0."""
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
"""Not 0000: the calendars of most languages begin with the year 1."""
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
"""Without leap seconds: which minutes have one is known only half a year ahead, so most readers refuse them."""
PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[tT]{_TIME}$", "time": f"^{_TIME}$", "hostname": "^.{1,253}$"}
