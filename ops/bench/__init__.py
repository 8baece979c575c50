"""Benchmarks of penstock beside other engines; README.md in this folder says how to run and read them.

Never a test: nothing here passes or fails.
"""
