"""The Celery app of the campaigns: that of penstock, with a schedule. `celery -A faults.tools.scheduled_app`."""

import os
from datetime import timedelta

from faults.tools.batch_workers import EVERY_VARIABLE, MODEL_VARIABLE

from penstock.producer.batch.app import app

_ASKED = {"prompt": "each second", "max_tokens": 4, "model": os.environ[MODEL_VARIABLE]}
_EVERY = timedelta(seconds=float(os.environ[EVERY_VARIABLE]))

app.conf.beat_schedule = {"often": {"task": "penstock.generate", "schedule": _EVERY, "kwargs": _ASKED}}
