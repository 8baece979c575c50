"""`penstock top`: what pools, nodes and tenants do, each second on the terminal.

`reader.py` reads Redis and computes rates, `screen.py` draws them, and `commands.py` repeats that until `q`.
"""
