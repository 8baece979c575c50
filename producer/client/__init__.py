"""The Python client: submit jobs to the queue and stream their tokens, without torch or a web framework.

It writes log messages only if the application has configured logging.
"""

import logging

from penstock.producer.client.client import AsyncClient
from penstock.producer.client.job import AsyncJob
from penstock.producer.client.settings import ClientSettings, ClientStats
from penstock.producer.client.sync import Client, Job

__all__ = ["AsyncClient", "AsyncJob", "Client", "ClientSettings", "ClientStats", "Job"]

logging.getLogger("penstock").addHandler(logging.NullHandler())
