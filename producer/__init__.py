"""Everything that puts jobs into the queue and reads their answers.

`client/` is the Python client, sync and async; `batch/` turns files of requests into files of results; `openai/` holds
the shapes that files and the HTTP API share. What serves HTTP belongs to `gateway`, what runs a model to `gpu_node`,
and what all processes agree on to `contract`.
"""

if __name__ != "penstock.producer":
    raise ImportError(
        f"import penstock.producer, not {__name__}: keep the repository's root off sys.path (PYTHONSAFEPATH=1)"
    )
