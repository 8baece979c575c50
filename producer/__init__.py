"""Submit jobs to the queue and read their answers.

`client/` is the Python client, sync and async. `batch/` turns files of requests into files of results. `openai/` has
the OpenAI bodies and answers that files and the HTTP API share. HTTP itself belongs to `gateway`, models to `gpu_node`,
Redis to `queue`, and records and errors to `contract`.
"""

if __name__ != "penstock.producer":
    raise ImportError(
        f"import penstock.producer, not {__name__}: keep the repository's root off sys.path (PYTHONSAFEPATH=1)"
    )
