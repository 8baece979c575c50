"""The Python client: submits jobs to the queue and streams their tokens; needs neither torch nor a web framework.

It logs what it meets, and says nothing where its user has no logging set up.
"""

import logging

from penstock.producer.client.client import AsyncClient
from penstock.producer.client.job import AsyncJob
from penstock.producer.client.settings import ClientSettings
from penstock.producer.client.stats import ClientStats
from penstock.producer.client.sync import Client, Job

__all__ = ["AsyncClient", "AsyncJob", "Client", "ClientSettings", "ClientStats", "Job"]

logging.getLogger("penstock").addHandler(logging.NullHandler())
