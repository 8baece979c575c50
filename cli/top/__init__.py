"""`penstock top`: what pools, nodes and tenants do, each second on the terminal.

`reader.py` reads Redis and computes rates; `sets.py` adds open batches and tags; `commands.py` draws them and repeats
that until `q`.
"""
