"""`penstock bench serve`: load on any server with OpenAI's API, and what its answers took. It needs no Redis.

`commands.py` reads the options. `plan.py` makes the requests from `traces.py`, `datasets.py`, `lengths.py` and
`arrivals.py`. `load.py` sends them over `connection.py`, and `answer.py` reads the streams. `summary.py` computes the
result, which `table.py`, `plot.py` and `--output-json` show.
"""
