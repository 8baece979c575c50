"""Batches: a file of requests becomes a file of results, in this process or in a Celery worker.

`runner.py` does the work and imports no Celery; `tasks.py` wraps it as Celery tasks.
"""
