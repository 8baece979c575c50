"""Benchmarks: `PYTHONPATH=ops python -m bench` (or `make bench`); results go to ops/bench/results/.

`workload` says what is asked, `runners` runs it on one engine in a process of its own, `machine` says where and
whether other load spoiled the run, `report` writes JSON and a table. Never a test: nothing here passes or fails.
"""
