"""The app for `celery -A penstock.producer.batch.app worker`. Its settings come from the environment."""

import sys

from penstock.contract.errors import EXIT_WRONG_USE, ConfigError
from penstock.producer.batch.celery_app import make_app
from penstock.producer.batch.settings import CelerySettings

try:
    app = make_app(CelerySettings.load())
except ConfigError as wrong:
    # Celery would print a long traceback before the message.
    sys.stderr.write(f"penstock: {wrong.message}\n")
    sys.exit(EXIT_WRONG_USE)
