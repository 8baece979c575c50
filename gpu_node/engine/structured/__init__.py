"""Structured outputs: grammars are compiled and masks are computed in processes of their own, which limits may kill.

`host.py` is the node's side. It starts one template process (`template.py`), which loads the tokenizer once and forks
workers (`worker.py`): one for cheap grammars, one for costly ones, and one for each grammar that is tried out. Child
processes import neither numpy nor the rest of the engine.
"""
