"""`penstock bench serve`: load on any server with OpenAI's API, and what its answers took. It needs no Redis.

`commands.py` runs a load with the options of `load.py`, which plans the requests from `prompts.py`, sends them over
`connection.py` to `target.py`, and measures the answers. `summary.py` computes and prints the result, and `plot.py`
draws it.
"""
