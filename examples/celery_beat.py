"""Recurring work: Celery's scheduler sends a task at each time of a schedule, and a worker answers it.

Both run in one process: `cd examples; celery -A celery_beat worker --beat`. One scheduler serves all workers. Run as a
program, it prints the newest answer.
"""

import os
from datetime import timedelta

from celery import Celery  # type: ignore[import-untyped]

from penstock import Client, redis_url_of
from penstock.celery import install

EVERY_S = float(os.environ.get("EVERY_S", "3600"))
BROKER = os.environ.get("BROKER_URL") or redis_url_of().replace("unix://", "redis+socket://", 1)
app = Celery("weather", broker=BROKER, backend=BROKER)
install(app)
# With `ttl_s`, a task that could not begin before the next one is due expires.
WEATHER = {"prompt": "The weather of the next hour:", "max_tokens": 16, "ttl_s": EVERY_S}

app.conf.beat_schedule = {
    "weather": {"task": "penstock.generate", "schedule": timedelta(seconds=EVERY_S), "kwargs": WEATHER}
}


if __name__ == "__main__":
    with Client() as client:
        for job in client.jobs(state="succeeded", limit=1).jobs:
            print(client.result(job.job_id).text)
