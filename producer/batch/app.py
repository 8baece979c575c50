"""What a worker is started with: `celery -A penstock.producer.batch.app worker`. Settings come from the environment."""

from penstock.producer.batch.celery_app import make_app
from penstock.producer.batch.settings import CelerySettings

app = make_app(CelerySettings.load())
