"""Files of requests in, files of results out: in this process, or in a Celery worker.

`runner.py` does the work and knows nothing of Celery; `tasks.py` is the door that Celery offers to it.
"""
