"""Structured outputs: grammars are compiled and masks computed in separate processes, which limits may kill.

`host.py` is the node's side. It starts one template process (`template.py`), which loads the tokenizer once. That
process forks the workers (`worker.py`): one for cheap grammars, one for costly ones, and one for each trial of a new
grammar. Child processes import neither numpy nor the rest of the engine.
"""
