"""`penstock top`: what pools, nodes and tenants do, each second on the terminal.

`reader.py` reads Redis and computes rates, `frame.py` holds what was read, `screen.py` draws it, and `live.py` repeats
that until `q`.
"""
