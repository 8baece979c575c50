"""When requests arrive."""

from __future__ import annotations

import math
from itertools import accumulate
from random import Random


def arrival_times(num_requests: int, rate_per_s: float, burstiness: float, random: Random) -> list[float]:
    """Return when each request is due, in seconds after the start.

    The times between arrivals have a gamma distribution of shape `burstiness` and mean 1 / `rate_per_s`. With
    burstiness 1 the arrivals are a Poisson process; below 1 they come in bursts, above 1 they are more even. An
    infinite rate makes all due at once.
    """
    if math.isinf(rate_per_s):
        return [0.0] * num_requests
    scale = 1 / (rate_per_s * burstiness)
    return list(accumulate(random.gammavariate(burstiness, scale) for _ in range(num_requests)))
