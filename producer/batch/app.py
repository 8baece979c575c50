"""The app for `celery -A penstock.producer.batch.app worker`. Its settings come from the environment."""

import os
import sys

from penstock.contract.errors import EXIT_WRONG_USE, ConfigError
from penstock.producer.batch.celery_app import make_app
from penstock.producer.batch.settings import CelerySettings
from penstock.runtime.logging import tell_end

try:
    app = make_app(CelerySettings.load())
except ConfigError as wrong:
    # Celery would print a long traceback before the message.
    tell_end(wrong.message, as_json=os.environ.get("PENSTOCK_LOG_FORMAT") == "json")
    sys.exit(EXIT_WRONG_USE)
