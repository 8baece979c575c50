"""`penstock batch`: files of requests, answered in this process, in a Celery worker, or by a server."""
